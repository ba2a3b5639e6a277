"""Kernels for heads that mix: a program computes the weights of all heads for its tile, because mixing needs them.

A tile is [heads, BM, BN]; a program computes HC heads at a time and adds to HG of them. The mixing product has the
heads last, [BM, BN, heads], padded to the 16 that tensor cores need (triton.md). The mixing matrix M is a `Strided`
[B, H, Nq, H]: sentence, source head, query, mixed head.
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
def load_mixing(m, o_m, first, o_to, n_queries, C: tl.constexpr):
    """Load M from HC heads on, [BM, HK, to] or [HK, to]; the padding of HC to HK rows lies between the heads."""
    o_k = tl.arange(0, C.HK)
    o_from = first + o_k // (C.HK // C.HC)
    inside = ((o_k % (C.HK // C.HC) == 0) & (o_from < C.H))[:, None] & (o_to < C.H)[None, :]
    p_m = m.p + o_from.to(tl.int64)[:, None] * m.s_h + o_to.to(tl.int64)[None, :] * m.s_d  # [HK, to]
    if C.PER_QUERY:
        p_m = p_m[None, :, :] + o_m.to(tl.int64)[:, None, None] * m.s_n  # [BM, HK, to]
        return tl.load(p_m, mask=inside[None, :, :] & (o_m < n_queries)[:, None, None], other=0.0)
    return tl.load(p_m, mask=inside, other=0.0)


@triton.jit
def mix(b_x, b_m, b_sum, C: tl.constexpr):
    """Return b_sum [BM, BN, HG] + x M for x [BM, BN, HC] and M from `load_mixing`; x takes the dtype of M."""
    b_x = b_x.to(b_m.dtype)
    for _ in tl.static_range(4):  # pad the HC heads to HK, with zeros between them
        if 2 * b_x.shape[2] <= C.HK:
            b_x = tl.reshape(tl.join(b_x, tl.zeros_like(b_x)), [C.BM, C.BN, 2 * b_x.shape[2]])
    if C.PER_QUERY:
        return tl.dot(b_x, b_m, b_sum, input_precision=C.PRECISION)
    else:
        b_y = tl.dot(tl.reshape(b_x, [C.BM * C.BN, C.HK]), b_m, input_precision=C.PRECISION)  # [BM * BN, HG]
        return b_sum + tl.reshape(b_y, [C.BM, C.BN, C.HG])


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
        b_mixed = tl.full([C.BM, C.BN, C.HG], 0.0, tl.float32)  # [BM, BN, HG]
        for i_h in range(0, C.H, C.HC):
            o_h = i_h + tl.arange(0, C.HC)
            b_q = rows.load_heads(q, o_h, o_m, o_d, n_queries, C.H, C.D)  # [HC, BM, DP]
            b_k = rows.load_heads(k, o_h, o_n, o_d, n_keys, C.H, C.D)  # [HC, BN, DP]
            b_peak = rows.load_statistic(peak, i_b, o_h, o_m, n_queries, C.H, float("inf"))[:, :, None]  # [HC, BM, 1]
            b_factor = rows.load_statistic(factor, i_b, o_h, o_m, n_queries, C.H, 0.0)[:, :, None]  # [HC, BM, 1]
            b_m = load_mixing(m, o_m, i_h, o_g, n_queries, C).to(b_q.dtype)  # [BM, HK, HG] or [HK, HG]
            b_kt = transposed(b_k)  # [HC, DP, BN]
            b_s = scores_of(b_q, b_kt, i_b, o_h, o_m, o_n, masks, scale, n_queries, n_keys, C)  # [HC, BM, BN]
            b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HC, BM, BN]
            b_mixed = mix(tl.permute(b_p, (1, 2, 0)), b_m, b_mixed, C)
        b_w = tl.permute(b_mixed, (2, 0, 1))  # [HG, BM, BN]
        if dropout is not None:
            b_w = tl.where(rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_g, first, i_n, 3, C), b_w, 0.0)
        b_v = rows.load_heads(v, o_g, o_n, o_v, n_keys, C.H, C.DV)  # [HG, BN, DVP]
        b_o = tl.dot(b_w.to(b_v.dtype), b_v, b_o, input_precision=C.PRECISION)
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
    b_q = rows.load_heads(rows.at(q, i_b, 0), o_h, o_m, o_d, n_queries, C.H, C.D)  # [HC, BM, DP]
    b_do = rows.load_heads(rows.at(d_o, i_b, 0), o_g, o_m, o_v, n_queries, C.H, C.DV)  # [HG, BM, DVP]
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
    b_q = rows.load_heads(rows.at(q, i_b, 0), o_g, o_m, o_d, n_queries, C.H, C.D)  # [HG, BM, DP]
    b_peak = rows.load_statistic(peak, i_b, o_g, o_m, n_queries, C.H, float("inf"))[:, :, None]  # [HG, BM, 1]
    b_factor = rows.load_statistic(factor, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, :, None]  # [HG, BM, 1]
    b_delta = rows.load_statistic(delta, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, :, None]  # [HG, BM, 1]
    b_dq = tl.full([C.HG, C.BM, C.DP], 0.0, tl.float32)  # [HG, BM, DP]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, _, stop = rows.key_span(first, n_queries, n_keys, masks, C)
    for i_n in range(start, stop, C.BN):
        o_n = i_n + tl.arange(0, C.BN)
        b_dp = tl.full([C.BM, C.BN, C.HG], 0.0, tl.float32)  # [BM, BN, HG]
        for i_h in range(0, C.H, C.HC):
            o_h = i_h + tl.arange(0, C.HC)
            b_do = rows.load_heads(d_o, o_h, o_m, o_v, n_queries, C.H, C.DV)  # [HC, BM, DVP]
            b_v = rows.load_heads(v, o_h, o_n, o_v, n_keys, C.H, C.DV)  # [HC, BN, DVP]
            b_m = load_mixing(m_t, o_m, i_h, o_g, n_queries, C).to(b_v.dtype)  # [BM, HK, HG] or [HK, HG]
            b_dw = tl.dot(b_do, transposed(b_v), input_precision=C.PRECISION)  # [HC, BM, BN]
            if dropout is not None:
                keep = rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_h, first, i_n, 3, C)  # [HC, BM, BN]
                b_dw = tl.where(keep, b_dw * dropout.gain, 0.0)
            b_dp = mix(tl.permute(b_dw, (1, 2, 0)), b_m, b_dp, C)
        b_k = rows.load_heads(k, o_g, o_n, o_d, n_keys, C.H, C.D)  # [HG, BN, DP]
        b_kt = transposed(b_k)  # [HG, DP, BN]
        if C.TWICE:
            b_kt = rows.load_heads(rows.transposed(k), o_g, o_d, o_n, C.D, C.H, n_keys)
        b_s = scores_of(b_q, b_kt, i_b, o_g, o_m, o_n, masks, scale, n_queries, n_keys, C)  # [HG, BM, BN]
        b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HG, BM, BN]
        b_ds = rows.score_gradient(b_s, b_p, tl.permute(b_dp, (2, 0, 1)), b_delta, C)  # [HG, BM, BN]
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
    b_kg = rows.load_heads(k, o_g, o_n, o_d, n_keys, C.H, C.D)  # [HG, BN, DP]
    ALL_HEADS: tl.constexpr = C.GROUPS == 1 and C.HC == C.HG
    if ALL_HEADS:
        b_vg = rows.load_heads(v, o_g, o_n, o_v, n_keys, C.H, C.DV)  # [HG, BN, DVP]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, _, stop = rows.query_span(first, n_queries, n_keys, masks, C)
    for i_m in range(start, stop, C.BM):
        o_m = i_m + tl.arange(0, C.BM)
        b_qg = rows.load_heads(q, o_g, o_m, o_d, n_queries, C.H, C.D)  # [HG, BM, DP]
        b_dog = rows.load_heads(d_o, o_g, o_m, o_v, n_queries, C.H, C.DV)  # [HG, BM, DVP]
        b_qt, b_dot = transposed(b_qg), transposed(b_dog)  # [HG, DP, BM], [HG, DVP, BM]
        if C.TWICE and ALL_HEADS:
            b_qt = rows.load_heads(rows.transposed(q), o_g, o_d, o_m, C.D, C.H, n_queries)
            b_dot = rows.load_heads(rows.transposed(d_o), o_g, o_v, o_m, C.DV, C.H, n_queries)
        b_peak = rows.load_statistic(peak, i_b, o_g, o_m, n_queries, C.H, float("inf"))[:, None, :]  # [HG, 1, BM]
        b_factor = rows.load_statistic(factor, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, None, :]  # [HG, 1, BM]
        b_delta = rows.load_statistic(delta, i_b, o_g, o_m, n_queries, C.H, 0.0)[:, None, :]  # [HG, 1, BM]
        b_s = scores_of(b_kg, b_qt, i_b, o_g, o_m, o_n, masks, scale, n_queries, n_keys, C, True)  # [HG, BN, BM]
        b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [HG, BN, BM]
        if dropout is not None:
            keep = transposed(rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_g, i_m, first, 3, C))  # [HG, BN, BM]
        b_mixed = tl.full([C.BM, C.BN, C.HG], 0.0, tl.float32)  # [BM, BN, HG]
        b_dp = tl.full([C.BM, C.BN, C.HG], 0.0, tl.float32)  # [BM, BN, HG]
        if ALL_HEADS:
            b_m = load_mixing(m, o_m, 0, o_g, n_queries, C).to(b_qg.dtype)  # [BM, HK, HG] or [HK, HG]
            b_mt = load_mixing(m_t, o_m, 0, o_g, n_queries, C).to(b_qg.dtype)  # [BM, HK, HG] or [HK, HG]
            b_mixed = mix(tl.permute(b_p, (2, 1, 0)), b_m, b_mixed, C)
            b_dw = tl.dot(b_vg, b_dot, input_precision=C.PRECISION)  # [HG, BN, BM]
            if dropout is not None:
                b_dw = tl.where(keep, b_dw * dropout.gain, 0.0)
            b_dp = mix(tl.permute(b_dw, (2, 1, 0)), b_mt, b_dp, C)
        else:
            for i_h in range(0, C.H, C.HC):
                o_h = i_h + tl.arange(0, C.HC)
                b_k = rows.load_heads(k, o_h, o_n, o_d, n_keys, C.H, C.D)  # [HC, BN, DP]
                b_q = rows.load_heads(q, o_h, o_m, o_d, n_queries, C.H, C.D)  # [HC, BM, DP]
                b_m = load_mixing(m, o_m, i_h, o_g, n_queries, C).to(b_k.dtype)  # [BM, HK, HG] or [HK, HG]
                b_qht = transposed(b_q)  # [HC, DP, BM]
                b_sh = scores_of(b_k, b_qht, i_b, o_h, o_m, o_n, masks, scale, n_queries, n_keys, C, True)
                b_peakh = rows.load_statistic(peak, i_b, o_h, o_m, n_queries, C.H, float("inf"))  # [HC, BM]
                b_factorh = rows.load_statistic(factor, i_b, o_h, o_m, n_queries, C.H, 0.0)  # [HC, BM]
                b_ph = rows.weights_of(b_sh, b_peakh[:, None, :], b_factorh[:, None, :], C)  # [HC, BN, BM]
                b_mixed = mix(tl.permute(b_ph, (2, 1, 0)), b_m, b_mixed, C)
                b_v = rows.load_heads(v, o_h, o_n, o_v, n_keys, C.H, C.DV)  # [HC, BN, DVP]
                b_do = rows.load_heads(d_o, o_h, o_m, o_v, n_queries, C.H, C.DV)  # [HC, BM, DVP]
                b_mt = load_mixing(m_t, o_m, i_h, o_g, n_queries, C).to(b_k.dtype)  # [BM, HK, HG] or [HK, HG]
                b_dw = tl.dot(b_v, transposed(b_do), input_precision=C.PRECISION)  # [HC, BN, BM]
                if dropout is not None:
                    keeph = rows.kept(seed, dropout, i_b.to(tl.int32) * C.H + o_h, i_m, first, 3, C)  # [HC, BM, BN]
                    b_dw = tl.where(transposed(keeph), b_dw * dropout.gain, 0.0)
                b_dp = mix(tl.permute(b_dw, (2, 1, 0)), b_mt, b_dp, C)
        b_w = tl.permute(b_mixed, (2, 1, 0))  # [HG, BN, BM]
        if dropout is not None:
            b_w = tl.where(keep, b_w * dropout.gain, 0.0)
        b_dv = tl.dot(b_w.to(b_dog.dtype), b_dog, b_dv, input_precision=C.PRECISION)
        b_ds = rows.score_gradient(b_s, b_p, tl.permute(b_dp, (2, 1, 0)), b_delta, C)  # [HG, BN, BM]
        b_dk = tl.dot(b_ds.to(b_qg.dtype), b_qg, b_dk, input_precision=C.PRECISION)
    rows.store_heads(rows.at(d_k, i_b, 0), b_dk * d_scale, o_g, o_n, o_d, n_keys, C.H, C.D)
    rows.store_heads(rows.at(d_v, i_b, 0), b_dv, o_g, o_n, o_v, n_keys, C.H, C.DV)
