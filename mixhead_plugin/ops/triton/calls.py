"""A call as the kernels take it: pointers and strides, masks, constants and tiles."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.triton import programs, tuning
from mixhead_plugin.ops.triton.masks import has_spans, readable_mask, spans_of
from mixhead_plugin.ops.triton.programs import Grid
from mixhead_plugin.ops.triton.records import (
    Constants,
    Dropout,
    Masks,
    strided,
    strided_mixing,
)
from mixhead_plugin.ops.triton.rows import LOG2E
from mixhead_plugin.ops.triton.support import allows_tf32
from mixhead_plugin.ops.triton.tuning import Tile, power_of_2

Result = TypeVar("Result")


class Statistics(NamedTuple):
    """Numbers of each row of scores, kept for the backward pass; triton.md has the equations."""

    peak: Tensor  # the largest exponent, [B, H, Nq]
    factor: Tensor  # what the powers are multiplied by, [B, H, Nq]


class Call:
    """One call of the operator: what its kernels take, and how they are launched.

    Args:
        inputs: the inputs of the call
        tile_index: place of the tile to take in the list of each kernel, for a trial; None for the
            fastest
        poison: whether the memory for results holds NaN, so that a trial notices a number which no
            kernel writes
        short_strips: whether the strips of heads that mix are as short as they may be, so that a
            trial has several
    """

    def __init__(
        self,
        inputs: AttentionInputs,
        tile_index: int | None = None,
        poison: bool = False,
        short_strips: bool = False,
    ):
        query, key, value = inputs[:3]
        self.inputs = inputs
        self.tile_index = tile_index
        self.poison = poison
        self.short_strips = short_strips
        self.query = query
        self.mixing = inputs.mixing
        self.batch, self.heads, self.n_queries, _ = query.shape
        self.n_keys, value_dim = value.shape[2:]
        # Without the head size: in heads of size 0 the scores are 0, but the weights are not.
        sizes = (self.batch, self.heads, self.n_queries, self.n_keys, value_dim)
        self.empty = 0 in sizes

        # What the kernels take, by the names of their arguments
        self.q = strided(query)
        self.k = strided(key)
        self.v = strided(value)
        self.m = None
        if self.mixing is not None:
            self.m = strided_mixing(self.mixing)
        # Scores in units of log2(e), because the kernels compute 2^s.
        self.scale = inputs.scale * LOG2E.value
        self.sink = None
        if inputs.sink is not None:
            self.sink = inputs.sink.float() * LOG2E.value  # [H]
        self.attn_mask = None
        if inputs.attn_mask is not None:
            self.attn_mask = readable_mask(inputs.attn_mask)  # [1 or B, 1 or H, 1 or Nq, 1 or Nk]
        self.masks = self._masks()
        self.dropout = self._dropout()
        # Both passes need the spans of keys, the backward pass alone those of queries.
        self.mask_with_spans = None
        self.key_spans = None  # [Nq, 4]
        if self.attn_mask is not None and not self.empty and has_spans(self.attn_mask):
            self.mask_with_spans = self.attn_mask
            self.key_spans = spans_of(self.attn_mask)  # launches a kernel
        self.lengths = {"n_queries": self.n_queries, "n_keys": self.n_keys}
        self.constants = self._constants()
        self.tuning_key = self._tuning_key()

    def _constants(self) -> Constants:
        """Return what the kernels are compiled for, but for the sizes of a tile."""
        query, _, value = self.inputs[:3]
        head_dim = query.shape[3]
        value_dim = value.shape[3]
        padded_dim, padded_value_dim = padded(head_dim, value_dim)
        tf32 = query.dtype == torch.float32 and allows_tf32()
        return Constants(
            H=self.heads,
            D=head_dim,
            DP=padded_dim,
            DV=value_dim,
            DVP=padded_value_dim,
            NORMALIZER=self.inputs.normalizer,
            CAUSAL=self.inputs.causal,
            PRECISION="tf32" if tf32 else "ieee",
            PER_QUERY=self.mixing is not None and self.mixing.dim() == 4,
            HP=max(16, power_of_2(self.heads)),
        )

    def _tuning_key(self) -> tuple[Any, ...]:
        """Return what calls have in common that use the same tiles; see `tuning.run`."""
        dtypes = []
        for tensor in (self.query, self.mixing, self.attn_mask):
            dtypes.append(None if tensor is None else tensor.dtype)
        return (
            self.constants,
            *dtypes,
            self.mask_with_spans is not None,  # it skips tiles
            self.inputs.key_padding_mask is not None,
            self.inputs.dropout_p > 0,
            power_of_2(max(self.n_queries, self.n_keys)),
        )

    def _masks(self) -> Masks:
        """Return what hides keys or adds to scores, as the kernels read it."""
        padding = self.inputs.key_padding_mask
        if padding is not None:
            padding = padding.int().contiguous()  # not bytes: see `rows.load_wide`
        if self.attn_mask is None:
            return Masks(None, None, None, None, None, padding=padding)

        mask = self.attn_mask.expand(self.batch, self.heads, self.n_queries, self.n_keys)
        s_b, s_h, s_n, s_d = mask.stride()
        return Masks(mask, s_b, s_h, s_n, s_d, padding=padding)

    def _dropout(self) -> Dropout | None:
        p = self.inputs.dropout_p
        if p <= 0:
            return None
        # A float, because triton compiles small and large integers apart; 2^32 - 256 is the largest
        # float32 below 2^32.
        threshold = min(p * 2.0**32, 2.0**32 - 256)
        gain = 1 / (1 - p) if p < 1 else 0.0
        return Dropout(self.inputs.seed, threshold, gain)

    def query_spans(self) -> Tensor | None:
        """Return the spans of queries that see each key, [Nk, 4]; None if there are none.

        The programs of dK and dV need them, because each of them has some keys.
        """
        if self.mask_with_spans is None:
            return None
        return spans_of(self.mask_with_spans.transpose(2, 3))

    def unwritten(self, memory: Tensor) -> Tensor:
        """Return memory for a result; in a trial it holds NaN."""
        return memory.fill_(torch.nan) if self.poison else memory

    def launch(self, kernel: Any, grid: Grid, **arguments: Any) -> None:
        """Launch a kernel with the tile that suits it.

        Args:
            kernel: the kernel
            grid: its programs
            arguments: all that it reads and writes, by name, but for the constants C
        """
        self.with_best_tile(kernel, lambda tile: self.launch_with(tile, kernel, grid, arguments))

    def with_best_tile(self, kernel: Any, launch: Callable[[Tile], Result]) -> Result:
        """Return what `launch` returns for the tile that suits a kernel, or for that of a trial."""
        name = kernel.fn.__name__
        head_dim = max(self.constants.D, self.constants.DV)
        tiles = tuning.tiles_for(name, self.heads, head_dim, self.query.element_size())
        if self.tile_index is not None:
            # A kernel with fewer candidates than others takes its last one.
            left = tiles[self.tile_index :] or tiles[-1:]
            return tuning.first_fitting(left, launch)[1]
        return tuning.run((name, self.tuning_key), tiles, launch, self.query.device)

    def launch_with(self, tile: Tile, kernel: Any, grid: Grid, arguments: dict[str, Any]) -> None:
        constants = self.constants._replace(BM=tile.BM, BN=tile.BN)
        programs.start(kernel, grid.programs(tile), {**arguments, "C": constants}, tile)


def padded(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return both sizes as powers of 2; the smaller one is raised to the larger, or to 64.

    Then the rows of queries, keys and values are swizzled alike in shared memory. ptxas 12.8 takes
    a wrong address where two products read one place in two ways (triton.md, 'A fault of ptxas').
    """
    sizes = [max(16, power_of_2(size)) for size in (head_dim, value_dim)]
    least = min(64, max(sizes))
    return max(sizes[0], least), max(sizes[1], least)
