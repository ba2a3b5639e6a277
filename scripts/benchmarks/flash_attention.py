"""FlashAttention-2 (Dao 2023) in triton and nothing else, which our kernels are counted beside.

Heads, queries and keys lie one after the other, and all lengths are multiples of the tiles. As in
the project's kernels two passes make dQ, and dK and dV; the authors' own kernel makes both at once,
by atomic additions.
"""

import torch
import triton
import triton.language as tl

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.triton import programs, tuning
from mixhead_plugin.ops.triton.rows import LOG2E

PASSES = ("fwd", "bwd_dq", "bwd_dkv")


@triton.jit
def place_of(n, BLOCK: tl.constexpr):
    """Return the first position of the program's tile, and its head."""
    tiles = n // BLOCK
    return tl.program_id(0) % tiles * BLOCK, tl.program_id(0) // tiles


@triton.jit
def tile_at(x, i_h, first, n, D: tl.constexpr, BLOCK: tl.constexpr):
    """Return pointers to [BLOCK, D] of head i_h."""
    return x + (i_h * n + first + tl.arange(0, BLOCK))[:, None] * D + tl.arange(0, D)[None, :]


@triton.jit
def forward_kernel(q, k, v, o, lse, scale, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Write O and log2 of the sum of each row."""
    first, i_h = place_of(n, BM)
    b_q = tl.load(tile_at(q, i_h, first, n, D, BM))  # [BM, D]
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.full([BM], 0.0, tl.float32)
    b_o = tl.full([BM, D], 0.0, tl.float32)
    for i_n in range(0, n, BN):
        b_k = tl.load(tile_at(k, i_h, i_n, n, D, BN))  # [BN, D]
        b_s = tl.dot(b_q, tl.trans(b_k)) * (scale * LOG2E)  # [BM, BN]
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_shrink = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_shrink + tl.sum(b_p, 1)
        b_max = b_new
        b_v = tl.load(tile_at(v, i_h, i_n, n, D, BN))  # [BN, D]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_shrink[:, None])
    tl.store(tile_at(o, i_h, first, n, D, BM), (b_o / b_sum[:, None]).to(b_q.dtype))
    tl.store(lse + i_h * n + first + tl.arange(0, BM), b_max + tl.log2(b_sum))


@triton.jit
def delta_kernel(o, d_o, delta, n, D: tl.constexpr, BM: tl.constexpr):
    """Write delta = O . dO of each row."""
    first, i_h = place_of(n, BM)
    b_o = tl.load(tile_at(o, i_h, first, n, D, BM))  # [BM, D]
    b_do = tl.load(tile_at(d_o, i_h, first, n, D, BM))  # [BM, D]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    tl.store(delta + i_h * n + first + tl.arange(0, BM), b_delta)


@triton.jit
def dq_kernel(
    q, k, v, d_o, lse, delta, d_q, scale, n, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Write dQ of a tile of queries."""
    first, i_h = place_of(n, BM)
    b_q = tl.load(tile_at(q, i_h, first, n, D, BM))  # [BM, D]
    b_do = tl.load(tile_at(d_o, i_h, first, n, D, BM))  # [BM, D]
    at = i_h * n + first + tl.arange(0, BM)[:, None]
    b_lse = tl.load(lse + at)  # [BM, 1]
    b_delta = tl.load(delta + at)  # [BM, 1]
    b_dq = tl.full([BM, D], 0.0, tl.float32)
    for i_n in range(0, n, BN):
        b_k = tl.load(tile_at(k, i_h, i_n, n, D, BN))  # [BN, D]
        b_v = tl.load(tile_at(v, i_h, i_n, n, D, BN))  # [BN, D]
        b_p = tl.exp2(tl.dot(b_q, tl.trans(b_k)) * (scale * LOG2E) - b_lse)  # [BM, BN]
        b_ds = b_p * (tl.dot(b_do, tl.trans(b_v)) - b_delta)
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq)
    tl.store(tile_at(d_q, i_h, first, n, D, BM), (b_dq * scale).to(b_q.dtype))


@triton.jit
def dkv_kernel(
    q,
    k,
    v,
    d_o,
    lse,
    delta,
    d_k,
    d_v,
    scale,
    n,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Write dK and dV of a tile of keys; the weights are transposed, [BN, BM]."""
    first, i_h = place_of(n, BN)
    b_k = tl.load(tile_at(k, i_h, first, n, D, BN))  # [BN, D]
    b_v = tl.load(tile_at(v, i_h, first, n, D, BN))  # [BN, D]
    b_dk = tl.full([BN, D], 0.0, tl.float32)
    b_dv = tl.full([BN, D], 0.0, tl.float32)
    for i_m in range(0, n, BM):
        b_q = tl.load(tile_at(q, i_h, i_m, n, D, BM))  # [BM, D]
        b_do = tl.load(tile_at(d_o, i_h, i_m, n, D, BM))  # [BM, D]
        at = i_h * n + i_m + tl.arange(0, BM)[None, :]
        b_p = tl.exp2(tl.dot(b_k, tl.trans(b_q)) * (scale * LOG2E) - tl.load(lse + at))  # [BN, BM]
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv)
        b_ds = b_p * (tl.dot(b_v, tl.trans(b_do)) - tl.load(delta + at))
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk)
    tl.store(tile_at(d_k, i_h, first, n, D, BN), (b_dk * scale).to(b_k.dtype))
    tl.store(tile_at(d_v, i_h, first, n, D, BN), b_dv.to(b_k.dtype))


def forward(q, k, v, scale: float, tile, start) -> tuple:
    """Launch the forward pass by `start`; return O and log2 of the sum of each row.

    Queries, keys and values are [1, H, N, D]; D is at least 16.
    """
    _, heads, n, size = q.shape
    o = torch.empty_like(q)
    lse = torch.empty(heads, n, device=q.device)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    sizes = {"n": n, "D": size, "BM": tile.BM, "BN": tile.BN}
    start(forward_kernel, heads * n // tile.BM, {**tensors, "scale": scale, **sizes}, tile)
    return o, lse


def backward(q, k, v, o, lse, d_o, scale: float, tiles, start) -> list:
    """Launch the passes for delta, dQ, and dK and dV; return the gradients of q, k and v.

    Args:
        q, k, v, o, d_o: [1, H, N, D]
        lse: [H, N], log2 of the sum of each row
        scale: factor on the scores
        tiles: that of dQ, and that of dK and dV
        start: launches a kernel
    """
    _, heads, n, size = q.shape
    d_q = torch.empty_like(q)
    d_k = torch.empty_like(q)
    d_v = torch.empty_like(q)
    delta = torch.empty(heads, n, device=q.device)
    dq, dkv = tiles
    sizes = {"n": n, "D": size}
    of_delta = {"o": o, "d_o": d_o, "delta": delta, **sizes, "BM": dq.BM}
    start(delta_kernel, heads * n // dq.BM, of_delta, dq)
    given = {"q": q, "k": k, "v": v, "d_o": d_o, "lse": lse, "delta": delta, "scale": scale}
    of_dq = {**given, "d_q": d_q, **sizes, "BM": dq.BM, "BN": dq.BN}
    start(dq_kernel, heads * n // dq.BM, of_dq, dq)
    of_dkv = {**given, "d_k": d_k, "d_v": d_v, **sizes, "BM": dkv.BM, "BN": dkv.BN}
    start(dkv_kernel, heads * n // dkv.BN, of_dkv, dkv)
    return [d_q, d_k, d_v]


def run(q, k, v, d_o, scale: float, tiles: list, start) -> list:
    """Launch all passes by `start`; return O and the gradients of q, k and v, [1, H, N, D]."""
    size = q.shape[3]
    q, k, v, d_o = map(wide, (q, k, v, d_o))
    o, lse = forward(q, k, v, scale, tiles[0], start)
    grads = backward(q, k, v, o, lse, d_o, scale, tiles[1:], start)
    return [found[..., :size] for found in (o, *grads)]


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., D] with zeros up to D = 16, which tensor cores need."""
    return torch.nn.functional.pad(x, (0, max(0, 16 - x.shape[3]))).contiguous()


class Attention(torch.autograd.Function):
    """The passes as an operation of torch, for [B, H, N, D] of one length."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        ctx.shape = q.shape
        ctx.scale = scale
        q, k, v = (wide(x).flatten(0, 1)[None] for x in (q, k, v))  # [1, B * H, N, D]
        sizes = (q.shape[1], q.shape[3], q.element_size())
        n = q.shape[2]
        ctx.tiles = []
        for name in PASSES:
            tile = tuning.tiles_for(f"flash_{name}_kernel", *sizes)[0]
            ctx.tiles.append(tile._replace(BM=min(tile.BM, n), BN=min(tile.BN, n)))
        o, lse = forward(q, k, v, scale, ctx.tiles[0], programs.start)
        ctx.save_for_backward(q, k, v, o, lse)
        return o[..., : ctx.shape[3]].reshape(ctx.shape)

    @staticmethod
    def backward(ctx, d_o):
        d_o = wide(d_o).flatten(0, 1)[None]
        grads = backward(*ctx.saved_tensors, d_o, ctx.scale, ctx.tiles[1:], programs.start)
        size = ctx.shape[3]
        return *[grad[..., :size].reshape(ctx.shape) for grad in grads], None


def attend(call: AttentionInputs) -> torch.Tensor:
    """Compute a call without mask, mixing and dropout."""
    return Attention.apply(*call[:3], call.scale)
