"""A block of a call: which sentences, heads, queries and keys it has."""

from dataclasses import dataclass
from functools import cache, cached_property

from torch import Tensor

from mixhead_plugin.ops.inputs import DIMENSIONS

WHOLE = slice(None)
OUTPUT = ("B", "H'", "Nq", "Dv")
# Which heads and positions the tensors have that are [B, heads, positions, size].
MATRICES = {
    "query": ("H", "Nq"),
    "key": ("H", "Nk"),
    "value": ("H'", "Nk"),
    "output": ("H'", "Nq"),
}
# Columns of a matrix. With fewer, MKL's products take up to four times as long, and torch's softmax
# six times. So `products.product` turns products round, and spans of keys are not shorter.
NARROW = 16


@dataclass(frozen=True)
class Block:
    """Some queries of some heads of a part of the batch, with the keys that any of them may see.

    Args:
        number: its number among the blocks of its call
        group: number of its part of the batch with its heads. Blocks of one group have other
            queries, and mostly the same keys and values.
        previous: number of the last block before it of the same group, -1 for none
        batch: sentences
        heads: heads of queries and keys
        mixed_heads: heads of values and outputs
        queries: positions of queries
        keys: positions of keys; all others are hidden from all these queries
        distances: distances from these queries to these keys, as `relative.py` counts them
        biased: part of `keys`; attn_mask is 0 outside of it
        padded: whether the padding hides any of `keys`
    """

    number: int
    group: int
    previous: int
    batch: slice
    heads: slice
    mixed_heads: slice
    queries: slice
    keys: slice
    distances: slice
    biased: slice
    padded: bool

    @property
    def is_first(self) -> bool:
        """Whether it is the first block of its group."""
        return self.previous < 0

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """The block's b, h, n and k."""
        return (
            self.batch.stop - self.batch.start,
            self.heads.stop - self.heads.start,
            self.queries.stop - self.queries.start,
            self.keys.stop - self.keys.start,
        )

    @cached_property
    def cuts(self) -> dict[str, slice]:
        """The block's part of each dimension that is cut."""
        return {
            "B": self.batch,
            "H": self.heads,
            "H'": self.mixed_heads,
            "Nq": self.queries,
            "Nk": self.keys,
            "P": self.distances,
        }

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Return a view of what belongs to the block; attn_mask stays whole.

        Args:
            name: name of an input, or "output"
            tensor: the input, its gradient, or the output
        """
        if name == "attn_mask":
            return tensor
        cuts = [self.cuts.get(dim, WHOLE) for dim in dimensions(name, tensor.dim())]
        return tensor[tuple(cuts)]

    def matrices(self, name: str, tensor: Tensor) -> Tensor:
        """Return the block's part of queries, keys, values or outputs as [b * h, n or k, D].

        With one sentence it is a view. This is the fast way: `part` and `flatten` take three times
        as long, and there are several of them in each block.
        """
        which_heads, which_positions = MATRICES[name]
        heads = self.cuts[which_heads]
        positions = self.cuts[which_positions]
        if self.batch.stop - self.batch.start == 1:
            return tensor[self.batch.start, heads, positions]
        return tensor[self.batch, heads, positions].flatten(0, 1)


@cache
def dimensions(name: str, number: int) -> tuple[str, ...]:
    """Return the dimensions of an input or of the output.

    Args:
        name: name of an input, or "output"
        number: how many dimensions it has, which tells shapes of one input apart. Both shapes of
            relative_key have three; its is the first one, because the plan adds rows of zeros.
    """
    shapes = (OUTPUT,) if name == "output" else DIMENSIONS[name]
    for dims in shapes:
        if len(dims) == number:
            return dims
    raise ValueError(f"{name} has {number} dimensions; must be one of {shapes}")
