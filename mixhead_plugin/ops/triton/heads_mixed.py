"""Kernels for heads that mix: a program computes the weights of all heads for its tile, because mixing needs them.

Heads are the first dimension of a tile, [heads, BM, BN], and come HC at a time; a program adds to HG of them. For the
mixing itself they are the last one, [BM, BN, heads], and at least 16, as tensor cores want it (triton.md).
"""

import triton
import triton.language as tl

from mixhead_plugin.ops.triton.rows import (
    UNSPECIALIZED,
    bias_of,
    heads_of,
    kept,
    key_span,
    query_span,
    score_gradient,
    statistic_of,
    store_heads,
    turned_heads_of,
    weights_of,
)


@triton.jit
def turned(b_x):
    """[heads, a, b] -> [heads, b, a]"""
    return tl.permute(b_x, (0, 2, 1))


@triton.jit
def scores_of(
    b_q, b_k, o_h, o_m, o_n, scale, n_queries, n_keys, mask, s_mh, s_mm, s_mn, padding, s_pn,
    H: tl.constexpr, CAUSAL: tl.constexpr, MASK_HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[heads, BM, BN] of queries [heads, BM, D] and keys [heads, D, BN]; or the other way round, with o_m and o_n"""
    b_s = tl.dot(b_q, b_k, input_precision=PRECISION) * scale
    if MASK_HEADS:
        # A head beyond the last reads the last one's mask: its weights are 0 whatever its scores.
        mask += tl.minimum(o_h, H - 1).to(tl.int64)[:, None, None] * s_mh
    return b_s + bias_of(o_m, o_n, n_queries, n_keys, mask, s_mm, s_mn, padding, s_pn, CAUSAL)


@triton.jit
def mixing_of(
    m, o_m, first, o_to, s_mixm, s_from, s_to, n_queries,
    H: tl.constexpr, PER_QUERY: tl.constexpr, HC: tl.constexpr, HK: tl.constexpr,
):  # fmt: skip
    """M [BM, HK, to] or [HK, to]; of HK / HC rows that belong to one head the first has the weight, the others 0."""
    row = tl.arange(0, HK)
    o_from = first + row // (HK // HC)
    inside = ((row % (HK // HC) == 0) & (o_from < H))[:, None] & (o_to < H)[None, :]
    p_m = m + o_from.to(tl.int64)[:, None] * s_from + o_to.to(tl.int64)[None, :] * s_to  # [HK, to]
    if PER_QUERY:
        p_m = p_m[None, :, :] + o_m.to(tl.int64)[:, None, None] * s_mixm
        return tl.load(p_m, mask=inside[None, :, :] & (o_m < n_queries)[:, None, None], other=0.0)
    return tl.load(p_m, mask=inside, other=0.0)


@triton.jit
def mix(
    b_x, b_m, b_total, PER_QUERY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HC: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """b_total [BM, BN, HG] + sum over the heads of x [BM, BN, HC] M, with M from `mixing_of`, whose dtype x takes"""
    b_x = b_x.to(b_m.dtype)
    if HK >= 2 * HC:
        b_x = tl.reshape(tl.join(b_x, tl.zeros_like(b_x)), [BM, BN, 2 * HC])
    if HK >= 4 * HC:
        b_x = tl.reshape(tl.join(b_x, tl.zeros_like(b_x)), [BM, BN, 4 * HC])
    if HK >= 8 * HC:
        b_x = tl.reshape(tl.join(b_x, tl.zeros_like(b_x)), [BM, BN, 8 * HC])
    if HK >= 16 * HC:
        b_x = tl.reshape(tl.join(b_x, tl.zeros_like(b_x)), [BM, BN, 16 * HC])
    if PER_QUERY:
        return tl.dot(b_x, b_m, b_total, input_precision=PRECISION)
    else:
        b_mixed = tl.dot(tl.reshape(b_x, [BM * BN, HK]), b_m, input_precision=PRECISION)
        return b_total + tl.reshape(b_mixed, [BM, BN, HG])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    q, k, v, m, out, peak, factor, mask, padding, spans, seed, threshold, gain, scale,
    s_qb, s_qh, s_qn, s_qd, s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd, s_ob, s_oh, s_on, s_od,
    s_xb, s_xn, s_xj, s_xi, s_mb, s_mh, s_mm, s_mn, s_pb, s_pn, n_queries, n_keys, n_tiles, n_groups,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    PER_QUERY: tl.constexpr, MASK_HEADS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HC: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr,
):  # fmt: skip
    """O of a tile of queries and a group of mixed heads"""
    i_g, rest = tl.program_id(0) % n_groups, tl.program_id(0) // n_groups
    tile, i_b = n_tiles - 1 - rest % n_tiles, (rest // n_tiles).to(tl.int64)
    first = tile * BM
    o_m, o_g = first + tl.arange(0, BM), i_g * HG + tl.arange(0, HG)
    o_d, o_v = tl.arange(0, DP), tl.arange(0, DVP)
    q += i_b * s_qb
    k += i_b * s_kb
    v += i_b * s_vb
    m += i_b * s_xb
    peak += i_b * H * n_queries
    factor += i_b * H * n_queries
    if mask is not None:
        mask += i_b * s_mb
    if padding is not None:
        padding += i_b * s_pb
    b_o = tl.zeros([HG, BM, DVP], tl.float32)

    if DROPOUT:
        seed = tl.load(seed)
    start, stop = key_span(first, n_queries, n_keys, spans, CAUSAL, BM, BN)
    for at in range(start, stop, BN):
        o_n = at + tl.arange(0, BN)
        b_mixed = tl.zeros([BM, BN, HG], tl.float32)
        for head in range(0, H, HC):
            o_h = head + tl.arange(0, HC)
            b_q = heads_of(q, o_h, o_m, o_d, s_qh, s_qn, s_qd, n_queries, H, D)  # [HC, BM, DP]
            b_k = heads_of(k, o_h, o_n, o_d, s_kh, s_kn, s_kd, n_keys, H, D)  # [HC, BN, DP]
            b_peak = statistic_of(peak, o_h, o_m, n_queries, H, float("inf"))
            b_factor = statistic_of(factor, o_h, o_m, n_queries, H, 0.0)
            b_m = mixing_of(m, o_m, head, o_g, s_xn, s_xj, s_xi, n_queries, H, PER_QUERY, HC, HK).to(b_q.dtype)
            b_s = scores_of(
                b_q, turned(b_k), o_h, o_m[None, :, None], o_n[None, None, :], scale, n_queries, n_keys,
                mask, s_mh, s_mm, s_mn, padding, s_pn, H, CAUSAL, MASK_HEADS, PRECISION,
            )  # [HC, BM, BN]  # fmt: skip
            b_p = tl.permute(
                weights_of(b_s, b_peak[:, :, None], b_factor[:, :, None], NORMALIZER), (1, 2, 0)
            )  # [BM, BN, HC]
            b_mixed = mix(b_p, b_m, b_mixed, PER_QUERY, BM, BN, HC, HK, HG, PRECISION)
        b_w = tl.permute(b_mixed, (2, 0, 1))  # [HG, BM, BN]
        if DROPOUT:
            b_w = tl.where(kept(seed, threshold, i_b.to(tl.int32) * H + o_g, first, at, 3, BM, BN), b_w, 0.0)
        b_v = heads_of(v, o_g, o_n, o_v, s_vh, s_vn, s_vd, n_keys, H, DV)  # [HG, BN, DVP]
        b_o = tl.dot(b_w.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)
    store_heads(out + i_b * s_ob, b_o * gain, o_g, o_m, o_v, s_oh, s_on, s_od, n_queries, H, DV)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mixing_grad_kernel(
    q, k, v, m, d_out, peak, factor, delta, d_m, mask, padding, spans, seed, threshold, gain, scale,
    s_qb, s_qh, s_qn, s_qd, s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd, s_gb, s_gh, s_gn, s_gd,
    s_xb, s_xn, s_xj, s_xi, s_yb, s_yn, s_yj, s_yi, s_db,
    s_mb, s_mh, s_mm, s_mn, s_pb, s_pn, n_queries, n_keys, n_tiles, n_groups, n_chunks,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    PER_QUERY: tl.constexpr, MASK_HEADS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HC: tl.constexpr, HG: tl.constexpr,
):  # fmt: skip
    """G [j, i] = sum_k P_j dPbar_i of each query, which is dM, for HC source heads j and HG mixed heads i

    and what they add to delta_j = sum_i M_ji G_ji. Where M is shared, d_m holds the sum over each tile of queries.
    """
    part, rest = tl.program_id(0) % (n_groups * n_chunks), tl.program_id(0) // (n_groups * n_chunks)
    i_g, head = part % n_groups, part // n_groups * HC
    tile, i_b = n_tiles - 1 - rest % n_tiles, (rest // n_tiles).to(tl.int64)
    first = tile * BM
    o_m, o_h, o_g = first + tl.arange(0, BM), head + tl.arange(0, HC), i_g * HG + tl.arange(0, HG)
    o_d, o_v = tl.arange(0, DP), tl.arange(0, DVP)
    q += i_b * s_qb
    k += i_b * s_kb
    v += i_b * s_vb
    d_out += i_b * s_gb
    if mask is not None:
        mask += i_b * s_mb
    if padding is not None:
        padding += i_b * s_pb
    b_q = heads_of(q, o_h, o_m, o_d, s_qh, s_qn, s_qd, n_queries, H, D)  # [HC, BM, DP]
    b_do = heads_of(d_out, o_g, o_m, o_v, s_gh, s_gn, s_gd, n_queries, H, DV)  # [HG, BM, DVP]
    b_peak = statistic_of(peak + i_b * H * n_queries, o_h, o_m, n_queries, H, float("inf"))[:, :, None]
    b_factor = statistic_of(factor + i_b * H * n_queries, o_h, o_m, n_queries, H, 0.0)[:, :, None]
    b_g = tl.zeros([BM, HC, HG], tl.float32)

    if DROPOUT:
        seed = tl.load(seed)
    start, stop = key_span(first, n_queries, n_keys, spans, CAUSAL, BM, BN)
    for at in range(start, stop, BN):
        o_n = at + tl.arange(0, BN)
        b_k = heads_of(k, o_h, o_n, o_d, s_kh, s_kn, s_kd, n_keys, H, D)  # [HC, BN, DP]
        b_v = heads_of(v, o_g, o_n, o_v, s_vh, s_vn, s_vd, n_keys, H, DV)  # [HG, BN, DVP]
        b_s = scores_of(
            b_q, turned(b_k), o_h, o_m[None, :, None], o_n[None, None, :], scale, n_queries, n_keys,
            mask, s_mh, s_mm, s_mn, padding, s_pn, H, CAUSAL, MASK_HEADS, PRECISION,
        )  # [HC, BM, BN]  # fmt: skip
        b_p = tl.permute(weights_of(b_s, b_peak, b_factor, NORMALIZER), (1, 0, 2))  # [BM, HC, BN]
        b_dw = tl.dot(b_do, turned(b_v), input_precision=PRECISION)  # [HG, BM, BN]
        if DROPOUT:
            b_dw = tl.where(kept(seed, threshold, i_b.to(tl.int32) * H + o_g, first, at, 3, BM, BN), b_dw * gain, 0.0)
        b_dw = tl.permute(b_dw, (1, 2, 0))  # [BM, BN, HG]
        b_g = tl.dot(b_p.to(b_k.dtype), b_dw.to(b_k.dtype), b_g, input_precision=PRECISION)

    inside = (o_h < H)[:, None] & (o_g < H)[None, :]  # [HC, HG]
    p_m = m + i_b * s_xb + o_h.to(tl.int64)[:, None] * s_xj + o_g.to(tl.int64)[None, :] * s_xi
    p_dm = d_m + i_b * s_yb + o_h.to(tl.int64)[:, None] * s_yj + o_g.to(tl.int64)[None, :] * s_yi
    if PER_QUERY:
        by_query = inside[None, :, :] & (o_m < n_queries)[:, None, None]
        b_m = tl.load(p_m[None, :, :] + o_m.to(tl.int64)[:, None, None] * s_xn, mask=by_query, other=0.0)
        p_dm = p_dm[None, :, :] + o_m.to(tl.int64)[:, None, None] * s_yn
        tl.store(p_dm, b_g.to(d_m.dtype.element_ty), mask=by_query)
    else:
        b_m = tl.load(p_m, mask=inside, other=0.0)[None, :, :]
        tl.store(p_dm + tile.to(tl.int64) * s_yn, tl.sum(b_g, 0), mask=inside)
    b_delta = tl.sum(b_m.to(q.dtype.element_ty).to(tl.float32) * b_g, 2)  # [BM, HC]
    p_delta = delta + i_g.to(tl.int64) * s_db + i_b * H * n_queries
    p_delta = p_delta + o_h.to(tl.int64)[None, :] * n_queries + o_m[:, None]
    tl.store(p_delta, b_delta, mask=(o_h < H)[None, :] & (o_m < n_queries)[:, None])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_grad_kernel(
    q, k, v, m, d_out, peak, factor, delta, d_q, mask, padding, spans, seed, threshold, gain, scale, d_scale,
    s_qb, s_qh, s_qn, s_qd, s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd, s_gb, s_gh, s_gn, s_gd,
    s_rb, s_rh, s_rn, s_rd, s_xb, s_xn, s_xj, s_xi,
    s_mb, s_mh, s_mm, s_mn, s_pb, s_pn, n_queries, n_keys, n_tiles, n_groups,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    PER_QUERY: tl.constexpr, MASK_HEADS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HC: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, TWICE: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries and a group of source heads"""
    i_g, rest = tl.program_id(0) % n_groups, tl.program_id(0) // n_groups
    tile, i_b = n_tiles - 1 - rest % n_tiles, (rest // n_tiles).to(tl.int64)
    first = tile * BM
    o_m, o_g = first + tl.arange(0, BM), i_g * HG + tl.arange(0, HG)
    o_d, o_v = tl.arange(0, DP), tl.arange(0, DVP)
    k += i_b * s_kb
    v += i_b * s_vb
    m += i_b * s_xb
    d_out += i_b * s_gb
    if mask is not None:
        mask += i_b * s_mb
    if padding is not None:
        padding += i_b * s_pb
    b_q = heads_of(q + i_b * s_qb, o_g, o_m, o_d, s_qh, s_qn, s_qd, n_queries, H, D)  # [HG, BM, DP]
    b_peak = statistic_of(peak + i_b * H * n_queries, o_g, o_m, n_queries, H, float("inf"))[:, :, None]
    b_factor = statistic_of(factor + i_b * H * n_queries, o_g, o_m, n_queries, H, 0.0)[:, :, None]
    b_delta = statistic_of(delta + i_b * H * n_queries, o_g, o_m, n_queries, H, 0.0)[:, :, None]
    b_dq = tl.zeros([HG, BM, DP], tl.float32)

    if DROPOUT:
        seed = tl.load(seed)
    start, stop = key_span(first, n_queries, n_keys, spans, CAUSAL, BM, BN)
    for at in range(start, stop, BN):
        o_n = at + tl.arange(0, BN)
        b_dp = tl.zeros([BM, BN, HG], tl.float32)
        for head in range(0, H, HC):
            o_h = head + tl.arange(0, HC)
            b_do = heads_of(d_out, o_h, o_m, o_v, s_gh, s_gn, s_gd, n_queries, H, DV)  # [HC, BM, DVP]
            b_v = heads_of(v, o_h, o_n, o_v, s_vh, s_vn, s_vd, n_keys, H, DV)  # [HC, BN, DVP]
            b_m = mixing_of(m, o_m, head, o_g, s_xn, s_xi, s_xj, n_queries, H, PER_QUERY, HC, HK).to(b_v.dtype)
            b_dw = tl.dot(b_do, turned(b_v), input_precision=PRECISION)  # [HC, BM, BN]
            if DROPOUT:
                keep = kept(seed, threshold, i_b.to(tl.int32) * H + o_h, first, at, 3, BM, BN)
                b_dw = tl.where(keep, b_dw * gain, 0.0)
            b_dp = mix(tl.permute(b_dw, (1, 2, 0)), b_m, b_dp, PER_QUERY, BM, BN, HC, HK, HG, PRECISION)
        b_k = heads_of(k, o_g, o_n, o_d, s_kh, s_kn, s_kd, n_keys, H, D)  # [HG, BN, DP]
        b_kt = turned(b_k)  # [HG, DP, BN]
        if TWICE:
            b_kt = turned_heads_of(k, o_g, o_n, o_d, s_kh, s_kn, s_kd, n_keys, H, D)
        b_s = scores_of(
            b_q, b_kt, o_g, o_m[None, :, None], o_n[None, None, :], scale, n_queries, n_keys,
            mask, s_mh, s_mm, s_mn, padding, s_pn, H, CAUSAL, MASK_HEADS, PRECISION,
        )  # [HG, BM, BN]  # fmt: skip
        b_p = weights_of(b_s, b_peak, b_factor, NORMALIZER)
        b_ds = score_gradient(b_s, b_p, tl.permute(b_dp, (2, 0, 1)), b_delta, NORMALIZER)
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    store_heads(d_q + i_b * s_rb, b_dq * d_scale, o_g, o_m, o_d, s_rh, s_rn, s_rd, n_queries, H, D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_grad_kernel(
    q, k, v, m, d_out, peak, factor, delta, d_k, d_v, mask, padding, spans, seed, threshold, gain, scale, d_scale,
    s_qb, s_qh, s_qn, s_qd, s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd, s_gb, s_gh, s_gn, s_gd,
    s_rb, s_rh, s_rn, s_rd, s_wb, s_wh, s_wn, s_wd, s_xb, s_xn, s_xj, s_xi,
    s_mb, s_mh, s_mm, s_mn, s_pb, s_pn, n_queries, n_keys, n_tiles, n_groups,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    PER_QUERY: tl.constexpr, MASK_HEADS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HC: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, ALL_HEADS: tl.constexpr,
    TWICE: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys and a group of heads; tiles are transposed, [heads, BN, BM]"""
    i_g, rest = tl.program_id(0) % n_groups, tl.program_id(0) // n_groups
    tile, i_b = rest % n_tiles, (rest // n_tiles).to(tl.int64)
    first = tile * BN
    o_n, o_g = first + tl.arange(0, BN), i_g * HG + tl.arange(0, HG)
    o_d, o_v = tl.arange(0, DP), tl.arange(0, DVP)
    q += i_b * s_qb
    k += i_b * s_kb
    v += i_b * s_vb
    m += i_b * s_xb
    d_out += i_b * s_gb
    peak += i_b * H * n_queries
    factor += i_b * H * n_queries
    delta += i_b * H * n_queries
    if mask is not None:
        mask += i_b * s_mb
    if padding is not None:
        padding += i_b * s_pb
    b_dk = tl.zeros([HG, BN, DP], tl.float32)
    b_dv = tl.zeros([HG, BN, DVP], tl.float32)
    b_kg = heads_of(k, o_g, o_n, o_d, s_kh, s_kn, s_kd, n_keys, H, D)  # [HG, BN, DP]
    if ALL_HEADS:
        b_vg = heads_of(v, o_g, o_n, o_v, s_vh, s_vn, s_vd, n_keys, H, DV)  # [HG, BN, DVP]

    if DROPOUT:
        seed = tl.load(seed)
    start, stop = query_span(first, n_queries, n_keys, spans, CAUSAL, BM, BN)
    for at in range(start, stop, BM):
        o_m = at + tl.arange(0, BM)
        b_qg = heads_of(q, o_g, o_m, o_d, s_qh, s_qn, s_qd, n_queries, H, D)  # [HG, BM, DP]
        b_dog = heads_of(d_out, o_g, o_m, o_v, s_gh, s_gn, s_gd, n_queries, H, DV)  # [HG, BM, DVP]
        b_qt, b_dot = turned(b_qg), turned(b_dog)  # [HG, DP, BM], [HG, DVP, BM]
        if TWICE:
            b_qt = turned_heads_of(q, o_g, o_m, o_d, s_qh, s_qn, s_qd, n_queries, H, D)
            b_dot = turned_heads_of(d_out, o_g, o_m, o_v, s_gh, s_gn, s_gd, n_queries, H, DV)
        b_peak = statistic_of(peak, o_g, o_m, n_queries, H, float("inf"))
        b_factor = statistic_of(factor, o_g, o_m, n_queries, H, 0.0)
        b_delta = statistic_of(delta, o_g, o_m, n_queries, H, 0.0)
        b_s = scores_of(
            b_kg, b_qt, o_g, o_m[None, None, :], o_n[None, :, None], scale, n_queries, n_keys,
            mask, s_mh, s_mm, s_mn, padding, s_pn, H, CAUSAL, MASK_HEADS, PRECISION,
        )  # [HG, BN, BM]  # fmt: skip
        b_p = weights_of(b_s, b_peak[:, None, :], b_factor[:, None, :], NORMALIZER)
        if DROPOUT:
            keep = kept(seed, threshold, i_b.to(tl.int32) * H + o_g, at, first, 3, BM, BN)
            keep = tl.permute(keep, (0, 2, 1))  # [HG, BN, BM]

        b_mixed = tl.zeros([BM, BN, HG], tl.float32)
        b_dp = tl.zeros([BM, BN, HG], tl.float32)
        if ALL_HEADS:
            b_m = mixing_of(m, o_m, 0, o_g, s_xn, s_xj, s_xi, n_queries, H, PER_QUERY, HC, HK).to(b_qg.dtype)
            b_t = mixing_of(m, o_m, 0, o_g, s_xn, s_xi, s_xj, n_queries, H, PER_QUERY, HC, HK).to(b_qg.dtype)
            b_mixed = mix(tl.permute(b_p, (2, 1, 0)), b_m, b_mixed, PER_QUERY, BM, BN, HC, HK, HG, PRECISION)
            b_dw = tl.dot(b_vg, b_dot, input_precision=PRECISION)  # [HG, BN, BM]
            if DROPOUT:
                b_dw = tl.where(keep, b_dw * gain, 0.0)
            b_dp = mix(tl.permute(b_dw, (2, 1, 0)), b_t, b_dp, PER_QUERY, BM, BN, HC, HK, HG, PRECISION)
        else:
            for head in range(0, H, HC):
                o_h = head + tl.arange(0, HC)
                b_k = heads_of(k, o_h, o_n, o_d, s_kh, s_kn, s_kd, n_keys, H, D)  # [HC, BN, DP]
                b_q = heads_of(q, o_h, o_m, o_d, s_qh, s_qn, s_qd, n_queries, H, D)  # [HC, BM, DP]
                b_m = mixing_of(m, o_m, head, o_g, s_xn, s_xj, s_xi, n_queries, H, PER_QUERY, HC, HK).to(b_k.dtype)
                b_sc = scores_of(
                    b_k, turned(b_q), o_h, o_m[None, None, :], o_n[None, :, None], scale, n_queries, n_keys,
                    mask, s_mh, s_mm, s_mn, padding, s_pn, H, CAUSAL, MASK_HEADS, PRECISION,
                )  # [HC, BN, BM]  # fmt: skip
                b_peakc = statistic_of(peak, o_h, o_m, n_queries, H, float("inf"))[:, None, :]
                b_factorc = statistic_of(factor, o_h, o_m, n_queries, H, 0.0)[:, None, :]
                b_pc = weights_of(b_sc, b_peakc, b_factorc, NORMALIZER)
                b_mixed = mix(tl.permute(b_pc, (2, 1, 0)), b_m, b_mixed, PER_QUERY, BM, BN, HC, HK, HG, PRECISION)

                b_v = heads_of(v, o_h, o_n, o_v, s_vh, s_vn, s_vd, n_keys, H, DV)  # [HC, BN, DVP]
                b_do = heads_of(d_out, o_h, o_m, o_v, s_gh, s_gn, s_gd, n_queries, H, DV)  # [HC, BM, DVP]
                b_t = mixing_of(m, o_m, head, o_g, s_xn, s_xi, s_xj, n_queries, H, PER_QUERY, HC, HK).to(b_k.dtype)
                b_dw = tl.dot(b_v, turned(b_do), input_precision=PRECISION)  # [HC, BN, BM]
                if DROPOUT:
                    other = kept(seed, threshold, i_b.to(tl.int32) * H + o_h, at, first, 3, BM, BN)
                    b_dw = tl.where(tl.permute(other, (0, 2, 1)), b_dw * gain, 0.0)
                b_dp = mix(tl.permute(b_dw, (2, 1, 0)), b_t, b_dp, PER_QUERY, BM, BN, HC, HK, HG, PRECISION)

        b_w = tl.permute(b_mixed, (2, 1, 0))  # [HG, BN, BM]
        if DROPOUT:
            b_w = tl.where(keep, b_w * gain, 0.0)
        b_dv = tl.dot(b_w.to(b_dog.dtype), b_dog, b_dv, input_precision=PRECISION)
        b_ds = score_gradient(b_s, b_p, tl.permute(b_dp, (2, 1, 0)), b_delta[:, None, :], NORMALIZER)
        b_dk = tl.dot(b_ds.to(b_qg.dtype), b_qg, b_dk, input_precision=PRECISION)
    store_heads(d_k + i_b * s_rb, b_dk * d_scale, o_g, o_n, o_d, s_rh, s_rn, s_rd, n_keys, H, D)
    store_heads(d_v + i_b * s_wb, b_dv, o_g, o_n, o_v, s_wh, s_wn, s_wd, n_keys, H, DV)
