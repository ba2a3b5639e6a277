"""One record carries the inputs of an attention call to every implementation."""

from typing import Dict, NamedTuple, Optional, Tuple

from torch import Tensor


class AttentionInputs(NamedTuple):
    """The arguments of one call of `ops.attention`, and the seed of its dropout; build it by keywords.

    The tensors come first, and the relative scores are two of them: operators of torch take no nested arguments.
    TorchScript compiles it too. DIMENSIONS has the shapes.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mixing: Optional[Tensor] = None
    attn_mask: Optional[Tensor] = None  # broadcastable to [B, H, Nq, Nk]
    key_padding_mask: Optional[Tensor] = None  # [B, Nk]
    relative_query: Optional[Tensor] = None
    relative_key: Optional[Tensor] = None
    gain: Optional[Tensor] = None
    sink: Optional[Tensor] = None
    score_mixing: Optional[Tensor] = None
    seed: Optional[Tensor] = None  # None until an implementation draws one
    normalizer: str = "softmax"
    causal: bool = False
    dropout_p: float = 0.0
    scale: float = 1.0  # of query . key

    def given(self) -> Dict[str, Tensor]:
        """Return by name the tensors that are not None, without masks and seed."""
        tensors = {name: getattr(self, name) for name in DIMENSIONS}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def with_tensors(self, tensors: Dict[str, Tensor]) -> "AttentionInputs":
        """Return a copy with other tensors, by name."""
        return self._replace(**tensors)  # type: ignore[arg-type]


# The dimensions of every tensor that `given` returns; several where it may have several shapes. P is the number of
# distances, Nq + Nk - 1. Checks of shapes and blocks of queries follow from this table.
DIMENSIONS: Dict[str, Tuple[Tuple[str, ...], ...]] = {
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
