"""Kernels for heads that mix: one tile a program, with all heads.

A mixed head needs the weights of all heads. So a tile is [heads, BM, BN]; a program computes HC
heads at a time and adds to HG of them:

    for each tile of keys:
        for each HC source heads:   their weights, which M adds to HG mixed heads
        the HG mixed heads, times their values

A mixing product takes the 16 heads that tensor cores need, or fewer heads of several keys
(triton.md). records.py has all sizes. Offsets are of queries o_m and keys o_n; of heads computed at
once o_h, and of heads added to o_g. Where gradients of mixed heads become those of source heads, as
in `mixed_bwd_dq_kernel`, the o_h are mixed heads and the o_g source heads; else it is the reverse.

The arguments of the kernels:

    q, k, v, o     `Strided` [B, H, N, D], and so their gradients d_q, d_k, d_v, d_o
    m              `Strided` [B, H, Nq, H]: sentence, source head, query, mixed head
    peak, factor   [B, H, Nq], the statistics of rows that `flash_fwd_kernel` has written
    delta          [B, H, Nq], P . dP of each row
    scale          of scores, times log2(e), because weights are powers of 2
    d_scale        of their gradients, which have no log2(e)
    masks, dropout, C    see records.py

dw stands for the gradient of the mixed weights, dp for that of the weights P.
"""

import triton
import triton.language as tl

from mixhead_plugin.ops.triton import rows
from mixhead_plugin.ops.triton.records import Strided


@triton.jit
def program_of(n, BLOCK: tl.constexpr, SHARES: tl.constexpr):
    """Return the program's share of the heads, its tile, the number of tiles and its sentence."""
    n_tiles = (n + BLOCK - 1) // BLOCK
    i_p = tl.program_id(0) % SHARES
    i_bt = tl.program_id(0) // SHARES
    return i_p, i_bt % n_tiles, n_tiles, (i_bt // n_tiles).to(tl.int64)


@triton.jit
def transposed(b_x):
    """Swap the last two of three dimensions."""
    return tl.permute(b_x, (0, 2, 1))


@triton.jit
def scores_of(
    b_x,
    b_y,
    i_b,
    o_h,
    o_m,
    o_n,
    masks,
    scale,
    n_queries,
    n_keys,
    C: tl.constexpr,
    KEYS_FIRST: tl.constexpr = False,
):
    """Return the biased scores of heads o_h, [heads, BM, BN]; with KEYS_FIRST [heads, BN, BM].

    b_x and b_y are queries [heads, BM, DP] and transposed keys [heads, DP, BN]; with KEYS_FIRST
    they are keys and transposed queries.
    """
    if KEYS_FIRST:
        o_m = o_m[None, None, :]
        o_n = o_n[None, :, None]
    else:
        o_m = o_m[None, :, None]
        o_n = o_n[None, None, :]
    b_s = rows.product(b_x, b_y, C) * scale
    # A head beyond the last reads the mask of the last one. Its weights are 0 whatever its scores.
    o_mask = tl.minimum(o_h, C.H - 1).to(tl.int64)[:, None, None] if C.MASK_HEADS else 0
    return b_s + rows.bias_of(i_b, o_mask, o_m, o_n, masks, n_queries, n_keys, C)


@triton.jit
def load_mixing(m, o_m, o_from, o_to, n_queries, C: tl.constexpr):
    """Load the matrices that `mix` multiplies by, [PARTS, HC * PACK, HG * PACK].

    Each has M at each of PACK places of its diagonal, so that PACK keys are mixed at once and do
    not mix with one another. For two heads and PACK = 2, with rows and columns (head, key):

        M00  0    M01  0
        0    M00  0    M01
        M10  0    M11  0
        0    M10  0    M11
    """
    # The M of each query, or PARTS times the one for all, which stands at every query.
    o_q = o_m if C.PER_QUERY else tl.arange(0, C.PARTS) * 0
    b_m = rows.load_heads_upright(m, o_from, o_q, o_to, n_queries, C.H, C.H)  # [HC, PARTS, HG]
    b_m = tl.permute(b_m, (1, 0, 2))[:, :, None, :, None]  # [PARTS, HC, 1, HG, 1]
    same = tl.arange(0, C.PACK)[:, None, None] == tl.arange(0, C.PACK)[None, None, :]
    b_m = tl.where(same, b_m, 0.0)  # [PARTS, HC, PACK, HG, PACK]
    return tl.reshape(b_m, [C.PARTS, C.HC * C.PACK, C.HG * C.PACK])


@triton.jit
def laid_out(b_x, b_y):
    """Return b_x in the layout of b_y, which saves conflicts in shared memory (triton.md, 'Banks').

    triton gives a result the layout of its operands. So zeros that are made of the float32 of b_y
    are added to b_x bit by bit. They come by two shifts, because one of all 32 bits is undefined.
    triton does not see that they are zeros; LLVM does, and removes them. If either changes, the
    kernels are slower and still right.
    """
    BITS: tl.constexpr = tl.uint16 if b_x.dtype.primitive_bitwidth == 16 else tl.uint32
    b_zeros = (b_y.to(tl.uint32, bitcast=True) >> 16) >> 16
    return (b_x.to(BITS, bitcast=True) | b_zeros.to(BITS)).to(b_x.dtype, bitcast=True)


@triton.jit
def mix(
    b_x, b_m, b_sum, b_last, ROUND: tl.constexpr, C: tl.constexpr, KEYS_FIRST: tl.constexpr = False
):
    """Return b_sum + M^T x, and the product, which the next call takes as b_last.

    x is [HC, BM, BN] and b_sum [HG, BM, BN]; with KEYS_FIRST both are [heads, BN, BM]. x takes the
    dtype of b_m, which `load_mixing` returned. ROUND rounds the sum to that dtype, which is right
    once all source heads are in it. HC heads of PACK keys are the numbers of a product, and its
    matrix keeps the keys apart, so NaN stays with its query.

    Of b_last the numbers are ignored and the layout is taken: see `laid_out`, which serves as many
    heads after mixing as before.
    """
    HG: tl.constexpr = b_sum.shape[0]
    b_h = b_x.to(b_m.dtype)
    if KEYS_FIRST:
        b_h = tl.permute(tl.reshape(b_h, [C.HC, C.BN // C.PACK, C.PACK, C.BM]), (3, 1, 0, 2))
    else:
        b_h = tl.permute(tl.reshape(b_h, [C.HC, C.BM, C.BN // C.PACK, C.PACK]), (1, 2, 0, 3))
    b_h = tl.reshape(b_h, [C.PARTS, b_last.shape[1], C.HC * C.PACK])
    if HG == C.HC:
        b_h = laid_out(b_h, b_last)
    b_last = rows.product(b_h, b_m, C)  # [PARTS, .., HG * PACK]
    b_y = tl.reshape(b_last, [C.BM, C.BN // C.PACK, HG, C.PACK])
    b_y = b_sum + tl.reshape(
        tl.permute(b_y, (2, 1, 3, 0) if KEYS_FIRST else (2, 0, 1, 3)), b_sum.shape
    )
    if HG == C.HC:
        b_y = laid_out(b_y.to(b_m.dtype) if ROUND else b_y, b_x).to(tl.float32)
    return b_y, b_last


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def mixed_fwd_kernel(
    q, k, v, m, o, peak, factor, masks, dropout, scale, n_queries, n_keys, C: tl.constexpr
):
    """Write O of a tile of queries and a group of mixed heads."""
    i_g, i_t, n_tiles, i_b = program_of(n_queries, C.BM, C.GROUPS)
    first = (n_tiles - 1 - i_t) * C.BM  # the longest rows of a causal mask first
    o_m = first + tl.arange(0, C.BM)
    o_g = i_g * C.HG + tl.arange(0, C.HG)
    o_d = tl.arange(0, C.DP)
    o_v = tl.arange(0, C.DVP)
    q = rows.at(q, i_b, 0)
    k = rows.at(k, i_b, 0)
    v = rows.at(v, i_b, 0)
    m = rows.at(m, i_b, 0)
    b_o = tl.full([C.HG, C.DVP, C.BM], 0.0, tl.float32)
    seed = tl.load(dropout.seed) if dropout is not None else 0
    # Only its layout counts: see `mix`.
    b_last = tl.full([C.PARTS, C.BM * C.BN // C.PACK // C.PARTS, C.HG * C.PACK], 0.0, tl.float32)
    start, _, stop = rows.key_span(first, n_queries, n_keys, masks, C)
    # [HG, BN, DVP]
    b_v = rows.load_heads_upright(v, o_g, start + tl.arange(0, C.BN), o_v, n_keys, C.H, C.DV)
    for i_n in range(start, stop, C.BN):
        o_n = i_n + tl.arange(0, C.BN)
        b_mixed = tl.full([C.HG, C.BM, C.BN], 0.0, tl.float32)
        for i_h in range(0, C.H, C.HC):
            o_h = i_h + tl.arange(0, C.HC)
            b_q = rows.load_heads_upright(q, o_h, o_m, o_d, n_queries, C.H, C.D)  # [HC, BM, DP]
            b_kt = transposed(rows.load_heads(k, o_h, o_n, o_d, n_keys, C.H, C.D))  # [HC, DP, BN]
            # [HC, BM, 1]
            b_peak = rows.load_statistic(peak, i_b, o_h, o_m, n_queries, C.H, float("inf"))[
                :, :, None
            ]
            # [HC, BM, 1]
            b_factor = rows.load_statistic(factor, i_b, o_h, o_m, n_queries, C.H, 0.0)[:, :, None]
            # M is rounded to the dtype of the queries, as in the formula of that dtype.
            # [PARTS, HC * PACK, HG * PACK]
            b_m = load_mixing(m, o_m, o_h, o_g, n_queries, C).to(b_q.dtype)
            # [HC, BM, BN]
            b_s = scores_of(b_q, b_kt, i_b, o_h, o_m, o_n, masks, scale, n_queries, n_keys, C)
            b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HC, BM, BN]
            b_mixed, b_last = mix(b_p, b_m, b_mixed, b_last, C.CHUNKS == 1, C)
        if dropout is not None:
            # [HG, BM, BN]
            keep = rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_g, first, i_n, RANK=3, C=C)
            b_mixed = tl.where(keep, b_mixed, 0.0)
        b_o = rows.add_product(transposed(b_v), transposed(b_mixed.to(b_v.dtype)), b_o, C)
        # One tile ahead: the compiler prefetches none that is a transposed first operand.
        b_v = rows.load_heads_upright(v, o_g, o_n + C.BN, o_v, n_keys, C.H, C.DV)
    if dropout is not None:
        b_o *= dropout.gain
    rows.store_heads(rows.at(o, i_b, 0), transposed(b_o), o_g, o_m, o_v, n_queries, C.H, C.DV)


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def mixed_bwd_dm_kernel(
    q,
    k,
    v,
    m,
    d_o,
    peak,
    factor,
    delta,
    d_m,
    masks,
    dropout,
    scale,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write G[j, i] = sum over the keys of P_j dPbar_i for HC source heads j and HG mixed heads i.

    d_m takes G of each query, which is dM; where M is shared it takes the sum over the tile of
    queries. delta [B, GROUPS, H, Nq] takes the group's part of delta_j = sum_i M_ji G_ji.
    """
    i_p, i_t, n_tiles, i_b = program_of(n_queries, C.BM, C.GROUPS * C.CHUNKS)
    i_g = i_p % C.GROUPS
    i_h = i_p // C.GROUPS * C.HC
    i_t = n_tiles - 1 - i_t
    first = i_t * C.BM
    o_m = first + tl.arange(0, C.BM)
    o_h = i_h + tl.arange(0, C.HC)
    o_g = i_g * C.HG + tl.arange(0, C.HG)
    o_d = tl.arange(0, C.DP)
    o_v = tl.arange(0, C.DVP)
    k = rows.at(k, i_b, 0)
    v = rows.at(v, i_b, 0)
    # [HC, BM, DP]
    b_q = rows.load_heads_upright(rows.at(q, i_b, 0), o_h, o_m, o_d, n_queries, C.H, C.D)
    # [HG, BM, DVP]
    b_do = rows.load_heads_upright(rows.at(d_o, i_b, 0), o_g, o_m, o_v, n_queries, C.H, C.DV)
    # [HC, BM, 1]
    b_peak = rows.load_statistic(peak, i_b, o_h, o_m, n_queries, C.H, float("inf"))[:, :, None]
    # [HC, BM, 1]
    b_factor = rows.load_statistic(factor, i_b, o_h, o_m, n_queries, C.H, 0.0)[:, :, None]
    b_g = tl.full([C.BM, C.HC, C.HG], 0.0, tl.float32)
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, _, stop = rows.key_span(first, n_queries, n_keys, masks, C)
    for i_n in range(start, stop, C.BN):
        o_n = i_n + tl.arange(0, C.BN)
        b_kt = transposed(rows.load_heads(k, o_h, o_n, o_d, n_keys, C.H, C.D))  # [HC, DP, BN]
        b_vt = transposed(rows.load_heads(v, o_g, o_n, o_v, n_keys, C.H, C.DV))  # [HG, DVP, BN]
        # [HC, BM, BN]
        b_s = scores_of(b_q, b_kt, i_b, o_h, o_m, o_n, masks, scale, n_queries, n_keys, C)
        b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HC, BM, BN]
        b_dw = rows.product(b_do, b_vt, C)  # [HG, BM, BN]
        if dropout is not None:
            # [HG, BM, BN]
            keep = rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_g, first, i_n, RANK=3, C=C)
            b_dw = tl.where(keep, b_dw * dropout.gain, 0.0)
        b_p = tl.permute(b_p.to(b_kt.dtype), (1, 0, 2))  # [BM, HC, BN]
        b_dw = tl.permute(b_dw.to(b_kt.dtype), (1, 0, 2))  # [BM, HG, BN]
        if C.HC == C.HG:
            b_like = tl.max(b_g, 2)[:, :, None]  # [BM, HC, 1]
            b_p = laid_out(b_p, b_like)
            b_dw = laid_out(b_dw, b_like)
        b_g = rows.add_product(b_p, transposed(b_dw), b_g, C)
    m = rows.at(m, i_b, 0)
    d_m = rows.at(d_m, i_b, 0)
    if C.PER_QUERY:
        rows.store_heads(d_m, tl.permute(b_g, (1, 0, 2)), o_h, o_m, o_g, n_queries, C.H, C.H)
    else:
        rows.store_heads(
            d_m, tl.sum(b_g, 0)[:, None, :], o_h, i_t + tl.arange(0, 1), o_g, n_tiles, C.H, C.H
        )
    # [BM, HC, HG]
    b_m = tl.permute(rows.load_heads_upright(m, o_h, o_m, o_g, n_queries, C.H, C.H), (1, 0, 2))
    b_delta = tl.sum(b_m.to(q.p.dtype.element_ty).to(tl.float32) * b_g, 2)  # [BM, HC]
    p_delta = delta + (i_b * C.GROUPS + i_g) * C.H * n_queries
    p_delta = p_delta + o_h.to(tl.int64)[None, :] * n_queries + o_m[:, None]  # [BM, HC]
    tl.store(p_delta, b_delta, mask=(o_h < C.H)[None, :] & (o_m < n_queries)[:, None])


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def mixed_bwd_dq_kernel(
    q,
    k,
    v,
    m,
    d_o,
    peak,
    factor,
    delta,
    d_q,
    d_scale,
    masks,
    dropout,
    scale,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write dQ of a tile of queries and a group of source heads."""
    i_g, i_t, n_tiles, i_b = program_of(n_queries, C.BM, C.GROUPS)
    first = (n_tiles - 1 - i_t) * C.BM
    o_m = first + tl.arange(0, C.BM)
    o_g = i_g * C.HG + tl.arange(0, C.HG)
    o_d = tl.arange(0, C.DP)
    o_v = tl.arange(0, C.DVP)
    k = rows.at(k, i_b, 0)
    v = rows.at(v, i_b, 0)
    d_o = rows.at(d_o, i_b, 0)
    m = rows.at(m, i_b, 0)
    m_t = Strided(m.p, m.s_b, m.s_d, m.s_n, m.s_h)  # from mixed heads to source heads
    # [HG, BM, DP]
    b_q = rows.load_heads_upright(rows.at(q, i_b, 0), o_g, o_m, o_d, n_queries, C.H, C.D)
    # [HG, BM, 1]
    b_peak = rows.load_statistic(peak, i_b, o_g, o_m, n_queries, C.H, float("inf"))[:, :, None]
    # [HG, BM, 1]
    b_factor = rows.load_statistic(factor, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, :, None]
    # [HG, BM, 1]
    b_delta = rows.load_statistic(delta, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, :, None]
    b_dq = tl.full([C.HG, C.DP, C.BM], 0.0, tl.float32)
    seed = tl.load(dropout.seed) if dropout is not None else 0
    # Only its layout counts: see `mix`.
    b_last = tl.full([C.PARTS, C.BM * C.BN // C.PACK // C.PARTS, C.HG * C.PACK], 0.0, tl.float32)
    start, _, stop = rows.key_span(first, n_queries, n_keys, masks, C)
    for i_n in range(start, stop, C.BN):
        o_n = i_n + tl.arange(0, C.BN)
        b_dp = tl.full([C.HG, C.BM, C.BN], 0.0, tl.float32)
        for i_h in range(0, C.H, C.HC):
            o_h = i_h + tl.arange(0, C.HC)
            # [HC, BM, DVP]
            b_do = rows.load_heads_upright(d_o, o_h, o_m, o_v, n_queries, C.H, C.DV)
            b_v = rows.load_heads(v, o_h, o_n, o_v, n_keys, C.H, C.DV)  # [HC, BN, DVP]
            # [PARTS, HC * PACK, HG * PACK]
            b_m = load_mixing(m_t, o_m, o_h, o_g, n_queries, C).to(b_v.dtype)
            b_dw = rows.product(b_do, transposed(b_v), C)  # [HC, BM, BN]
            if dropout is not None:
                # [HC, BM, BN]
                keep = rows.kept(
                    seed, dropout, i_b.to(tl.int32) * C.H + o_h, first, i_n, RANK=3, C=C
                )
                b_dw = tl.where(keep, b_dw * dropout.gain, 0.0)
            b_dp, b_last = mix(b_dw, b_m, b_dp, b_last, False, C)
        b_kt = transposed(rows.load_heads(k, o_g, o_n, o_d, n_keys, C.H, C.D))  # [HG, DP, BN]
        # [HG, BM, BN]
        b_s = scores_of(b_q, b_kt, i_b, o_g, o_m, o_n, masks, scale, n_queries, n_keys, C)
        b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HG, BM, BN]
        b_ds = rows.score_gradient(b_s, b_p, b_dp, b_delta, C)  # [HG, BM, BN]
        b_dq = rows.add_product(b_kt, transposed(b_ds.to(b_kt.dtype)), b_dq, C)
    rows.store_heads(
        rows.at(d_q, i_b, 0), transposed(b_dq * d_scale), o_g, o_m, o_d, n_queries, C.H, C.D
    )


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def mixed_bwd_dkv_kernel(
    q,
    k,
    v,
    m,
    d_o,
    peak,
    factor,
    delta,
    d_k,
    d_v,
    d_scale,
    masks,
    dropout,
    scale,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write dK and dV of a tile of keys and a group of heads.

    Scores and weights are transposed, [heads, BN, BM].
    """
    i_g, i_t, _, i_b = program_of(n_keys, C.BN, C.GROUPS)
    first = i_t * C.BN
    o_n = first + tl.arange(0, C.BN)
    o_g = i_g * C.HG + tl.arange(0, C.HG)
    o_d = tl.arange(0, C.DP)
    o_v = tl.arange(0, C.DVP)
    q = rows.at(q, i_b, 0)
    k = rows.at(k, i_b, 0)
    v = rows.at(v, i_b, 0)
    m = rows.at(m, i_b, 0)
    d_o = rows.at(d_o, i_b, 0)
    m_t = Strided(m.p, m.s_b, m.s_d, m.s_n, m.s_h)
    b_dk = tl.full([C.HG, C.DP, C.BN], 0.0, tl.float32)
    b_dv = tl.full([C.HG, C.DVP, C.BN], 0.0, tl.float32)
    b_kg = rows.load_heads_upright(k, o_g, o_n, o_d, n_keys, C.H, C.D)  # [HG, BN, DP]
    # Then the heads that the program adds to are those it computes, and nothing is loaded twice.
    ALL_HEADS: tl.constexpr = C.GROUPS == 1 and C.HC == C.HG
    if ALL_HEADS:
        b_vg = rows.load_heads_upright(v, o_g, o_n, o_v, n_keys, C.H, C.DV)  # [HG, BN, DVP]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    # Only its layout counts: see `mix`.
    b_last = tl.full([C.PARTS, C.BM * C.BN // C.PACK // C.PARTS, C.HG * C.PACK], 0.0, tl.float32)
    start, _, stop = rows.query_span(first, n_queries, n_keys, masks, C)
    for i_m in range(start, stop, C.BM):
        o_m = i_m + tl.arange(0, C.BM)
        b_qt = transposed(rows.load_heads(q, o_g, o_m, o_d, n_queries, C.H, C.D))  # [HG, DP, BM]
        # [HG, DVP, BM]
        b_dot = transposed(rows.load_heads(d_o, o_g, o_m, o_v, n_queries, C.H, C.DV))
        # [HG, 1, BM]
        b_peak = rows.load_statistic(peak, i_b, o_g, o_m, n_queries, C.H, float("inf"))[:, None, :]
        # [HG, 1, BM]
        b_factor = rows.load_statistic(factor, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, None, :]
        # [HG, 1, BM]
        b_delta = rows.load_statistic(delta, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, None, :]
        # [HG, BN, BM]
        b_s = scores_of(b_kg, b_qt, i_b, o_g, o_m, o_n, masks, scale, n_queries, n_keys, C, True)
        b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HG, BN, BM]
        if dropout is not None:
            # [HG, BN, BM]
            keep = transposed(
                rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_g, i_m, first, RANK=3, C=C)
            )
        b_mixed = tl.full([C.HG, C.BN, C.BM], 0.0, tl.float32)
        b_dp = tl.full([C.HG, C.BN, C.BM], 0.0, tl.float32)
        if ALL_HEADS:
            # [PARTS, HG * PACK, HG * PACK]
            b_m = load_mixing(m, o_m, o_g, o_g, n_queries, C).to(b_qt.dtype)
            b_mixed, b_last = mix(b_p, b_m, b_mixed, b_last, C.CHUNKS == 1, C, True)
            b_dw = rows.product(b_vg, b_dot, C)  # [HG, BN, BM]
            if dropout is not None:
                b_dw = tl.where(keep, b_dw * dropout.gain, 0.0)
            b_dp, b_last = mix(b_dw, transposed(b_m), b_dp, b_last, False, C, True)
        else:
            for i_h in range(0, C.H, C.HC):
                o_h = i_h + tl.arange(0, C.HC)
                b_k = rows.load_heads_upright(k, o_h, o_n, o_d, n_keys, C.H, C.D)  # [HC, BN, DP]
                # [HC, DP, BM]
                b_qht = transposed(rows.load_heads(q, o_h, o_m, o_d, n_queries, C.H, C.D))
                # [PARTS, HC * PACK, HG * PACK]
                b_m = load_mixing(m, o_m, o_h, o_g, n_queries, C).to(b_k.dtype)
                b_sh = scores_of(
                    b_k, b_qht, i_b, o_h, o_m, o_n, masks, scale, n_queries, n_keys, C, True
                )
                # [HC, BM]
                b_peakh = rows.load_statistic(peak, i_b, o_h, o_m, n_queries, C.H, float("inf"))
                # [HC, BM]
                b_factorh = rows.load_statistic(factor, i_b, o_h, o_m, n_queries, C.H, 0.0)
                # [HC, BN, BM]
                b_ph = rows.weights_of(b_sh, b_peakh[:, None, :], b_factorh[:, None, :], C)
                b_mixed, b_last = mix(b_ph, b_m, b_mixed, b_last, C.CHUNKS == 1, C, True)
                b_v = rows.load_heads_upright(v, o_h, o_n, o_v, n_keys, C.H, C.DV)  # [HC, BN, DVP]
                b_do = rows.load_heads(d_o, o_h, o_m, o_v, n_queries, C.H, C.DV)  # [HC, BM, DVP]
                # [PARTS, HC * PACK, HG * PACK]
                b_mt = load_mixing(m_t, o_m, o_h, o_g, n_queries, C).to(b_k.dtype)
                b_dw = rows.product(b_v, transposed(b_do), C)  # [HC, BN, BM]
                if dropout is not None:
                    # [HC, BM, BN]
                    keeph = rows.kept(
                        seed, dropout, i_b.to(tl.int32) * C.H + o_h, i_m, first, RANK=3, C=C
                    )
                    b_dw = tl.where(transposed(keeph), b_dw * dropout.gain, 0.0)
                b_dp, b_last = mix(b_dw, b_mt, b_dp, b_last, False, C, True)
        if dropout is not None:
            b_mixed = tl.where(keep, b_mixed, 0.0)
        b_dv = rows.add_product(b_dot, transposed(b_mixed.to(b_dot.dtype)), b_dv, C)
        b_ds = rows.score_gradient(b_s, b_p, b_dp, b_delta, C)  # [HG, BN, BM]
        b_dk = rows.add_product(b_qt, transposed(b_ds.to(b_qt.dtype)), b_dk, C)
    if dropout is not None:
        b_dv *= dropout.gain
    rows.store_heads(
        rows.at(d_k, i_b, 0), transposed(b_dk * d_scale), o_g, o_n, o_d, n_keys, C.H, C.D
    )
    rows.store_heads(rows.at(d_v, i_b, 0), transposed(b_dv), o_g, o_n, o_v, n_keys, C.H, C.DV)
