"""The operators `triton` and `triton_backward` of torch: the kernels' arguments in order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
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
from mixhead_plugin.ops.triton import allows_tf32, flash, mixed, tuning
from mixhead_plugin.ops.triton.records import Constants, Dropout, Masks, Strided
from mixhead_plugin.ops.triton.rows import LOG2E, spans_kernel
from mixhead_plugin.ops.triton.tuning import Tile, ceil_div, power_of_2

# A strip has a multiple of STRIP_QUERIES, which the queries of every tile divide. The memory of its
# keys is a multiple of STRIP_KEYS, so no tile reaches beyond a row.
STRIP_QUERIES = 64
STRIP_KEYS = 128


class Strip(NamedTuple):
    """Some queries, whose weights are in memory at once."""

    first: int
    last: int  # the one behind the last query


class Call:
    """One call of the operator: the records that its kernels take, and the kernels in order.

    Args:
        inputs: of the call
        candidate: for a trial, the place of the tile to take in the list of each kernel; None for
            the fastest. In a trial the memory for results holds NaN, so that a number which no
            kernel writes is noticed.
        short_strips: whether the strips of heads that mix are as short as they may be, so that a
            trial has several
    """

    def __init__(
        self, inputs: AttentionInputs, candidate: int | None = None, short_strips: bool = False
    ):
        query, key, value = inputs[:3]
        self.inputs = inputs
        self.candidate = candidate
        self.short_strips = short_strips
        self.query = query
        self.mixing = inputs.mixing
        self.batch, self.heads, self.n_queries, head_dim = query.shape
        self.n_keys, value_dim = value.shape[2:]
        # Not head_dim: in heads of size 0 the scores are 0, but the weights are not.
        sizes = (self.batch, self.heads, self.n_queries, self.n_keys, value_dim)
        self.empty = 0 in sizes

        self.attn_mask = None
        if inputs.attn_mask is not None:
            self.attn_mask = readable_mask(inputs.attn_mask)  # [1 or B, 1 or H, 1 or Nq, 1 or Nk]
        self.masks = self._masks()
        self.dropout = self._dropout()
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

        padded_dim, padded_value_dim = padded(head_dim, value_dim)
        tf32 = query.dtype == torch.float32 and allows_tf32()
        self.constants = Constants(
            H=self.heads,
            D=head_dim,
            DP=padded_dim,
            DV=value_dim,
            DVP=padded_value_dim,
            NORMALIZER=inputs.normalizer,
            CAUSAL=inputs.causal,
            PRECISION="tf32" if tf32 else "ieee",
            PER_QUERY=self.mixing is not None and self.mixing.dim() == 4,
            MASK_HEADS=self.attn_mask is not None and self.attn_mask.shape[1] > 1,
            HP=max(16, power_of_2(self.heads)),
        )
        # For `tuning`: calls with equal keys use the same tiles.
        dtypes = []
        for tensor in (query, self.mixing, self.attn_mask):
            dtypes.append(None if tensor is None else tensor.dtype)
        self.key = (
            self.constants,
            *dtypes,
            inputs.key_padding_mask is not None,
            inputs.dropout_p > 0,
            power_of_2(max(self.n_queries, self.n_keys)),
        )

    def _masks(self) -> Masks:
        """Return what hides keys or adds to scores, as the kernels read it."""
        padding = self.inputs.key_padding_mask
        if padding is not None:
            padding = padding.int().contiguous()  # not bytes: see `rows.load_wide`
        if self.attn_mask is None:
            return Masks(None, None, None, None, None, padding=padding, spans=None)

        mask = self.attn_mask.expand(self.batch, self.heads, self.n_queries, self.n_keys)
        s_b, s_h, s_n, s_d = mask.stride()
        spans = None
        if not self.empty:
            spans = spans_of(self.attn_mask)
        return Masks(mask, s_b, s_h, s_n, s_d, padding=padding, spans=spans)

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
        """Return O [B, H, Nq, Dv] and the peak and the factor of each row, [2, B, H, Nq]."""
        out = self._unwritten(empty_output(self.query, self.inputs.value))
        rows = self._unwritten(self.query.new_empty(2, *self.query.shape[:3], dtype=torch.float32))
        if self.empty:
            return out.zero_(), rows.zero_()
        peak, factor = rows
        o = strided(out)
        if self.mixing is None:
            self._run(flash.flash_fwd_kernel, self.q, self.k, self.v, o, self.sink, peak, factor)
            return out, rows

        # First the statistics of all rows, without values: a mixed head needs those of all heads.
        self._run(flash.flash_fwd_kernel, self.q, self.k, None, None, self.sink, peak, factor)
        strips, (weights,) = self._strips(count=1)
        for strip in strips:
            self._run_strip(
                mixed.mixed_weights_kernel, strip, self.q, self.k, weights, peak, factor
            )
            self._run_strip(mixed.mix_kernel, strip, self.m, weights)
            self._product_over_keys(strip, weights, self.v, o, is_value=True)
        return out, rows

    def backward(self, d_out: Tensor, rows: Tensor, out: Tensor | None) -> list[Tensor]:
        """Return the gradients of query, key and value, and of mixing and the sink, if any.

        Args:
            d_out: the gradient of the output, [B, H, Nq, Dv]
            rows: what `forward` has returned, [2, B, H, Nq]
            out: what `forward` has returned, [B, H, Nq, Dv]; not read where heads mix
        """
        grads = []
        for tensor in self.inputs.given().values():
            grads.append(self._unwritten(torch.empty_like(tensor)))
        if self.empty:
            return [grad.zero_() for grad in grads]
        d_q = strided(grads[0])
        d_k = strided(grads[1])
        d_v = strided(grads[2])
        peak, factor = rows

        # The programs of dK and dV each have some keys, so they need the spans of queries.
        spans = None
        if self.attn_mask is not None:
            spans = spans_of(self.attn_mask.transpose(2, 3))
        by_key = self.masks._replace(spans=spans)
        # delta = P . dP of each row, which dQ and dK need.
        if self.mixing is None:
            assert out is not None  # saved where heads are not mixed
            given = (self.q, self.k, self.v, strided(d_out), peak, factor)
            delta = self._delta(out, d_out)
            scale = self.inputs.scale
            self._run(flash.flash_bwd_dq_kernel, *given, delta, d_q, scale)
            self._run(flash.flash_bwd_dkv_kernel, *given, delta, d_k, d_v, scale, masks=by_key)
        else:
            delta = self._mixed_grads(grads, strided(d_out), peak, factor, by_key)
        if self.sink is not None:
            grads[-1].copy_(self._sink_grad(peak, factor, delta))
        return grads

    def _sink_grad(self, peak: Tensor, factor: Tensor, delta: Tensor) -> Tensor:
        """Return dS of triton.md for the sink, whose dP is 0, summed to [H].

        Args:
            peak: of each row, [B, H, Nq]
            factor: of each row, [B, H, Nq]
            delta: of each row, [B, H, Nq]
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

    def _delta(self, out: Tensor, d_out: Tensor) -> Tensor:
        """Return delta = O . dO [B, H, Nq] of heads that do not mix."""
        delta = self.query.new_empty(self.query.shape[:3], dtype=torch.float32)
        delta = self._unwritten(delta)
        tile = Tile(64, 16, 4, 1)
        constants = self.constants._replace(BM=tile.BM, BN=tile.BN)
        arguments = (strided(out), strided(d_out), delta, self.n_queries, constants)
        programs = self.batch * self.heads * ceil_div(self.n_queries, tile.BM)
        start(flash.flash_bwd_delta_kernel, programs, arguments, tile)
        return delta

    def _strips(self, count: int) -> tuple[list[Strip], list[Strided]]:
        """Return the queries of each strip, and the memory that holds one strip after the other.

        Args:
            count: how many memories are needed at once
        """
        width = ceil_div(self.n_keys, STRIP_KEYS) * STRIP_KEYS
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

    def _product_over_keys(
        self, strip: Strip, weights: Strided, x: Strided, y: Strided, is_value: bool
    ) -> None:
        """Write y = weights x of a strip: O from values, or else dQ from keys."""
        constants = self._constants_of_product(is_value)
        self._run_strip(mixed.product_over_keys_kernel, strip, weights, x, y, *constants)

    def _product_over_queries(
        self,
        strip: Strip,
        weights: Strided,
        x: Strided,
        y: Strided,
        is_value: bool,
        by_key: Masks,
    ) -> None:
        """Write y = weights^T x of a strip: dV from dO, or else dK from queries.

        It is added to that of the strips before.
        """
        adds = strip.first > 0
        arguments = (weights, x, y, *self._constants_of_product(is_value), adds)
        self._run_strip(mixed.product_over_queries_kernel, strip, *arguments, by_key=by_key)

    def _constants_of_product(self, is_value: bool) -> tuple[float, int, int, bool]:
        """Return what a product is multiplied by, its size and padded size, and if dropout acts."""
        constants = self.constants
        if not is_value:
            return self.inputs.scale, constants.D, constants.DP, False
        gain = 1.0 if self.dropout is None else self.dropout.gain
        return gain, constants.DV, constants.DVP, self.dropout is not None

    def _mixed_grads(
        self, grads: list[Tensor], d_o: Strided, peak: Tensor, factor: Tensor, by_key: Masks
    ) -> Tensor:
        """Write the gradients of query, key, value and mixing where heads mix.

        Args:
            grads: of query, key, value and mixing
            d_o: the gradient of the output
            peak: of each row, [B, H, Nq]
            factor: of each row, [B, H, Nq]
            by_key: the masks, with the spans of the queries that see a key

        Returns:
            delta of each row, [B, H, Nq]
        """
        delta = self._unwritten(torch.empty_like(peak))
        strips, (weights, d_weights) = self._strips(count=2)
        # dK and dV are sums over the strips, in float32 where there are several.
        sums = grads[1:3]
        if len(strips) > 1:
            sums = [self._unwritten(torch.empty_like(grad, dtype=torch.float32)) for grad in sums]
        d_q = strided(grads[0])
        d_k, d_v = map(strided, sums)
        parts_of_d_m = []
        for strip in strips:
            self._run_strip(
                mixed.mixed_weights_kernel, strip, self.q, self.k, weights, peak, factor
            )
            self._run_strip(mixed.mixed_bwd_dw_kernel, strip, self.v, d_o, d_weights)
            parts_of_d_m.append(self._mixing_grad(strip, weights, d_weights, delta, grads[3]))
            given = (self.m, weights, d_weights, peak, factor, delta)
            self._run_strip(mixed.mixed_bwd_ds_kernel, strip, *given)
            self._product_over_keys(strip, d_weights, self.k, d_q, False)
            self._product_over_queries(strip, d_weights, self.q, d_k, False, by_key)
            self._run_strip(mixed.mix_kernel, strip, self.m, weights)
            self._product_over_queries(strip, weights, d_o, d_v, True, by_key)
        if len(strips) > 1:
            grads[1].copy_(sums[0])
            grads[2].copy_(sums[1])
        if grads[3].dim() == 2:
            grads[3].copy_(torch.stack([part.sum((0, 1)) for part in parts_of_d_m]).sum(0))
        return delta

    def _mixing_grad(
        self, strip: Strip, weights: Strided, d_weights: Strided, delta: Tensor, d_mixing: Tensor
    ) -> Tensor:
        """Write delta and dM of a strip.

        Args:
            strip: its queries
            weights: before mixing
            d_weights: the gradients of the mixed weights
            delta: of each row, [B, H, Nq]
            d_mixing: [H, H] or [B, Nq, H, H]

        Returns:
            `d_mixing`; where it is [H, H], parts of it in its place, [B, tiles, H, H]
        """

        def outputs(tile: Tile) -> tuple[Strided]:
            if d_mixing.dim() == 4:
                return (strided_mixing(d_mixing),)
            # a sum for each tile of queries
            tiles = ceil_div(strip.last - strip.first, tile.BM)
            shape = (self.batch, tiles, self.heads, self.heads)
            sums = self._unwritten(self.query.new_empty(shape, dtype=torch.float32))
            return (strided_mixing(sums),)

        given = (self.m, weights, d_weights, delta)
        kernel = mixed.mixed_bwd_dm_kernel
        (d_m,) = self._run_strip(kernel, strip, *given, outputs=outputs)
        return d_m.p

    def _unwritten(self, memory: Tensor) -> Tensor:
        """Return memory for a result; in a trial it holds NaN."""
        if self.candidate is None:
            return memory
        return memory.fill_(torch.nan)

    def _run_strip(
        self,
        kernel: Any,
        strip: Strip,
        *arguments: Any,
        outputs: Callable[[Tile], tuple[Any, ...]] = lambda tile: (),
        by_key: Masks | None = None,
    ) -> tuple[Any, ...]:
        """Launch a kernel for the queries of a strip; see `_run`.

        Args:
            kernel: the kernel
            strip: its queries
            arguments: the first ones of the kernel
            outputs: returns the next ones
            by_key: the one after the strip, where a kernel takes it
        """
        last_ones: tuple[Any, ...] = (strip.first, strip.last)
        if by_key is not None:
            last_ones = (*last_ones, by_key)
        n_queries = strip.last - strip.first
        return self._run(
            kernel, *arguments, outputs=outputs, last_ones=last_ones, n_queries=n_queries
        )

    def _run(
        self,
        kernel: Any,
        *arguments: Any,
        outputs: Callable[[Tile], tuple[Any, ...]] = lambda tile: (),
        last_ones: tuple[Any, ...] = (),
        masks: Masks | None = None,
        n_queries: int | None = None,
    ) -> tuple[Any, ...]:
        """Launch a kernel with the tile that suits it.

        Args:
            kernel: the kernel
            arguments: its first ones
            outputs: returns the next ones, which depend on the tile
            last_ones: the ones after them, before those of every kernel
            masks: in place of the call's own
            n_queries: of a strip; all if None

        Returns:
            what `outputs` has returned
        """
        name = kernel.fn.__name__
        of_all = (masks or self.masks, self.dropout, self.scale, self.n_queries, self.n_keys)
        if n_queries is None:
            n_queries = self.n_queries

        def launch(tile: Tile) -> tuple[Any, ...]:
            constants = self.constants._replace(BM=tile.BM, BN=tile.BN)
            more = outputs(tile)
            programs = self.batch * _programs(name, constants, n_queries, self.n_keys)
            start(kernel, programs, (*arguments, *more, *last_ones, *of_all, constants), tile)
            return more

        head_dim = max(self.constants.DP, self.constants.DVP)
        tiles = tuning.tiles_for(name, self.heads, head_dim, self.query.element_size())
        if self.candidate is not None:
            # A kernel with fewer candidates than others takes its last one.
            left = tiles[self.candidate :] or tiles[-1:]
            return tuning.first_fitting(left, launch)[1]
        return tuning.run((name, self.key), tiles, launch, self.query.device)


# The programs of a kernel have a tile of queries and keys, or a tile of keys and all queries, or
# else a tile of queries and all keys. They have one head, or all heads.
_BY_TILE = ("mixed_weights_kernel", "mixed_bwd_dw_kernel", "mixed_bwd_ds_kernel", "mix_kernel")
_BY_KEYS = ("flash_bwd_dkv_kernel", "product_over_queries_kernel")


def _programs(name: str, constants: Constants, n_queries: int, n_keys: int) -> int:
    """Return how many programs a kernel needs for one sentence."""
    tiles = ceil_div(n_queries, constants.BM)
    if name in _BY_TILE:
        tiles *= ceil_div(n_keys, constants.BN)
    if name in _BY_KEYS:
        tiles = ceil_div(n_keys, constants.BN)
    return tiles if name in tuning.BY_HEADS else tiles * constants.H


def start(kernel: Any, programs: int, arguments: tuple[Any, ...], tile: Tile) -> Any:
    """Launch a kernel and return what triton compiled, if it did; all launches pass here."""
    return kernel[(programs,)](*arguments, num_warps=tile.warps, num_stages=tile.stages)


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
    missing = 4 - attn_mask.dim()
    attn_mask = attn_mask[(None,) * missing]
    for dim, stride in enumerate(attn_mask.stride()):
        # Made by `expand`: one row in memory stands for all, and is kept as one.
        if stride == 0 and attn_mask.shape[dim] > 1:
            attn_mask = attn_mask.narrow(dim, 0, 1)
    if attn_mask.dtype == torch.float64:
        return attn_mask.float()
    return attn_mask


def spans_of(mask: Tensor | None) -> Tensor | None:
    """Return start and stop of the keys that a mask leaves visible, and of those it changes.

    With them a causal mask of floats, as fairseq passes it, skips the tiles that `causal` skips.

    Args:
        mask: [1 or B, 1 or H, 1 or Nq, 1 or Nk], or transposed for the spans of queries

    Returns:
        int32 [Nq, 4], or [Nk, 4] of a transposed mask; None for masks that are broadcast over
            queries or keys, and for masks that differ by sentence or head: there the search could
            cost more than it saves
    """
    if mask is None or mask.shape[:2] != (1, 1) or 1 in mask.shape[2:]:
        return None
    rows, n = mask.shape[2:]
    spans = torch.empty(rows, 4, dtype=torch.int32, device=mask.device)
    tile = Tile(16, 256, 4, 1)
    arguments = (strided(mask), spans, rows, n, tile.BM, tile.BN)
    start(spans_kernel, ceil_div(rows, tile.BM), arguments, tile)
    return spans


def _forward(*fields: Any) -> tuple[Tensor, Tensor]:
    inputs = AttentionInputs(*fields)
    with torch.cuda.device_of(inputs.query):
        return Call(inputs).forward()


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_output(query, value), query.new_empty(2, *query.shape[:3], dtype=torch.float32)


def _backward(
    d_output: Tensor, rows: Tensor, output: Tensor | None, *fields: Any
) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*fields)
    with torch.cuda.device_of(d_output):
        grads = Call(inputs).backward(d_output, rows, output)
    return all_gradients(dict(zip(inputs.given(), grads)), d_output)


def _backward_fake(
    d_output: Tensor, rows: Tensor, output: Tensor | None, *fields: Any
) -> tuple[Tensor, ...]:
    given = AttentionInputs(*fields).given()
    grads = {name: torch.empty_like(tensor) for name, tensor in given.items()}
    return all_gradients(grads, d_output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, rows = output
    # Where heads mix, delta comes from dM and not from the output.
    mixes = AttentionInputs(*inputs).mixing is not None
    save_inputs(ctx, inputs, rows, None if mixes else out)
    ctx.mark_non_differentiable(rows)
    ctx.set_materialize_grads(False)  # the gradient of `rows` is not made


def _differentiate(
    ctx: Any, d_output: Tensor | None, d_rows: Tensor | None
) -> tuple[Tensor | None, ...]:
    if d_output is None:
        return (None,) * len(AttentionInputs._fields)
    inputs, rows, output = saved_inputs(ctx)
    grads = torch.ops.mixhead_plugin.triton_backward(d_output, rows, output, *inputs)
    return by_field(grads, inputs.given())


_RESULTS = "Tensor d_output, Tensor rows, Tensor? output"
register("triton", f"({SCHEMA}) -> (Tensor, Tensor)", _forward, _forward_fake)
register("triton_backward", f"({_RESULTS}, {SCHEMA}) -> {GRADIENTS}", _backward, _backward_fake)
register_backward("triton", _save, _differentiate)
