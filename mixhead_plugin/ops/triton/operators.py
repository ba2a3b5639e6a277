"""The operators `triton` and `triton_backward` of torch: which kernels they launch, in order."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import with_four_dimensions
from mixhead_plugin.ops.operators import (
    GRADIENTS,
    SCHEMA,
    all_gradients,
    by_field,
    empty_output,
    register,
    register_backward,
    save_inputs,
    saved_inputs,
)
from mixhead_plugin.ops.rounding import ceil_div, round_up
from mixhead_plugin.ops.triton import flash, mixed, tuning
from mixhead_plugin.ops.triton.records import Constants, Dropout, Masks, Strided
from mixhead_plugin.ops.triton.rows import LOG2E, spans_kernel
from mixhead_plugin.ops.triton.support import allows_tf32
from mixhead_plugin.ops.triton.tuning import Tile, power_of_2

Result = TypeVar("Result")
STRIP_QUERIES = 64  # a strip has a multiple of them, so that its tiles are full


class Grid(NamedTuple):
    """How the work of a kernel is split among its programs; `rows.split_program` reads it."""

    parts: int  # B * H: a program has one head of one sentence; B: it has all heads of one
    queries: int = 1  # a program has a tile of them; 1: it has all
    keys: int = 1  # as queries

    def programs(self, tile: Tile) -> int:
        """Return how many programs there are."""
        return self.parts * ceil_div(self.queries, tile.BM) * ceil_div(self.keys, tile.BN)


class Strip(NamedTuple):
    """Some queries, whose weights are in memory at once."""

    first: int
    last: int  # the one behind the last query

    @property
    def n_queries(self) -> int:
        return self.last - self.first


class Call:
    """One call of the operator: what its kernels take, and their order.

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
        # Both passes need the spans of keys; the backward pass needs those of queries, too.
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

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return O [B, H, Nq, Dv] and the statistics of rows, [2, B, H, Nq]: peak and factor."""
        out = self._unwritten(empty_output(self.query, self.inputs.value))
        shape = (2, *self.query.shape[:3])
        statistics = self._unwritten(self.query.new_empty(shape, dtype=torch.float32))
        if self.empty:
            return out.zero_(), statistics.zero_()
        peak, factor = statistics
        o = strided(out)
        mixes = self.mixing is not None

        # Of heads that mix first the statistics of all rows, without values: a mixed head needs
        # those of all heads.
        self.launch(
            flash.flash_fwd_kernel,
            Grid(self.batch * self.heads, queries=self.n_queries),
            q=self.q,
            k=self.k,
            v=None if mixes else self.v,
            o=None if mixes else o,
            sink=self.sink,
            peak=peak,
            factor=factor,
            masks=self.masks,
            key_spans=self.key_spans,
            dropout=None if mixes else self.dropout,
            scale=self.scale,
            **self.lengths,
        )
        if not mixes:
            return out, statistics

        strips, (weights,) = self._strips(count=1)
        for strip in strips:
            self._write_weights(strip, weights, peak, factor)  # P
            self._mix(strip, weights)  # Pbar, in place of P
            # O = (Z * Pbar) V / (1 - p)
            self._multiply_over_keys(strip, weights, self.v, o, self._value_product_arguments())
        return out, statistics

    def backward(self, d_out: Tensor, statistics: Tensor, out: Tensor | None) -> dict[str, Tensor]:
        """Return the gradients of query, key and value, and of mixing and sink if they are given.

        Args:
            d_out: the gradient of the output, [B, H, Nq, Dv]
            statistics: what `forward` has returned, [2, B, H, Nq]
            out: what `forward` has returned, [B, H, Nq, Dv]; not read where heads mix
        """
        grads = {}
        for name, tensor in self.inputs.operands().items():
            grads[name] = self._unwritten(torch.empty_like(tensor))
        if self.empty:
            return {name: grad.zero_() for name, grad in grads.items()}

        peak, factor = statistics
        # The programs of dK and dV each have some keys, so they need the spans of queries.
        query_spans = None  # [Nk, 4]
        if self.mask_with_spans is not None:
            query_spans = spans_of(self.mask_with_spans.transpose(2, 3))
        if self.mixing is None:
            assert out is not None  # saved where heads are not mixed
            delta = self._unmixed_grads(grads, d_out, peak, factor, out, query_spans)
        else:
            delta = self._mixed_grads(grads, d_out, peak, factor, query_spans)
        if self.sink is not None:
            grads["sink"].copy_(self._sink_grad(peak, factor, delta))
        return grads

    def _unmixed_grads(
        self,
        grads: dict[str, Tensor],
        d_out: Tensor,
        peak: Tensor,
        factor: Tensor,
        out: Tensor,
        query_spans: Tensor | None,
    ) -> Tensor:
        """Write the gradients of query, key and value where heads do not mix.

        Args:
            grads: by name
            d_out: the gradient of the output, [B, H, Nq, Dv]
            peak: the largest exponent of each row, [B, H, Nq]
            factor: what the powers of each row are multiplied by, [B, H, Nq]
            out: the output, [B, H, Nq, Dv]
            query_spans: which queries see each key, [Nk, 4], if the mask says it

        Returns:
            delta of each row, [B, H, Nq]
        """
        d_o = strided(d_out)

        # delta = P . dP = O . dO of each row, which dQ and dK need. One tile for all devices: this
        # takes next to no time.
        delta = self._unwritten(torch.empty_like(peak))
        self._launch_with(
            Tile(64, 16, 4, 1),
            flash.flash_bwd_delta_kernel,
            Grid(self.batch * self.heads, queries=self.n_queries),
            {"o": strided(out), "d_o": d_o, "delta": delta, "n_queries": self.n_queries},
        )
        given = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "d_o": d_o,
            "peak": peak,
            "factor": factor,
            "delta": delta,
            "masks": self.masks,
            "dropout": self.dropout,
            "scale": self.scale,
            "d_scale": self.inputs.scale,
            **self.lengths,
        }
        self.launch(
            flash.flash_bwd_dq_kernel,
            Grid(self.batch * self.heads, queries=self.n_queries),
            d_q=strided(grads["query"]),
            key_spans=self.key_spans,
            **given,
        )
        self.launch(
            flash.flash_bwd_dkv_kernel,
            Grid(self.batch * self.heads, keys=self.n_keys),
            d_k=strided(grads["key"]),
            d_v=strided(grads["value"]),
            query_spans=query_spans,
            **given,
        )
        return delta

    def _mixed_grads(
        self,
        grads: dict[str, Tensor],
        d_out: Tensor,
        peak: Tensor,
        factor: Tensor,
        query_spans: Tensor | None,
    ) -> Tensor:
        """Write the gradients of query, key, value and mixing where heads mix.

        Args:
            grads: by name
            d_out: the gradient of the output, [B, H, Nq, Dv]
            peak: the largest exponent of each row, [B, H, Nq]
            factor: what the powers of each row are multiplied by, [B, H, Nq]
            query_spans: which queries see each key, [Nk, 4], if the mask says it

        Returns:
            delta of each row, [B, H, Nq]
        """
        d_o = strided(d_out)
        delta = self._unwritten(torch.empty_like(peak))
        strips, (weights, d_weights) = self._strips(count=2)
        # dK and dV are sums over the strips, in float32 where there are several.
        sums = {name: grads[name] for name in ("key", "value")}
        if len(strips) > 1:
            for name, grad in sums.items():
                sums[name] = self._unwritten(torch.empty_like(grad, dtype=torch.float32))
        d_q = strided(grads["query"])
        d_k = strided(sums["key"])
        d_v = strided(sums["value"])
        of_keys = self._key_product_arguments()
        of_values = self._value_product_arguments()
        shared_grads = []  # dM of each strip, [H, H], where all queries share M

        for strip in strips:
            self._write_weights(strip, weights, peak, factor)  # P
            self._write_mixed_weight_grads(strip, d_weights, d_o)  # dPbar
            d_mixing = self._mixing_grad(strip, weights, d_weights, delta, grads["mixing"])
            if d_mixing is not None:
                shared_grads.append(d_mixing)
            # dS, in place of dPbar
            self._write_score_grads(strip, weights, d_weights, peak, factor, delta)
            # dQ = scale dS K
            self._multiply_over_keys(strip, d_weights, self.k, d_q, of_keys)
            # dK = scale dS^T Q, and dK of the strips before
            self._add_over_queries(strip, d_weights, self.q, d_k, query_spans, of_keys)
            self._mix(strip, weights)  # Pbar again, in place of P
            # dV = (Z * Pbar)^T dO / (1 - p), and dV of the strips before
            self._add_over_queries(strip, weights, d_o, d_v, query_spans, of_values)

        if len(strips) > 1:
            for name, total in sums.items():
                grads[name].copy_(total)
        if shared_grads:
            grads["mixing"].copy_(torch.stack(shared_grads).sum(0))
        return delta

    def _write_weights(self, strip: Strip, weights: Strided, peak: Tensor, factor: Tensor) -> None:
        """Write P of a strip, the weights before mixing.

        Args:
            strip: its queries
            weights: the memory of strips
            peak: the largest exponent of each row, [B, H, Nq]
            factor: what the powers of each row are multiplied by, [B, H, Nq]
        """
        self.launch(
            mixed.mixed_weights_kernel,
            Grid(self.batch * self.heads, queries=strip.n_queries, keys=self.n_keys),
            q=self.q,
            k=self.k,
            w=weights,
            peak=peak,
            factor=factor,
            masks=self.masks,
            scale=self.scale,
            **self._strip_arguments(strip),
        )

    def _mix(self, strip: Strip, weights: Strided) -> None:
        """Write Pbar_i = sum_j M[j, i] P_j of a strip, in place of P."""
        self.launch(
            mixed.mix_kernel,
            Grid(self.batch, queries=strip.n_queries, keys=self.n_keys),
            m=self.m,
            w=weights,
            **self._strip_arguments(strip),
        )

    def _write_mixed_weight_grads(self, strip: Strip, d_weights: Strided, d_o: Strided) -> None:
        """Write dPbar = Z * (dO V^T) / (1 - p) of a strip.

        Args:
            strip: its queries
            d_weights: the memory of strips for it
            d_o: the gradient of the output
        """
        self.launch(
            mixed.mixed_bwd_dw_kernel,
            Grid(self.batch * self.heads, queries=strip.n_queries, keys=self.n_keys),
            v=self.v,
            d_o=d_o,
            d_w=d_weights,
            dropout=self.dropout,
            **self._strip_arguments(strip),
        )

    def _mixing_grad(
        self, strip: Strip, weights: Strided, d_weights: Strided, delta: Tensor, d_mixing: Tensor
    ) -> Tensor | None:
        """Write dM[j, i] = P_j . dPbar_i of each query, and delta_j = sum_i M[j, i] dM[j, i].

        Args:
            strip: the queries
            weights: P
            d_weights: dPbar
            delta: memory for delta, [B, H, Nq]
            d_mixing: memory for dM, which is written where every query has its own M

        Returns:
            the sum of dM over the strip, [H, H], where all queries share M; else None
        """
        grid = Grid(self.batch, queries=strip.n_queries)
        given = {
            "m": self.m,
            "w": weights,
            "d_w": d_weights,
            "delta": delta,
            **self._strip_arguments(strip),
        }
        if not self.constants.PER_QUERY:
            return self._shared_mixing_grad(grid, given)
        self.launch(mixed.mixed_bwd_dm_kernel, grid, d_m=strided_mixing(d_mixing), **given)
        return None

    def _write_score_grads(
        self,
        strip: Strip,
        weights: Strided,
        d_weights: Strided,
        peak: Tensor,
        factor: Tensor,
        delta: Tensor,
    ) -> None:
        """Write dS of a strip in place of dPbar, by dP_j = sum_i M[j, i] dPbar_i.

        Args:
            strip: its queries
            weights: P
            d_weights: dPbar
            peak: the largest exponent of each row, [B, H, Nq]
            factor: what the powers of each row are multiplied by, [B, H, Nq]
            delta: P . dP of each row, [B, H, Nq]
        """
        self.launch(
            mixed.mixed_bwd_ds_kernel,
            Grid(self.batch, queries=strip.n_queries, keys=self.n_keys),
            m=self.m,
            w=weights,
            d_w=d_weights,
            peak=peak,
            factor=factor,
            delta=delta,
            **self._strip_arguments(strip),
        )

    def _multiply_over_keys(
        self, strip: Strip, w: Strided, x: Strided, y: Strided, arguments: dict[str, Any]
    ) -> None:
        """Write y = w x for the queries of a strip: O = Pbar V, or dQ = dS K.

        Args:
            strip: its queries
            w: the matrices of the strip, by queries and keys
            x: vectors of the keys, [B, H, Nk, D]
            y: memory for vectors of the queries, [B, H, Nq, D]
            arguments: those of the product
        """
        self.launch(
            mixed.product_over_keys_kernel,
            Grid(self.batch * self.heads, queries=strip.n_queries),
            w=w,
            x=x,
            y=y,
            **arguments,
            **self._strip_arguments(strip),
        )

    def _add_over_queries(
        self,
        strip: Strip,
        w: Strided,
        x: Strided,
        y: Strided,
        query_spans: Tensor | None,
        arguments: dict[str, Any],
    ) -> None:
        """Add w^T x over the queries of a strip to y: dK = dS^T Q, or dV = Pbar^T dO.

        The first strip writes y.

        Args:
            strip: its queries
            w: the matrices of the strip, by queries and keys
            x: vectors of the queries, [B, H, Nq, D]
            y: the sums for the keys, [B, H, Nk, D]
            query_spans: which queries see each key, [Nk, 4], if the mask says it
            arguments: those of the product
        """
        self.launch(
            mixed.product_over_queries_kernel,
            Grid(self.batch * self.heads, keys=self.n_keys),
            w=w,
            x=x,
            y=y,
            ADDS=strip.first > 0,
            query_spans=query_spans,
            **arguments,
            **self._strip_arguments(strip),
        )

    def _shared_mixing_grad(self, grid: Grid, given: dict[str, Any]) -> Tensor:
        """Return dM of a strip, [H, H], where all queries share M.

        Each tile of queries writes a sum of its own, so the memory of the sums depends on the tile.

        Args:
            grid: the grid of mixed_bwd_dm_kernel
            given: its arguments, but for d_m
        """
        kernel = mixed.mixed_bwd_dm_kernel

        def launch(tile: Tile) -> Tensor:
            shape = (self.batch, ceil_div(grid.queries, tile.BM), self.heads, self.heads)
            sums = self._unwritten(self.query.new_empty(shape, dtype=torch.float32))
            self._launch_with(tile, kernel, grid, {**given, "d_m": strided_mixing(sums)})
            return sums

        return self._with_best_tile(kernel, launch).sum((0, 1))

    def _sink_grad(self, peak: Tensor, factor: Tensor, delta: Tensor) -> Tensor:
        """Return dS of triton.md for the sink, whose dP is 0, summed to [H].

        Args:
            peak: the largest exponent of each row, [B, H, Nq]
            factor: what the powers of each row are multiplied by, [B, H, Nq]
            delta: P . dP of each row, [B, H, Nq]
        """
        assert self.inputs.sink is not None
        score = self.inputs.sink.float()[:, None]  # [H, 1]
        sigsoftmax = self.inputs.normalizer == "sigsoftmax"

        # The sink's weight in each row, as `rows.weights_of` computes those of keys
        exponent = score
        if sigsoftmax:
            exponent = score + score.clamp(max=0)
        weights = torch.exp2(exponent * LOG2E.value - peak) * factor  # [B, H, Nq]
        if sigsoftmax:
            weights = weights * torch.sigmoid(score.abs())

        # -dS / delta, as in `rows.score_gradient`
        slope = weights
        if sigsoftmax:
            slope = weights * (2 - torch.sigmoid(score))
        elif self.inputs.normalizer == "l2":
            slope = weights * weights
        return -(slope * delta).sum((0, 2))

    def _strips(self, count: int) -> tuple[list[Strip], list[Strided]]:
        """Return the queries of each strip, and the memory that holds one strip after the other.

        Args:
            count: how many memories are needed at once
        """
        width = round_up(self.n_keys, mixed.STRIP_KEYS.value)
        bytes_of_query = self.batch * self.heads * width * self.query.element_size()
        at_once = tuning.strip_bytes() // count // bytes_of_query
        at_once = max(1, at_once // STRIP_QUERIES) * STRIP_QUERIES
        if self.short_strips:
            at_once = STRIP_QUERIES
        strips = []
        for first in range(0, self.n_queries, at_once):
            strips.append(Strip(first, min(first + at_once, self.n_queries)))

        shape = (self.batch, self.heads, min(at_once, self.n_queries), width)
        memories = []
        for _ in range(count):
            memories.append(strided(self._unwritten(self.query.new_empty(shape))))
        return strips, memories

    def _strip_arguments(self, strip: Strip) -> dict[str, Any]:
        """Return what each kernel of a strip takes."""
        return {
            "first": strip.first,
            "last": strip.last,
            "key_spans": self.key_spans,
            **self.lengths,
        }

    def _value_product_arguments(self) -> dict[str, Any]:
        """Return what the products O and dV take: the sizes of values, and dropout."""
        gain = 1.0 if self.dropout is None else self.dropout.gain
        sizes = {"D": self.constants.DV, "DP": self.constants.DVP}
        return {**sizes, "gain": gain, "dropout": self.dropout}

    def _key_product_arguments(self) -> dict[str, Any]:
        """Return what the products dQ and dK take: the sizes of keys, and the scale."""
        sizes = {"D": self.constants.D, "DP": self.constants.DP}
        return {**sizes, "gain": self.inputs.scale, "dropout": None}

    def _unwritten(self, memory: Tensor) -> Tensor:
        """Return memory for a result; in a trial it holds NaN."""
        return memory.fill_(torch.nan) if self.poison else memory

    def launch(self, kernel: Any, grid: Grid, **arguments: Any) -> None:
        """Launch a kernel with the tile that suits it.

        Args:
            kernel: the kernel
            grid: its programs
            arguments: all that it reads and writes, by name, but for the constants C
        """
        self._with_best_tile(kernel, lambda tile: self._launch_with(tile, kernel, grid, arguments))

    def _with_best_tile(self, kernel: Any, launch: Callable[[Tile], Result]) -> Result:
        """Return what `launch` returns for the tile that suits a kernel, or for that of a trial."""
        name = kernel.fn.__name__
        head_dim = max(self.constants.D, self.constants.DV)
        tiles = tuning.tiles_for(name, self.heads, head_dim, self.query.element_size())
        if self.tile_index is not None:
            # A kernel with fewer candidates than others takes its last one.
            left = tiles[self.tile_index :] or tiles[-1:]
            return tuning.first_fitting(left, launch)[1]
        return tuning.run((name, self.tuning_key), tiles, launch, self.query.device)

    def _launch_with(self, tile: Tile, kernel: Any, grid: Grid, arguments: dict[str, Any]) -> None:
        constants = self.constants._replace(BM=tile.BM, BN=tile.BN)
        start(kernel, grid.programs(tile), {**arguments, "C": constants}, tile)


def start(kernel: Any, programs: int, arguments: dict[str, Any], tile: Tile) -> Any:
    """Launch a kernel and return what triton compiled, if it did; all launches pass here."""
    return kernel[(programs,)](**arguments, num_warps=tile.warps, num_stages=tile.stages)


def padded(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return both sizes as powers of 2; the smaller one is raised to the larger, or to 64.

    Then the rows of queries, keys and values are swizzled alike in shared memory. ptxas 12.8 takes
    a wrong address where two products read one place in two ways (triton.md, 'A fault of ptxas').
    """
    sizes = [max(16, power_of_2(size)) for size in (head_dim, value_dim)]
    least = min(64, max(sizes))
    return max(sizes[0], least), max(sizes[1], least)


def strided(tensor: Tensor) -> Strided:
    return Strided(tensor, *tensor.stride())


def strided_mixing(mixing: Tensor) -> Strided:
    """Return M, [B, Nq, H, H] or [H, H], as [B, H, Nq, H]."""
    s_b, s_n, s_h, s_d = (0, 0, *mixing.stride())[-4:]
    return Strided(mixing, s_b, s_h, s_n, s_d)


def readable_mask(attn_mask: Tensor) -> Tensor:
    """Return attn_mask with four dimensions, in a dtype that the kernels read."""
    attn_mask = with_four_dimensions(attn_mask)
    for dim, stride in enumerate(attn_mask.stride()):
        # Made by `expand`: one row in memory stands for all, and is kept as one.
        if stride == 0 and attn_mask.shape[dim] > 1:
            attn_mask = attn_mask.narrow(dim, 0, 1)
    if attn_mask.dtype == torch.float64:
        return attn_mask.float()
    return attn_mask


def has_spans(mask: Tensor) -> bool:
    """Return whether to search a mask [1 or B, 1 or H, 1 or Nq, 1 or Nk] for spans.

    Not one that is broadcast over queries or keys, and not one that differs by sentence or head:
    there the search could cost more than it saves.
    """
    return mask.shape[:2] == (1, 1) and 1 not in mask.shape[2:]


def spans_of(mask: Tensor) -> Tensor:
    """Return start and stop of the keys that a mask leaves visible, and of those it changes.

    With them a causal mask of floats, as fairseq passes it, skips the tiles that `causal` skips.

    Args:
        mask: [1, 1, Nq, Nk], or transposed for the spans of queries

    Returns:
        int32 [Nq, 4], or [Nk, 4] of a transposed mask
    """
    n_rows, n = mask.shape[2:]
    spans = torch.empty(n_rows, 4, dtype=torch.int32, device=mask.device)
    tile = Tile(16, 256, 4, 1)
    arguments = {"mask": strided(mask), "spans": spans, "n_rows": n_rows, "n": n}
    sizes = {"BM": tile.BM, "BN": tile.BN}
    start(spans_kernel, ceil_div(n_rows, tile.BM), {**arguments, **sizes}, tile)
    return spans


def _forward(*fields: Any) -> tuple[Tensor, Tensor]:
    inputs = AttentionInputs(*fields)
    with torch.cuda.device_of(inputs.query):
        return Call(inputs).forward()


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_output(query, value), query.new_empty(2, *query.shape[:3], dtype=torch.float32)


def _backward(
    d_output: Tensor, statistics: Tensor, output: Tensor | None, *fields: Any
) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*fields)
    with torch.cuda.device_of(d_output):
        grads = Call(inputs).backward(d_output, statistics, output)
    return all_gradients(grads, d_output)


def _backward_fake(
    d_output: Tensor, statistics: Tensor, output: Tensor | None, *fields: Any
) -> tuple[Tensor, ...]:
    operands = AttentionInputs(*fields).operands()
    grads = {name: torch.empty_like(tensor) for name, tensor in operands.items()}
    return all_gradients(grads, d_output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, statistics = output
    # Where heads mix, delta comes from dM and not from the output.
    mixes = AttentionInputs(*inputs).mixing is not None
    save_inputs(ctx, inputs, statistics, None if mixes else out)
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)  # the gradient of `statistics` is not made


def _differentiate(
    ctx: Any, d_output: Tensor | None, d_statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    if d_output is None:
        return (None,) * len(AttentionInputs._fields)
    inputs, statistics, output = saved_inputs(ctx)
    grads = torch.ops.mixhead_plugin.triton_backward(d_output, statistics, output, *inputs)
    return by_field(grads, inputs.operands())


_RESULTS = "Tensor d_output, Tensor statistics, Tensor? output"
register("triton", f"({SCHEMA}) -> (Tensor, Tensor)", _forward, _forward_fake)
register("triton_backward", f"({_RESULTS}, {SCHEMA}) -> {GRADIENTS}", _backward, _backward_fake)
register_backward("triton", _save, _differentiate)
