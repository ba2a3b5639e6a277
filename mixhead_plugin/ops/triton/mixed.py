"""Kernels for heads that mix: a program computes the weights of all heads for its tile, because mixing needs them.

A tile is [heads, BM, BN]; a program computes HC heads at a time and adds to HG of them. A mixing product takes the 16
heads that tensor cores need, or fewer heads of several parts of the keys (triton.md). The mixing matrix M is a
`Strided` [B, H, Nq, H]: sentence, source head, query, mixed head.
"""

import triton
import triton.language as tl

from mixhead_plugin.ops.triton import rows
from mixhead_plugin.ops.triton.records import Strided


@triton.jit
def program_of(n, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """Return the part of the heads, the tile, the number of tiles and the sentence of this program."""
    n_tiles = (n + BLOCK - 1) // BLOCK
    i_p, i_bt = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    return i_p, i_bt % n_tiles, n_tiles, (i_bt // n_tiles).to(tl.int64)


@triton.jit
def transposed(b_x):
    """Swap the last two of three dimensions."""
    return tl.permute(b_x, (0, 2, 1))


@triton.jit
def scores_of(
    b_x, b_y, i_b, o_h, o_m, o_n, masks, scale, n_queries, n_keys, C: tl.constexpr, KEYS_FIRST: tl.constexpr = False
):
    """Return the biased scores of heads o_h, the product of b_x and b_y: [heads, BM, BN] or, KEYS_FIRST, transposed."""
    if KEYS_FIRST:
        o_m, o_n = o_m[None, None, :], o_n[None, :, None]
    else:
        o_m, o_n = o_m[None, :, None], o_n[None, None, :]
    b_s = tl.dot(b_x, b_y, input_precision=C.PRECISION) * scale
    # A head beyond the last reads the mask of the last one. Its weights are 0 whatever its scores.
    o_mask = tl.minimum(o_h, C.H - 1).to(tl.int64)[:, None, None] if C.MASK_HEADS else 0
    return b_s + rows.bias_of(i_b, o_mask, o_m, o_n, masks, n_queries, n_keys, C)


@triton.jit
def load_mixing(m, o_m, o_from, o_to, n_queries, C: tl.constexpr):
    """Load the transpose of M, [BM, to, from] or [to, from]; zeros outside."""
    inside = (o_to < C.H)[:, None] & (o_from < C.H)[None, :]
    p_m = m.p + o_to.to(tl.int64)[:, None] * m.s_d + o_from.to(tl.int64)[None, :] * m.s_h  # [to, from]
    if C.PER_QUERY:
        p_m = p_m[None, :, :] + o_m.to(tl.int64)[:, None, None] * m.s_n  # [BM, to, from]
        inside = inside[None, :, :] & (o_m < n_queries)[:, None, None]
    return tl.load(p_m, mask=inside, other=0.0)


@triton.jit
def mix(b_x, b_m, b_sum, C: tl.constexpr, KEYS_FIRST: tl.constexpr = False):
    """Return b_sum [HG, BM, BN] + M^T x for x [HC, BM, BN] and M of `load_mixing`; x takes the dtype of M.

    With KEYS_FIRST x and the sum are [heads, BN, BM]. HC heads of PACK parts of the tile are the HK numbers of a
    product. Its matrix has M^T at each place of the diagonal, so the parts do not mix.
    """
    PACK: tl.constexpr = C.HK // C.HC
    HG: tl.constexpr = b_sum.shape[0]
    PART: tl.constexpr = C.BN // PACK
    b_x = b_x.to(b_m.dtype)
    diagonal = tl.arange(0, PACK)[:, None, None, None] == tl.arange(0, PACK)[None, None, :, None]
    if C.PER_QUERY:
        b_m = tl.where(diagonal[None, :, :, :, :], b_m[:, None, :, None, :], 0.0)  # [BM, PACK, HG, PACK, HC]
        b_m = tl.reshape(b_m, [C.BM, PACK * HG, C.HK])
        if KEYS_FIRST:
            b_x = tl.permute(tl.reshape(b_x, [C.HC, PACK, PART, C.BM]), (3, 1, 0, 2))  # [BM, PACK, HC, PART]
        else:
            b_x = tl.permute(tl.reshape(b_x, [C.HC, C.BM, PACK, PART]), (1, 2, 0, 3))  # [BM, PACK, HC, PART]
        b_y = tl.dot(b_m, tl.reshape(b_x, [C.BM, C.HK, PART]), input_precision=C.PRECISION)  # [BM, PACK * HG, PART]
        b_y = tl.reshape(b_y, [C.BM, PACK, HG, PART])
        b_y = tl.permute(b_y, (2, 1, 3, 0) if KEYS_FIRST else (2, 0, 1, 3))
    else:
        b_m = tl.reshape(tl.where(diagonal, b_m[None, :, None, :], 0.0), [PACK * HG, C.HK])
        b_x = tl.permute(tl.reshape(b_x, [C.HC, PACK, C.BM * PART]), (1, 0, 2))
        b_y = tl.dot(b_m, tl.reshape(b_x, [C.HK, C.BM * PART]), input_precision=C.PRECISION)  # [PACK * HG, BM * PART]
        b_y = tl.permute(tl.reshape(b_y, [PACK, HG, C.BM * PART]), (1, 0, 2))
    return b_sum + tl.reshape(b_y, b_sum.shape)


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def mixed_fwd_kernel(q, k, v, m, o, peak, factor, masks, dropout, scale, n_queries, n_keys, C: tl.constexpr):
    """Write O of a tile of queries and a group of mixed heads."""
    i_g, i_t, n_tiles, i_b = program_of(n_queries, C.BM, C.GROUPS)
    first = (n_tiles - 1 - i_t) * C.BM  # the longest rows of a causal mask first
    o_m, o_g = first + tl.arange(0, C.BM), i_g * C.HG + tl.arange(0, C.HG)
    o_d, o_v = tl.arange(0, C.DP), tl.arange(0, C.DVP)
    q, k, v, m = rows.at(q, i_b, 0), rows.at(k, i_b, 0), rows.at(v, i_b, 0), rows.at(m, i_b, 0)
    b_o = tl.full([C.HG, C.BM, C.DVP], 0.0, tl.float32)  # [HG, BM, DVP]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, _, stop = rows.key_span(first, n_queries, n_keys, masks, C)
    for i_n in range(start, stop, C.BN):
        o_n = i_n + tl.arange(0, C.BN)
        b_mixed = tl.full([C.HG, C.BM, C.BN], 0.0, tl.float32)  # [HG, BM, BN]
        for i_h in range(0, C.H, C.HC):
            o_h = i_h + tl.arange(0, C.HC)
            b_q = rows.load_heads_upright(q, o_h, o_m, o_d, n_queries, C.H, C.D)  # [HC, BM, DP]
            b_k = rows.load_heads(k, o_h, o_n, o_d, n_keys, C.H, C.D)  # [HC, BN, DP]
            b_peak = rows.load_statistic(peak, i_b, o_h, o_m, n_queries, C.H, float("inf"))[:, :, None]  # [HC, BM, 1]
            b_factor = rows.load_statistic(factor, i_b, o_h, o_m, n_queries, C.H, 0.0)[:, :, None]  # [HC, BM, 1]
            b_m = load_mixing(m, o_m, o_h, o_g, n_queries, C).to(b_q.dtype)  # [BM, HG, HC] or [HG, HC]
            b_kt = transposed(b_k)  # [HC, DP, BN]
            b_s = scores_of(b_q, b_kt, i_b, o_h, o_m, o_n, masks, scale, n_queries, n_keys, C)  # [HC, BM, BN]
            b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HC, BM, BN]
            b_mixed = mix(b_p, b_m, b_mixed, C)
        if dropout is not None:
            keep = rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_g, first, i_n, 3, C)  # [HG, BM, BN]
            b_mixed = tl.where(keep, b_mixed, 0.0)
        b_v = rows.load_heads_upright(v, o_g, o_n, o_v, n_keys, C.H, C.DV)  # [HG, BN, DVP]
        b_o = tl.dot(b_mixed.to(b_v.dtype), b_v, b_o, input_precision=C.PRECISION)
    if dropout is not None:
        b_o *= dropout.gain
    rows.store_heads(rows.at(o, i_b, 0), b_o, o_g, o_m, o_v, n_queries, C.H, C.DV)


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def mixed_bwd_dm_kernel(
    q, k, v, m, d_o, peak, factor, delta, d_m, masks, dropout, scale, n_queries, n_keys, C: tl.constexpr
):
    """Write G[j, i] = sum over the keys of P_j dPbar_i for HC source heads j and HG mixed heads i.

    d_m takes G of each query, which is dM; where M is shared it takes the sum over the tile of queries.
    delta [B, GROUPS, H, Nq] takes the group's part of delta_j = sum_i M_ji G_ji.
    """
    i_p, i_t, n_tiles, i_b = program_of(n_queries, C.BM, C.GROUPS * C.CHUNKS)
    i_g, i_h, i_t = i_p % C.GROUPS, i_p // C.GROUPS * C.HC, n_tiles - 1 - i_t
    first = i_t * C.BM
    o_m, o_h, o_g = first + tl.arange(0, C.BM), i_h + tl.arange(0, C.HC), i_g * C.HG + tl.arange(0, C.HG)
    o_d, o_v = tl.arange(0, C.DP), tl.arange(0, C.DVP)
    k, v = rows.at(k, i_b, 0), rows.at(v, i_b, 0)
    b_q = rows.load_heads_upright(rows.at(q, i_b, 0), o_h, o_m, o_d, n_queries, C.H, C.D)  # [HC, BM, DP]
    b_do = rows.load_heads_upright(rows.at(d_o, i_b, 0), o_g, o_m, o_v, n_queries, C.H, C.DV)  # [HG, BM, DVP]
    b_peak = rows.load_statistic(peak, i_b, o_h, o_m, n_queries, C.H, float("inf"))[:, :, None]  # [HC, BM, 1]
    b_factor = rows.load_statistic(factor, i_b, o_h, o_m, n_queries, C.H, 0.0)[:, :, None]  # [HC, BM, 1]
    b_g = tl.full([C.BM, C.HC, C.HG], 0.0, tl.float32)  # [BM, HC, HG]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, _, stop = rows.key_span(first, n_queries, n_keys, masks, C)
    for i_n in range(start, stop, C.BN):
        o_n = i_n + tl.arange(0, C.BN)
        b_k = rows.load_heads(k, o_h, o_n, o_d, n_keys, C.H, C.D)  # [HC, BN, DP]
        b_v = rows.load_heads(v, o_g, o_n, o_v, n_keys, C.H, C.DV)  # [HG, BN, DVP]
        b_kt = transposed(b_k)  # [HC, DP, BN]
        b_s = scores_of(b_q, b_kt, i_b, o_h, o_m, o_n, masks, scale, n_queries, n_keys, C)  # [HC, BM, BN]
        b_p = tl.permute(rows.weights_of(b_s, b_peak, b_factor, C), (1, 0, 2))  # [BM, HC, BN]
        b_dw = tl.dot(b_do, transposed(b_v), input_precision=C.PRECISION)  # [HG, BM, BN]
        if dropout is not None:
            keep = rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_g, first, i_n, 3, C)  # [HG, BM, BN]
            b_dw = tl.where(keep, b_dw * dropout.gain, 0.0)
        b_dw = tl.permute(b_dw, (1, 2, 0))  # [BM, BN, HG]
        b_g = tl.dot(b_p.to(b_k.dtype), b_dw.to(b_k.dtype), b_g, input_precision=C.PRECISION)
    m, d_m = rows.at(m, i_b, 0), rows.at(d_m, i_b, 0)
    inside = (o_h < C.H)[:, None] & (o_g < C.H)[None, :]  # [HC, HG]
    p_m = m.p + o_h.to(tl.int64)[:, None] * m.s_h + o_g.to(tl.int64)[None, :] * m.s_d  # [HC, HG]
    p_dm = d_m.p + o_h.to(tl.int64)[:, None] * d_m.s_h + o_g.to(tl.int64)[None, :] * d_m.s_d  # [HC, HG]
    if C.PER_QUERY:
        by_query = inside[None, :, :] & (o_m < n_queries)[:, None, None]  # [BM, HC, HG]
        b_m = tl.load(p_m[None, :, :] + o_m.to(tl.int64)[:, None, None] * m.s_n, mask=by_query, other=0.0)
        p_dm = p_dm[None, :, :] + o_m.to(tl.int64)[:, None, None] * d_m.s_n  # [BM, HC, HG]
        tl.store(p_dm, b_g.to(d_m.p.dtype.element_ty), mask=by_query)
    else:
        b_m = tl.load(p_m, mask=inside, other=0.0)[None, :, :]  # [1, HC, HG]
        tl.store(p_dm + i_t.to(tl.int64) * d_m.s_n, tl.sum(b_g, 0), mask=inside)
    b_delta = tl.sum(b_m.to(q.p.dtype.element_ty).to(tl.float32) * b_g, 2)  # [BM, HC]
    p_delta = delta + (i_b * C.GROUPS + i_g) * C.H * n_queries
    p_delta = p_delta + o_h.to(tl.int64)[None, :] * n_queries + o_m[:, None]  # [BM, HC]
    tl.store(p_delta, b_delta, mask=(o_h < C.H)[None, :] & (o_m < n_queries)[:, None])


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def mixed_bwd_dq_kernel(
    q, k, v, m, d_o, peak, factor, delta, d_q, d_scale, masks, dropout, scale, n_queries, n_keys, C: tl.constexpr
):
    """Write dQ of a tile of queries and a group of source heads."""
    i_g, i_t, n_tiles, i_b = program_of(n_queries, C.BM, C.GROUPS)
    first = (n_tiles - 1 - i_t) * C.BM
    o_m, o_g = first + tl.arange(0, C.BM), i_g * C.HG + tl.arange(0, C.HG)
    o_d, o_v = tl.arange(0, C.DP), tl.arange(0, C.DVP)
    k, v, d_o, m = rows.at(k, i_b, 0), rows.at(v, i_b, 0), rows.at(d_o, i_b, 0), rows.at(m, i_b, 0)
    m_t = Strided(m.p, m.s_b, m.s_d, m.s_n, m.s_h)  # from mixed heads to source heads
    b_q = rows.load_heads_upright(rows.at(q, i_b, 0), o_g, o_m, o_d, n_queries, C.H, C.D)  # [HG, BM, DP]
    b_peak = rows.load_statistic(peak, i_b, o_g, o_m, n_queries, C.H, float("inf"))[:, :, None]  # [HG, BM, 1]
    b_factor = rows.load_statistic(factor, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, :, None]  # [HG, BM, 1]
    b_delta = rows.load_statistic(delta, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, :, None]  # [HG, BM, 1]
    b_dq = tl.full([C.HG, C.BM, C.DP], 0.0, tl.float32)  # [HG, BM, DP]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, _, stop = rows.key_span(first, n_queries, n_keys, masks, C)
    for i_n in range(start, stop, C.BN):
        o_n = i_n + tl.arange(0, C.BN)
        b_dp = tl.full([C.HG, C.BM, C.BN], 0.0, tl.float32)  # [HG, BM, BN]
        for i_h in range(0, C.H, C.HC):
            o_h = i_h + tl.arange(0, C.HC)
            b_do = rows.load_heads_upright(d_o, o_h, o_m, o_v, n_queries, C.H, C.DV)  # [HC, BM, DVP]
            b_v = rows.load_heads(v, o_h, o_n, o_v, n_keys, C.H, C.DV)  # [HC, BN, DVP]
            b_m = load_mixing(m_t, o_m, o_h, o_g, n_queries, C).to(b_v.dtype)  # [BM, HG, HC] or [HG, HC]
            b_dw = tl.dot(b_do, transposed(b_v), input_precision=C.PRECISION)  # [HC, BM, BN]
            if dropout is not None:
                keep = rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_h, first, i_n, 3, C)  # [HC, BM, BN]
                b_dw = tl.where(keep, b_dw * dropout.gain, 0.0)
            b_dp = mix(b_dw, b_m, b_dp, C)
        b_k = rows.load_heads_upright(k, o_g, o_n, o_d, n_keys, C.H, C.D)  # [HG, BN, DP]
        b_kt = transposed(b_k)  # [HG, DP, BN]
        if C.TWICE:
            b_kt = transposed(rows.load_heads(k, o_g, o_n, o_d, n_keys, C.H, C.D))
        b_s = scores_of(b_q, b_kt, i_b, o_g, o_m, o_n, masks, scale, n_queries, n_keys, C)  # [HG, BM, BN]
        b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HG, BM, BN]
        b_ds = rows.score_gradient(b_s, b_p, b_dp, b_delta, C)  # [HG, BM, BN]
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=C.PRECISION)
    rows.store_heads(rows.at(d_q, i_b, 0), b_dq * d_scale, o_g, o_m, o_d, n_queries, C.H, C.D)


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def mixed_bwd_dkv_kernel(
    q, k, v, m, d_o, peak, factor, delta, d_k, d_v, d_scale, masks, dropout, scale, n_queries, n_keys, C: tl.constexpr
):
    """Write dK and dV of a tile of keys and a group of heads; scores and weights are transposed, [heads, BN, BM]."""
    i_g, i_t, _, i_b = program_of(n_keys, C.BN, C.GROUPS)
    first = i_t * C.BN
    o_n, o_g = first + tl.arange(0, C.BN), i_g * C.HG + tl.arange(0, C.HG)
    o_d, o_v = tl.arange(0, C.DP), tl.arange(0, C.DVP)
    q, k, v, m = rows.at(q, i_b, 0), rows.at(k, i_b, 0), rows.at(v, i_b, 0), rows.at(m, i_b, 0)
    d_o = rows.at(d_o, i_b, 0)
    m_t = Strided(m.p, m.s_b, m.s_d, m.s_n, m.s_h)
    b_dk = tl.full([C.HG, C.BN, C.DP], 0.0, tl.float32)  # [HG, BN, DP]
    b_dv = tl.full([C.HG, C.BN, C.DVP], 0.0, tl.float32)  # [HG, BN, DVP]
    b_kg = rows.load_heads_upright(k, o_g, o_n, o_d, n_keys, C.H, C.D)  # [HG, BN, DP]
    ALL_HEADS: tl.constexpr = C.GROUPS == 1 and C.HC == C.HG
    if ALL_HEADS:
        b_vg = rows.load_heads_upright(v, o_g, o_n, o_v, n_keys, C.H, C.DV)  # [HG, BN, DVP]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, _, stop = rows.query_span(first, n_queries, n_keys, masks, C)
    for i_m in range(start, stop, C.BM):
        o_m = i_m + tl.arange(0, C.BM)
        b_qg = rows.load_heads_upright(q, o_g, o_m, o_d, n_queries, C.H, C.D)  # [HG, BM, DP]
        b_dog = rows.load_heads_upright(d_o, o_g, o_m, o_v, n_queries, C.H, C.DV)  # [HG, BM, DVP]
        b_qt, b_dot = transposed(b_qg), transposed(b_dog)  # [HG, DP, BM], [HG, DVP, BM]
        if C.TWICE and ALL_HEADS:
            b_qt = transposed(rows.load_heads(q, o_g, o_m, o_d, n_queries, C.H, C.D))
            b_dot = transposed(rows.load_heads(d_o, o_g, o_m, o_v, n_queries, C.H, C.DV))
        b_peak = rows.load_statistic(peak, i_b, o_g, o_m, n_queries, C.H, float("inf"))[:, None, :]  # [HG, 1, BM]
        b_factor = rows.load_statistic(factor, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, None, :]  # [HG, 1, BM]
        b_delta = rows.load_statistic(delta, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, None, :]  # [HG, 1, BM]
        b_s = scores_of(b_kg, b_qt, i_b, o_g, o_m, o_n, masks, scale, n_queries, n_keys, C, True)  # [HG, BN, BM]
        b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HG, BN, BM]
        if dropout is not None:
            keep = transposed(rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_g, i_m, first, 3, C))  # [HG, BN, BM]
        b_mixed = tl.full([C.HG, C.BN, C.BM], 0.0, tl.float32)  # [HG, BN, BM]
        b_dp = tl.full([C.HG, C.BN, C.BM], 0.0, tl.float32)  # [HG, BN, BM]
        if ALL_HEADS:
            b_m = load_mixing(m, o_m, o_g, o_g, n_queries, C).to(b_qg.dtype)  # [BM, HG, HG] or [HG, HG]
            b_mt = tl.permute(b_m, (0, 2, 1) if C.PER_QUERY else (1, 0))
            b_mixed = mix(b_p, b_m, b_mixed, C, True)
            b_dw = tl.dot(b_vg, b_dot, input_precision=C.PRECISION)  # [HG, BN, BM]
            if dropout is not None:
                b_dw = tl.where(keep, b_dw * dropout.gain, 0.0)
            b_dp = mix(b_dw, b_mt, b_dp, C, True)
        else:
            for i_h in range(0, C.H, C.HC):
                o_h = i_h + tl.arange(0, C.HC)
                b_k = rows.load_heads(k, o_h, o_n, o_d, n_keys, C.H, C.D)  # [HC, BN, DP]
                b_q = rows.load_heads(q, o_h, o_m, o_d, n_queries, C.H, C.D)  # [HC, BM, DP]
                b_m = load_mixing(m, o_m, o_h, o_g, n_queries, C).to(b_k.dtype)  # [BM, HG, HC] or [HG, HC]
                b_qht = transposed(b_q)  # [HC, DP, BM]
                b_sh = scores_of(b_k, b_qht, i_b, o_h, o_m, o_n, masks, scale, n_queries, n_keys, C, True)
                b_peakh = rows.load_statistic(peak, i_b, o_h, o_m, n_queries, C.H, float("inf"))  # [HC, BM]
                b_factorh = rows.load_statistic(factor, i_b, o_h, o_m, n_queries, C.H, 0.0)  # [HC, BM]
                b_ph = rows.weights_of(b_sh, b_peakh[:, None, :], b_factorh[:, None, :], C)  # [HC, BN, BM]
                b_mixed = mix(b_ph, b_m, b_mixed, C, True)
                b_v = rows.load_heads(v, o_h, o_n, o_v, n_keys, C.H, C.DV)  # [HC, BN, DVP]
                b_do = rows.load_heads(d_o, o_h, o_m, o_v, n_queries, C.H, C.DV)  # [HC, BM, DVP]
                b_mt = load_mixing(m_t, o_m, o_h, o_g, n_queries, C).to(b_k.dtype)  # [BM, HG, HC] or [HG, HC]
                b_dw = tl.dot(b_v, transposed(b_do), input_precision=C.PRECISION)  # [HC, BN, BM]
                if dropout is not None:
                    keeph = rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_h, i_m, first, 3, C)  # [HC, BM, BN]
                    b_dw = tl.where(transposed(keeph), b_dw * dropout.gain, 0.0)
                b_dp = mix(b_dw, b_mt, b_dp, C, True)
        if dropout is not None:
            b_mixed = tl.where(keep, b_mixed * dropout.gain, 0.0)
        b_dv = tl.dot(b_mixed.to(b_dog.dtype), b_dog, b_dv, input_precision=C.PRECISION)
        b_ds = rows.score_gradient(b_s, b_p, b_dp, b_delta, C)  # [HG, BN, BM]
        b_dk = tl.dot(b_ds.to(b_qg.dtype), b_qg, b_dk, input_precision=C.PRECISION)
    rows.store_heads(rows.at(d_k, i_b, 0), b_dk * d_scale, o_g, o_n, o_d, n_keys, C.H, C.D)
    rows.store_heads(rows.at(d_v, i_b, 0), b_dv, o_g, o_n, o_v, n_keys, C.H, C.DV)
