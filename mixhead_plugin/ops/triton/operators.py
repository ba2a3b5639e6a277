"""The kernels as operators of torch: their arguments, the order they run in, autograd and shapes for the compiler."""

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from mixhead_plugin.ops.triton import flash, mixed, tuning
from mixhead_plugin.ops.triton.records import Constants, Dropout, Masks, Strided
from mixhead_plugin.ops.triton.rows import LOG2E, spans_kernel
from mixhead_plugin.ops.triton.tuning import Tile, ceil_div, power_of_2

_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor? mixing, Tensor? attn_mask, Tensor? key_padding_mask, "
    "Tensor? seed, str normalizer, bool causal, float dropout_p, float scale"
)
_BACKWARD = "Tensor d_output, Tensor rows, Tensor? output"


class Call:
    """One call of the operator: the records that its kernels take, and the kernels in order."""

    def __init__(self, query, key, value, mixing, attn_mask, padding, seed, normalizer, causal, p, scale):
        self.query, self.mixing = query, mixing
        self.batch, self.heads, self.n_queries, head_dim = query.shape
        self.n_keys, value_dim = value.shape[2:]
        # Heads of size 0 are computed: their scores are 0, their weights are not.
        self.empty = 0 in (self.batch, self.heads, self.n_queries, self.n_keys, value_dim)
        mask = None
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
            # Undo `expand`, so that a mask that sentences or heads share is read once.
            attn_mask = attn_mask[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in attn_mask.stride())]
            attn_mask = attn_mask.float() if attn_mask.dtype == torch.float64 else attn_mask
            mask = strided(attn_mask.expand(self.batch, self.heads, self.n_queries, self.n_keys))
        self.attn_mask = attn_mask  # [1 or B, 1 or H, 1 or Nq, 1 or Nk]
        bytes_ = None if padding is None else strided(padding.view(torch.uint8)[:, None, None])
        self.masks = Masks(mask, bytes_, None if self.empty else spans_of(attn_mask))
        self.dropout = None
        if p > 0:
            self.dropout = Dropout(seed, min(round(p * 2**32), 2**32 - 1), 1 / (1 - p) if p < 1 else 0.0)
        self.q, self.k, self.v = strided(query), strided(key), strided(value)
        self.m = None if mixing is None else strided_mixing(mixing)
        self.scale, self.d_scale = scale * LOG2E.value, scale
        self.constants = Constants(
            H=self.heads,
            D=head_dim,
            DP=max(16, power_of_2(head_dim)),
            DV=value_dim,
            DVP=max(16, power_of_2(value_dim)),
            NORMALIZER=normalizer,
            CAUSAL=causal,
            PRECISION="tf32" if query.dtype == torch.float32 and _allows_tf32() else "ieee",
            PER_QUERY=mixing is not None and mixing.dim() == 4,
            MASK_HEADS=attn_mask is not None and attn_mask.shape[1] > 1,
        )
        dtypes = [None if tensor is None else tensor.dtype for tensor in (query, mixing, attn_mask, padding)]
        self.key = (self.constants, *dtypes, p > 0, power_of_2(max(self.n_queries, self.n_keys)))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return O [B, H, Nq, Dv] and the peak and the factor of each row, [2, B, H, Nq]."""
        out = empty_like(self.query, self.constants.DV)
        rows = self.query.new_empty(2, *self.query.shape[:3], dtype=torch.float32)
        if self.empty:
            return out.zero_(), rows.zero_()
        peak, factor = rows
        if self.mixing is None:
            self._run(flash.flash_fwd_kernel, self.q, self.k, self.v, strided(out), peak, factor)
        else:
            self._run(flash.flash_fwd_kernel, self.q, self.k, None, None, peak, factor)
            self._run(mixed.mixed_fwd_kernel, self.q, self.k, self.v, self.m, strided(out), peak, factor)
        return out, rows

    def backward(self, d_out: Tensor, rows: Tensor, out: Optional[Tensor]) -> list[Tensor]:
        """Return the gradients of query, key and value, and of mixing if there is one."""
        grads = [
            torch.empty_like(tensor) for tensor in (self.q.p, self.k.p, self.v.p, self.mixing) if tensor is not None
        ]
        if self.empty:
            return [grad.zero_() for grad in grads]
        d_q, d_k, d_v = map(strided, grads[:3])
        peak, factor = rows
        if self.mixing is None:
            dq_kernel, dkv_kernel = flash.flash_bwd_dq_kernel, flash.flash_bwd_dkv_kernel
            given = (self.q, self.k, self.v, strided(d_out), peak, factor)
            delta, tile = torch.empty_like(peak), Tile(64, 16, 4, 1)
            arguments = (strided(out), strided(d_out), delta, self.n_queries, with_tile(self.constants, tile))
            programs = self.batch * self.heads * ceil_div(self.n_queries, tile.BM)
            start(flash.flash_bwd_delta_kernel, programs, arguments, tile)
        else:
            dq_kernel, dkv_kernel = mixed.mixed_bwd_dq_kernel, mixed.mixed_bwd_dkv_kernel
            given = (self.q, self.k, self.v, self.m, strided(d_out), peak, factor)
            delta = self._mixing_grad(given, grads[3])
        self._run(dq_kernel, *given, delta, d_q, self.d_scale)
        spans = None if self.attn_mask is None else spans_of(self.attn_mask.transpose(2, 3))
        self._run(dkv_kernel, *given, delta, d_k, d_v, self.d_scale, masks=self.masks._replace(spans=spans))
        return grads

    def _mixing_grad(self, given: tuple[Any, ...], d_mixing: Tensor) -> Tensor:
        """Return delta [B, H, Nq] of mixed heads; write dM into `d_mixing`."""

        def outputs(tile: Tile) -> tuple[Tensor, Strided]:
            groups, d_m = ceil_div(self.heads, tile.HG), d_mixing
            delta = self.query.new_empty(self.batch, groups, self.heads, self.n_queries, dtype=torch.float32)
            if d_mixing.dim() == 2:  # a sum for each tile of queries
                shape = (self.batch, ceil_div(self.n_queries, tile.BM), self.heads, self.heads)
                d_m = self.query.new_empty(shape, dtype=torch.float32)
            return delta, strided_mixing(d_m)

        delta, d_m = self._run(mixed.mixed_bwd_dm_kernel, *given, outputs=outputs)
        if d_mixing.dim() == 2:
            d_mixing.copy_(d_m.p.sum((0, 1)))
        return delta[:, 0] if delta.shape[1] == 1 else delta.sum(1)

    def _run(
        self,
        kernel: Any,
        *arguments: Any,
        outputs: Callable[[Tile], tuple[Any, ...]] = lambda tile: (),
        masks: Optional[Masks] = None,
    ) -> tuple[Any, ...]:
        """Launch a kernel with the tile that suits it; return its `outputs`, the arguments that depend on the tile."""
        name, rest = kernel.fn.__name__, (masks or self.masks, self.dropout, self.scale, self.n_queries, self.n_keys)

        def launch(tile: Tile) -> tuple[Any, ...]:
            constants, more = with_tile(self.constants, tile), outputs(tile)
            tiles = ceil_div(self.n_keys, tile.BN) if "_dkv_" in name else ceil_div(self.n_queries, tile.BM)
            parts = constants.GROUPS * (constants.CHUNKS if "_dm_" in name else 1)
            start(kernel, self.batch * tiles * parts, (*arguments, *more, *rest, constants), tile)
            return more

        head_dim = max(self.constants.DP, self.constants.DVP)
        tiles = tuning.tiles_for(name, self.heads, head_dim, self.query.element_size())
        return tuning.run((name, self.key), tiles, launch, self.query.device)


def start(kernel: Any, programs: int, arguments: tuple[Any, ...], tile: Tile) -> None:
    """Launch a kernel; all launches pass here."""
    kernel[(programs,)](*arguments, num_warps=tile.warps, num_stages=tile.stages)


def with_tile(constants: Constants, tile: Tile) -> Constants:
    """Complete the constants of a call by those of a tile."""
    groups, chunks = ceil_div(constants.H, tile.HG), ceil_div(constants.H, tile.HC)
    sizes = dict(BM=tile.BM, BN=tile.BN, HC=tile.HC, HK=max(16, tile.HC), HG=tile.HG)
    return constants._replace(**sizes, GROUPS=groups, CHUNKS=chunks, TWICE=tile.stages > 1 and chunks == 1)


def _allows_tf32() -> bool:
    matmul = torch.backends.cuda.matmul
    # Newer versions of torch have another switch, and raise when the old one is read after the new one was set.
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


def strided(tensor: Tensor) -> Strided:
    return Strided(tensor, *tensor.stride())


def strided_mixing(mixing: Tensor) -> Strided:
    """Return M, [B, Nq, H, H] or [H, H], as [B, H, Nq, H]."""
    s_b, s_n, s_h, s_d = (0, 0, *mixing.stride())[-4:]
    return Strided(mixing, s_b, s_h, s_n, s_d)


def spans_of(mask: Optional[Tensor]) -> Optional[Tensor]:
    """Return start and stop of the keys that the mask leaves visible, and of those that it changes, int32 [Nq, 4].

    Return those of queries, [Nk, 4], for a transposed mask. With them a causal mask of floats, as fairseq passes it,
    skips the tiles that `causal` skips. Return None for masks that differ by sentence or head, where the search could
    cost more than it saves, and for masks that are broadcast over queries or keys.
    """
    if mask is None or mask.shape[:2] != (1, 1) or 1 in mask.shape[2:]:
        return None
    rows, n = mask.shape[2:]
    spans = torch.empty(rows, 4, dtype=torch.int32, device=mask.device)
    tile = Tile(16, 256, 4, 1)
    start(spans_kernel, ceil_div(rows, tile.BM), (strided(mask), spans, rows, n, tile.BM, tile.BN), tile)
    return spans


def empty_like(query: Tensor, size: int) -> Tensor:
    """Return [B, H, Nq, size] in the memory order of `query`, so that reshaping it needs no copy."""
    order = sorted(range(4), key=query.stride, reverse=True)
    shape = [*query.shape[:3], size]
    return query.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    with torch.cuda.device_of(inputs[0]):
        return Call(*inputs).forward()


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_like(query, value.shape[3]), query.new_empty(2, *query.shape[:3], dtype=torch.float32)


def _backward(d_output: Tensor, rows: Tensor, output: Optional[Tensor], *inputs: Any) -> list[Tensor]:
    with torch.cuda.device_of(d_output):
        return Call(*inputs).backward(d_output, rows, output)


def _backward_fake(d_output: Tensor, rows: Tensor, output: Optional[Tensor], *inputs: Any) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in inputs[:4] if tensor is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, rows = output
    mixes = inputs[3] is not None  # then delta comes from dM and not from the output
    ctx.save_for_backward(rows, None if mixes else out, *inputs[:7])
    ctx.options = inputs[7:]
    ctx.mark_non_differentiable(rows)
    ctx.set_materialize_grads(False)  # the gradient of `rows` is not made


def _differentiate(ctx: Any, d_output: Optional[Tensor], d_rows: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
    if d_output is None:
        return (None,) * 11
    saved = ctx.saved_tensors  # read once: activation checkpointing computes them here and returns them once
    grads = torch.ops.mixhead_plugin.triton_backward(d_output, *saved, *ctx.options)
    return (*grads[:3], grads[3] if len(grads) > 3 else None, *[None] * 7)


def _no_second_derivative(ctx: Any, *d_grads: Any) -> None:
    raise NotImplementedError("impl 'triton' has no second derivative; impl 'reference' has")


_OPERATORS = {
    "triton": (f"({_SCHEMA}) -> (Tensor, Tensor)", _forward, _forward_fake),
    "triton_backward": (f"({_BACKWARD}, {_SCHEMA}) -> Tensor[]", _backward, _backward_fake),
}
for _name, (_schema, _function, _fake) in _OPERATORS.items():
    # torch.library.custom_op would import the compiler at its first call.
    torch.library.define(f"mixhead_plugin::{_name}", _schema)
    torch.library.impl(f"mixhead_plugin::{_name}", "default", _function)
    torch.library.register_fake(f"mixhead_plugin::{_name}", _fake)
torch.library.register_autograd("mixhead_plugin::triton", _differentiate, setup_context=_save)
torch.library.register_autograd("mixhead_plugin::triton_backward", _no_second_derivative)
