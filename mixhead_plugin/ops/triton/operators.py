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
        self.candidate = candidate
        query, key, value, padding, p = *inputs[:3], inputs.key_padding_mask, inputs.dropout_p
        self.query, self.mixing, self.inputs = query, inputs.mixing, inputs
        self.batch, self.heads, self.n_queries, head_dim = query.shape
        self.n_keys, value_dim = value.shape[2:]
        # Heads of size 0 are computed: their scores are 0, their weights are not.
        self.empty = 0 in (self.batch, self.heads, self.n_queries, self.n_keys, value_dim)
        self.attn_mask, mask = None, None
        if inputs.attn_mask is not None:
            self.attn_mask = readable_mask(inputs.attn_mask)  # [1 or B, 1 or H, 1 or Nq, 1 or Nk]
            mask = self.attn_mask.expand(self.batch, self.heads, self.n_queries, self.n_keys)
        # not bytes: see rows.load_wide
        hidden = None if padding is None else padding.int().contiguous()
        spans = None if self.empty else spans_of(self.attn_mask)
        s_b, s_h, s_n, s_d = (None,) * 4 if mask is None else mask.stride()
        self.masks = Masks(mask, s_b, s_h, s_n, s_d, padding=hidden, spans=spans)
        self.dropout = None
        if p > 0:
            # A float, because triton compiles small and large integers apart; 2^32 - 256 is the
            # largest below 2^32.
            self.dropout = Dropout(
                inputs.seed, min(p * 2.0**32, 2.0**32 - 256), 1 / (1 - p) if p < 1 else 0.0
            )
        self.q, self.k, self.v = strided(query), strided(key), strided(value)
        self.m = None if self.mixing is None else strided_mixing(self.mixing)
        self.sink = None if inputs.sink is None else inputs.sink.float() * LOG2E.value  # [H]
        self.scale = inputs.scale * LOG2E.value
        padded_dim, padded_value_dim = padded(head_dim, value_dim)
        self.constants = Constants(
            H=self.heads,
            D=head_dim,
            DP=padded_dim,
            DV=value_dim,
            DVP=padded_value_dim,
            NORMALIZER=inputs.normalizer,
            CAUSAL=inputs.causal,
            PRECISION="tf32" if query.dtype == torch.float32 and allows_tf32() else "ieee",
            PER_QUERY=self.mixing is not None and self.mixing.dim() == 4,
            MASK_HEADS=self.attn_mask is not None and self.attn_mask.shape[1] > 1,
        )
        dtypes = [
            None if tensor is None else tensor.dtype
            for tensor in (query, self.mixing, self.attn_mask)
        ]
        self.key = (
            self.constants,
            *dtypes,
            padding is not None,
            p > 0,
            power_of_2(max(self.n_queries, self.n_keys)),
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return O [B, H, Nq, Dv] and the peak and the factor of each row, [2, B, H, Nq]."""
        out = self._unwritten(empty_output(self.query, self.inputs.value))
        rows = self._unwritten(self.query.new_empty(2, *self.query.shape[:3], dtype=torch.float32))
        if self.empty:
            return out.zero_(), rows.zero_()
        peak, factor = rows
        if self.mixing is None:
            self._run(
                flash.flash_fwd_kernel,
                self.q,
                self.k,
                self.v,
                strided(out),
                self.sink,
                peak,
                factor,
            )
        else:
            self._run(flash.flash_fwd_kernel, self.q, self.k, None, None, self.sink, peak, factor)
            self._run(
                mixed.mixed_fwd_kernel, self.q, self.k, self.v, self.m, strided(out), peak, factor
            )
        return out, rows

    def backward(self, d_out: Tensor, rows: Tensor, out: Tensor | None) -> list[Tensor]:
        """Return the gradients of query, key and value, and of mixing and the sink, if any."""
        grads = [
            self._unwritten(torch.empty_like(tensor)) for tensor in self.inputs.given().values()
        ]
        if self.empty:
            return [grad.zero_() for grad in grads]
        d_q, d_k, d_v = map(strided, grads[:3])
        peak, factor = rows
        if self.mixing is None:
            assert out is not None  # saved where heads are not mixed
            dq_kernel, dkv_kernel = flash.flash_bwd_dq_kernel, flash.flash_bwd_dkv_kernel
            given: tuple[Any, ...] = (self.q, self.k, self.v, strided(d_out), peak, factor)
            delta, tile = self._unwritten(torch.empty_like(peak)), Tile(64, 16, 4, 1)
            arguments = (
                strided(out),
                strided(d_out),
                delta,
                self.n_queries,
                with_tile(self.constants, tile),
            )
            programs = self.batch * self.heads * ceil_div(self.n_queries, tile.BM)
            start(flash.flash_bwd_delta_kernel, programs, arguments, tile)
        else:
            dq_kernel, dkv_kernel = mixed.mixed_bwd_dq_kernel, mixed.mixed_bwd_dkv_kernel
            given = (self.q, self.k, self.v, self.m, strided(d_out), peak, factor)
            delta = self._mixing_grad(given, grads[3])
        self._run(dq_kernel, *given, delta, d_q, self.inputs.scale)
        spans = None if self.attn_mask is None else spans_of(self.attn_mask.transpose(2, 3))
        self._run(
            dkv_kernel,
            *given,
            delta,
            d_k,
            d_v,
            self.inputs.scale,
            masks=self.masks._replace(spans=spans),
        )
        if self.sink is not None:
            grads[-1].copy_(self._sink_grad(peak, factor, delta))
        return grads

    def _sink_grad(self, peak: Tensor, factor: Tensor, delta: Tensor) -> Tensor:
        """Return dS of triton.md for the sink, whose dP is 0, summed to [H].

        The statistics are [B, H, Nq].
        """
        assert self.inputs.sink is not None
        score = self.inputs.sink.float()[:, None]  # [H, 1]
        sigsoftmax = self.inputs.normalizer == "sigsoftmax"
        exponent = score + score.clamp(max=0) if sigsoftmax else score
        weights = torch.exp2(exponent * LOG2E.value - peak) * factor  # [B, H, Nq]
        weights = weights * torch.sigmoid(score.abs()) if sigsoftmax else weights
        slope = (
            2 - torch.sigmoid(score)
            if sigsoftmax
            else weights
            if self.inputs.normalizer == "l2"
            else 1
        )
        return -(weights * slope * delta).sum((0, 2))

    def _mixing_grad(self, given: tuple[Any, ...], d_mixing: Tensor) -> Tensor:
        """Return delta [B, H, Nq] of mixed heads; write dM into `d_mixing`."""

        def outputs(tile: Tile) -> tuple[Tensor, Strided]:
            groups, d_m = ceil_div(self.heads, tile.HG), d_mixing
            shape = (self.batch, groups, self.heads, self.n_queries)
            delta = self._unwritten(self.query.new_empty(shape, dtype=torch.float32))
            if d_mixing.dim() == 2:  # a sum for each tile of queries
                shape = (self.batch, ceil_div(self.n_queries, tile.BM), self.heads, self.heads)
                d_m = self._unwritten(self.query.new_empty(shape, dtype=torch.float32))
            return delta, strided_mixing(d_m)

        delta, d_m = self._run(mixed.mixed_bwd_dm_kernel, *given, outputs=outputs)
        if d_mixing.dim() == 2:
            d_mixing.copy_(d_m.p.sum((0, 1)))
        return delta[:, 0] if delta.shape[1] == 1 else delta.sum(1)

    def _unwritten(self, memory: Tensor) -> Tensor:
        return memory if self.candidate is None else memory.fill_(torch.nan)

    def _run(
        self,
        kernel: Any,
        *arguments: Any,
        outputs: Callable[[Tile], tuple[Any, ...]] = lambda tile: (),
        masks: Masks | None = None,
    ) -> tuple[Any, ...]:
        """Launch a kernel with the tile that suits it; return its `outputs`.

        They are the arguments that depend on the tile.
        """
        name, rest = (
            kernel.fn.__name__,
            (masks or self.masks, self.dropout, self.scale, self.n_queries, self.n_keys),
        )

        def launch(tile: Tile) -> tuple[Any, ...]:
            constants, more = with_tile(self.constants, tile), outputs(tile)
            tiles = (
                ceil_div(self.n_keys, tile.BN)
                if "_dkv_" in name
                else ceil_div(self.n_queries, tile.BM)
            )
            parts = constants.GROUPS * (constants.CHUNKS if "_dm_" in name else 1)
            start(kernel, self.batch * tiles * parts, (*arguments, *more, *rest, constants), tile)
            return more

        head_dim = max(self.constants.DP, self.constants.DVP)
        tiles = tuning.tiles_for(name, self.heads, head_dim, self.query.element_size())
        if self.candidate is not None:
            return tuning.first_fitting(tiles[self.candidate :] or tiles[-1:], launch)[1]
        return tuning.run((name, self.key), tiles, launch, self.query.device)


def start(kernel: Any, programs: int, arguments: tuple[Any, ...], tile: Tile) -> Any:
    """Launch a kernel and return what triton compiled, if it did; all launches pass here."""
    return kernel[(programs,)](*arguments, num_warps=tile.warps, num_stages=tile.stages)


def with_tile(constants: Constants, tile: Tile) -> Constants:
    """Complete the constants of a call by those of a tile."""
    pack = max(1, 16 // tile.HC)
    return constants._replace(
        BM=tile.BM,
        BN=tile.BN,
        HC=tile.HC,
        HG=tile.HG,
        GROUPS=ceil_div(constants.H, tile.HG),
        CHUNKS=ceil_div(constants.H, tile.HC),
        PACK=pack,
        PARTS=tile.BM if constants.PER_QUERY else max(1, min(8, tile.BM * tile.BN // pack // 16)),
    )


def padded(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return both sizes as powers of 2.

    The smaller one is raised to the larger one, but to no more than 64.

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
    attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    for dim, stride in enumerate(attn_mask.stride()):
        # made by `expand`: the kernels read such numbers once
        if stride == 0 and attn_mask.shape[dim] > 1:
            attn_mask = attn_mask.narrow(dim, 0, 1)
    return attn_mask.float() if attn_mask.dtype == torch.float64 else attn_mask


def spans_of(mask: Tensor | None) -> Tensor | None:
    """Return start and stop of the keys that the mask leaves visible, and of those it changes.

    int32 [Nq, 4].

    Return those of queries, [Nk, 4], for a transposed mask. With them a causal mask of floats, as
    fairseq passes it, skips the tiles that `causal` skips. Return None for masks that are broadcast
    over queries or keys, and for masks that differ by sentence or head: there the search could cost
    more than it saves.
    """
    if mask is None or mask.shape[:2] != (1, 1) or 1 in mask.shape[2:]:
        return None
    rows, n = mask.shape[2:]
    spans = torch.empty(rows, 4, dtype=torch.int32, device=mask.device)
    tile = Tile(16, 256, 4, 1)
    start(
        spans_kernel,
        ceil_div(rows, tile.BM),
        (strided(mask), spans, rows, n, tile.BM, tile.BN),
        tile,
    )
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
    grads = {
        name: torch.empty_like(tensor) for name, tensor in AttentionInputs(*fields).given().items()
    }
    return all_gradients(grads, d_output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, rows = output
    # then delta comes from dM and not from the output
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
