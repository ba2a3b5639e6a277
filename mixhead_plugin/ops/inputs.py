"""One record carries the inputs of an attention call to every implementation."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from mixhead_plugin.ops.low_rank import LowRank


class AttentionInputs(NamedTuple):
    """The arguments of one call of `ops.attention`, and the seed of its dropout.

    Build it by keywords. DIMENSIONS has the shapes.

    The tensors come first, and without nesting: relative scores are two of them, the factors of a
    mixing three. So the record is also the list of arguments of an operator of torch, which takes
    no records; and TorchScript compiles it. A call has either `mixing`, or all three factors, or
    none of them.
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
    mixing_left: Tensor | None = None
    mixing_right: Tensor | None = None
    mixing_diagonal: Tensor | None = None
    seed: Tensor | None = None  # None until an implementation draws one
    normalizer: str = "softmax"
    causal: bool = False
    dropout_p: float = 0.0
    scale: float = 1.0  # of query . key

    def operands(self) -> dict[str, Tensor]:
        """Return by name the tensors that are not None, without masks and seed."""
        return self._of_names(DIMENSIONS)

    def tensors(self) -> dict[str, Tensor]:
        """Return by name the tensors that are not None, with masks, without seed."""
        return self._of_names((*DIMENSIONS, "attn_mask", "key_padding_mask"))

    def _of_names(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors of some fields by name; those that are None are left out."""
        tensors = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def mixes(self) -> bool:
        """Return whether heads of weights mix, by a matrix or by its factors."""
        return self.mixing is not None or self.mixing_left is not None

    def factors(self) -> LowRank | None:
        """Return the factors of M; None where there is M itself, or no mixing."""
        if self.mixing_left is None or self.mixing_right is None or self.mixing_diagonal is None:
            return None
        return LowRank(self.mixing_left, self.mixing_right, self.mixing_diagonal)

    def matrix(self) -> Tensor | None:
        """Return M [H, H'] or [B, Nq, H, H'], built where there are factors; None without it."""
        factors = self.factors()
        return self.mixing if factors is None else factors.matrix()

    def with_mixing(self, mixing: Tensor | LowRank | None) -> "AttentionInputs":
        """Return a copy with another M, with its factors, or without mixing."""
        if isinstance(mixing, LowRank):
            return self._replace(
                mixing=None,
                mixing_left=mixing.left,
                mixing_right=mixing.right,
                mixing_diagonal=mixing.diagonal,
            )
        return self._replace(
            mixing=mixing, mixing_left=None, mixing_right=None, mixing_diagonal=None
        )

    def with_tensors(self, tensors: dict[str, Tensor]) -> "AttentionInputs":
        """Return a copy with some tensors replaced, by name."""
        return self._replace(**tensors)  # type: ignore[arg-type]


def _shapes(*texts: str) -> tuple[tuple[str, ...], ...]:
    """Return ("H", "Nk", "R") for "H Nk R", for each text."""
    return tuple(tuple(text.split()) for text in texts)


# The dimensions of every tensor that `operands` returns; several where it may have several shapes.
# P is the number of distances, Nq + Nk - 1. Checks of shapes and blocks of queries follow from this
# table.
DIMENSIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "query": _shapes("B H Nq D"),
    "key": _shapes("B H Nk D"),
    "value": _shapes("B H' Nk Dv"),
    "mixing": _shapes("H H'", "B Nq H H'"),
    "relative_query": _shapes("B H Nq R"),
    "relative_key": _shapes("H P R", "H Nk R"),
    "gain": _shapes("H P"),
    "sink": _shapes("H"),
    "score_mixing": _shapes("H H", "B Nq H H"),
    "mixing_left": _shapes("B Nq H rank"),
    "mixing_right": _shapes("B Nq H rank"),
    "mixing_diagonal": _shapes("B Nq H"),
}
