"""The operators `triton` and `triton_backward` of torch: the kernels' arguments in order."""

from collections.abc import Callable
from typing import Any

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


class Call:
    """One call of the operator: the records that its kernels take, and the kernels in order.

    Args:
        inputs: of the call
        candidate: for a trial, the place of the tile to take in the list of each kernel; None for
            the fastest. In a trial the memory for results holds NaN, so that a number which no
            kernel writes is noticed.
    """

    def __init__(self, inputs: AttentionInputs, candidate: int | None = None):
        query, key, value = inputs[:3]
        self.inputs = inputs
        self.candidate = candidate
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
        self._run(mixed.mixed_fwd_kernel, self.q, self.k, self.v, self.m, o, peak, factor)
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

        # delta = P . dP of each row, which dQ and dK need.
        given: tuple[Any, ...]
        if self.mixing is None:
            assert out is not None  # saved where heads are not mixed
            given = (self.q, self.k, self.v, strided(d_out), peak, factor)
            delta = self._delta(out, d_out)
            dq_kernel = flash.flash_bwd_dq_kernel
            dkv_kernel = flash.flash_bwd_dkv_kernel
        else:
            given = (self.q, self.k, self.v, self.m, strided(d_out), peak, factor)
            delta = self._mixing_grad(given, grads[3])
            dq_kernel = mixed.mixed_bwd_dq_kernel
            dkv_kernel = mixed.mixed_bwd_dkv_kernel

        scale = self.inputs.scale
        self._run(dq_kernel, *given, delta, d_q, scale)
        # The programs of dK and dV each have some keys, so they need the spans of queries.
        spans = None
        if self.attn_mask is not None:
            spans = spans_of(self.attn_mask.transpose(2, 3))
        by_key = self.masks._replace(spans=spans)
        self._run(dkv_kernel, *given, delta, d_k, d_v, scale, masks=by_key)
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
        constants = with_tile(self.constants, tile)
        arguments = (strided(out), strided(d_out), delta, self.n_queries, constants)
        programs = self.batch * self.heads * ceil_div(self.n_queries, tile.BM)
        start(flash.flash_bwd_delta_kernel, programs, arguments, tile)
        return delta

    def _mixing_grad(self, given: tuple[Any, ...], d_mixing: Tensor) -> Tensor:
        """Return delta [B, H, Nq] of mixed heads; write dM into `d_mixing`.

        Args:
            given: the first arguments of the kernel
            d_mixing: [H, H] or [B, Nq, H, H]
        """

        def outputs(tile: Tile) -> tuple[Tensor, Strided]:
            # Each group of heads has a part of delta, which are summed below.
            groups = ceil_div(self.heads, tile.HG)
            shape = (self.batch, groups, self.heads, self.n_queries)
            delta = self._unwritten(self.query.new_empty(shape, dtype=torch.float32))
            d_m = d_mixing
            if d_mixing.dim() == 2:  # a sum for each tile of queries
                tiles = ceil_div(self.n_queries, tile.BM)
                shape = (self.batch, tiles, self.heads, self.heads)
                d_m = self._unwritten(self.query.new_empty(shape, dtype=torch.float32))
            return delta, strided_mixing(d_m)

        delta, d_m = self._run(mixed.mixed_bwd_dm_kernel, *given, outputs=outputs)
        if d_mixing.dim() == 2:
            d_mixing.copy_(d_m.p.sum((0, 1)))
        if delta.shape[1] == 1:
            return delta[:, 0]
        return delta.sum(1)

    def _unwritten(self, memory: Tensor) -> Tensor:
        """Return memory for a result; in a trial it holds NaN."""
        if self.candidate is None:
            return memory
        return memory.fill_(torch.nan)

    def _run(
        self,
        kernel: Any,
        *arguments: Any,
        outputs: Callable[[Tile], tuple[Any, ...]] = lambda tile: (),
        masks: Masks | None = None,
    ) -> tuple[Any, ...]:
        """Launch a kernel with the tile that suits it.

        Args:
            kernel: the kernel
            arguments: its first ones
            outputs: returns the next ones, which depend on the tile
            masks: in place of the call's own

        Returns:
            what `outputs` has returned
        """
        name = kernel.fn.__name__
        rest = (masks or self.masks, self.dropout, self.scale, self.n_queries, self.n_keys)

        def launch(tile: Tile) -> tuple[Any, ...]:
            constants = with_tile(self.constants, tile)
            more = outputs(tile)
            programs = self.batch * _programs(name, constants, self.n_queries, self.n_keys)
            start(kernel, programs, (*arguments, *more, *rest, constants), tile)
            return more

        head_dim = max(self.constants.DP, self.constants.DVP)
        tiles = tuning.tiles_for(name, self.heads, head_dim, self.query.element_size())
        if self.candidate is not None:
            # A kernel with fewer candidates than others takes its last one.
            left = tiles[self.candidate :] or tiles[-1:]
            return tuning.first_fitting(left, launch)[1]
        return tuning.run((name, self.key), tiles, launch, self.query.device)


def _programs(name: str, constants: Constants, n_queries: int, n_keys: int) -> int:
    """Return how many programs a kernel needs for one sentence.

    A program has one tile and one part of the heads: those of a group, HG, which it adds to. In a
    kernel for heads that do not mix, HG is 1. The kernel for dM has one source of HC heads as well.
    """
    tiles = ceil_div(n_queries, constants.BM)
    if "_dkv_" in name:
        tiles = ceil_div(n_keys, constants.BN)
    parts = constants.GROUPS
    if "_dm_" in name:
        parts *= constants.CHUNKS
    return tiles * parts


def start(kernel: Any, programs: int, arguments: tuple[Any, ...], tile: Tile) -> Any:
    """Launch a kernel and return what triton compiled, if it did; all launches pass here."""
    return kernel[(programs,)](*arguments, num_warps=tile.warps, num_stages=tile.stages)


def with_tile(constants: Constants, tile: Tile) -> Constants:
    """Complete the constants of a call by those of a tile."""
    # Tensor cores multiply at least 16 numbers: with fewer heads, those of several keys.
    pack = max(1, 16 // tile.HC)
    # An M of each query needs a product for each query. The product by an M for all queries is
    # divided into up to 8, of at least 16 rows.
    parts = tile.BM
    if not constants.PER_QUERY:
        parts = max(1, min(8, tile.BM * tile.BN // pack // 16))
    return constants._replace(
        BM=tile.BM,
        BN=tile.BN,
        HC=tile.HC,
        HG=tile.HG,
        GROUPS=ceil_div(constants.H, tile.HG),
        CHUNKS=ceil_div(constants.H, tile.HC),
        PACK=pack,
        PARTS=parts,
    )


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
