"""One record carries the inputs of an attention call to every implementation."""

from typing import NamedTuple

from torch import Tensor


class AttentionInputs(NamedTuple):
    """The arguments of one call of `ops.attention`, and the seed of its dropout.

    Build it by keywords.

    The tensors come first, and the relative scores are two of them: operators of torch take no
    nested arguments. TorchScript compiles it too. DIMENSIONS has the shapes.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mixing: Tensor | None = None
    attn_mask: Tensor | None = None  # broadcastable to [B, H, Nq, Nk]
    key_padding_mask: Tensor | None = None  # [B, Nk]
    relative_query: Tensor | None = None
    relative_key: Tensor | None = None
    gain: Tensor | None = None
    sink: Tensor | None = None
    score_mixing: Tensor | None = None
    seed: Tensor | None = None  # None until an implementation draws one
    normalizer: str = "softmax"
    causal: bool = False
    dropout_p: float = 0.0
    scale: float = 1.0  # of query . key

    def given(self) -> dict[str, Tensor]:
        """Return by name the tensors that are not None, without masks and seed."""
        tensors = {name: getattr(self, name) for name in DIMENSIONS}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def with_tensors(self, tensors: dict[str, Tensor]) -> "AttentionInputs":
        """Return a copy with other tensors, by name."""
        return self._replace(**tensors)  # type: ignore[arg-type]


# The dimensions of every tensor that `given` returns; several where it may have several shapes. P
# is the number of distances, Nq + Nk - 1. Checks of shapes and blocks of queries follow from this
# table.
DIMENSIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    name: tuple(tuple(shape.split()) for shape in shapes.split(" or "))
    for name, shapes in {
        "query": "B H Nq D",
        "key": "B H Nk D",
        "value": "B H' Nk Dv",
        "mixing": "H H' or B Nq H H'",
        "relative_query": "B H Nq R",
        "relative_key": "H P R or H Nk R",
        "gain": "H P",
        "sink": "H",
        "score_mixing": "H H or B Nq H H",
    }.items()
}
