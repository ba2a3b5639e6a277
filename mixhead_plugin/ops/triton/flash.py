"""Kernels for heads that do not mix: one head at a time, after Dao's FlashAttention-2, for three normalizers.

`forward_kernel` without values is also the first pass of mixed heads: it leaves the statistic of each row.
"""

import triton
import triton.language as tl

from mixhead_plugin.ops.triton.rows import (
    UNSPECIALIZED,
    bias_of,
    exponent,
    kept,
    key_span,
    query_span,
    rows_of,
    score_gradient,
    sigmoid_of_size,
    store_rows,
    weights_of,
    whole_keys,
    whole_queries,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    q, k, v, out, peak, factor, mask, padding, spans, seed, threshold, gain, scale,
    s_qb, s_qh, s_qn, s_qd, s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd, s_ob, s_oh, s_on, s_od,
    s_mb, s_mh, s_mm, s_mn, s_pb, s_pn, n_queries, n_keys, n_tiles,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """O and the statistic of each row of one head; without values (v is None) the latter alone"""
    tile, row = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    i_b, i_h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    first = (n_tiles - 1 - tile) * BM  # the longest rows of a causal mask first
    o_m, o_d = first + tl.arange(0, BM), tl.arange(0, DP)
    q += i_b * s_qb + i_h * s_qh
    k += i_b * s_kb + i_h * s_kh
    if mask is not None:
        mask += i_b * s_mb + i_h * s_mh
    if padding is not None:
        padding += i_b * s_pb
    b_q = rows_of(q, o_m, o_d, s_qn, s_qd, n_queries, D)  # [BM, DP]
    b_max = tl.full([BM], float("-inf"), tl.float32)
    b_sum = tl.zeros([BM], tl.float32)
    if v is not None:
        o_v = tl.arange(0, DVP)
        v += i_b * s_vb + i_h * s_vh
        b_o = tl.zeros([BM, DVP], tl.float32)

    if DROPOUT:
        seed = tl.load(seed)
    start, stop = key_span(first, n_queries, n_keys, spans, CAUSAL, BM, BN)
    whole = whole_keys(first, start, stop, n_queries, n_keys, mask, padding, spans, CAUSAL, BM, BN)
    for EDGE in tl.static_range(2):
        if EDGE:
            begin, end = whole, stop
        else:
            begin, end = start, whole
        for at in range(begin, end, BN):
            o_n = at + tl.arange(0, BN)
            b_k = rows_of(k, o_n, o_d, s_kn, s_kd, n_keys, D)  # [BN, DP]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale  # [BM, BN]
            if EDGE:
                b_s += bias_of(o_m[:, None], o_n[None, :], n_queries, n_keys, mask, s_mm, s_mn, padding, s_pn, CAUSAL)
            b_y = exponent(b_s, NORMALIZER)
            b_new = tl.maximum(b_max, tl.max(b_y, 1))
            b_pivot = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_shrink = tl.exp2(b_max - b_pivot)
            b_w = tl.exp2(b_y - b_pivot[:, None])
            if NORMALIZER == "sigsoftmax":
                b_w *= sigmoid_of_size(b_s)
            if NORMALIZER == "l2":
                b_sum = b_sum * b_shrink * b_shrink + tl.sum(b_w * b_w, 1)
            else:
                b_sum = b_sum * b_shrink + tl.sum(b_w, 1)
            b_max = b_new
            if v is not None:
                if DROPOUT:
                    b_w = tl.where(kept(seed, threshold, row, first, at, 2, BM, BN), b_w, 0.0)
                b_v = rows_of(v, o_n, o_v, s_vn, s_vd, n_keys, DV)  # [BN, DVP]
                b_o = tl.dot(b_w.to(b_v.dtype), b_v, b_o * b_shrink[:, None], input_precision=PRECISION)

    if NORMALIZER == "l2":
        b_sum = tl.sqrt(b_sum)
    unseen = b_sum == 0
    b_factor = tl.where(unseen, 0.0, 1.0 / tl.where(unseen, 1.0, b_sum))
    p_row = row.to(tl.int64) * n_queries + o_m
    tl.store(peak + p_row, tl.where(unseen, float("inf"), b_max), mask=o_m < n_queries)
    tl.store(factor + p_row, b_factor, mask=o_m < n_queries)
    if v is not None:
        b_o *= (gain * b_factor)[:, None]
        store_rows(out + i_b * s_ob + i_h * s_oh, b_o, o_m, o_v, s_on, s_od, n_queries, DV)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def delta_kernel(
    out, d_out, delta, s_ob, s_oh, s_on, s_od, s_gb, s_gh, s_gn, s_gd, n_queries, n_tiles,
    H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """delta = O . dO, which is P . dP, of each row of one head"""
    tile, row = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    i_b, i_h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    o_m, o_v = tile * BM + tl.arange(0, BM), tl.arange(0, DVP)
    b_o = rows_of(out + i_b * s_ob + i_h * s_oh, o_m, o_v, s_on, s_od, n_queries, DV)
    b_do = rows_of(d_out + i_b * s_gb + i_h * s_gh, o_m, o_v, s_gn, s_gd, n_queries, DV)
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)
    tl.store(delta + row.to(tl.int64) * n_queries + o_m, b_delta, mask=o_m < n_queries)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def query_grad_kernel(
    q, k, v, d_out, peak, factor, delta, d_q, mask, padding, spans, seed, threshold, gain, scale, d_scale,
    s_qb, s_qh, s_qn, s_qd, s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd, s_gb, s_gh, s_gn, s_gd,
    s_rb, s_rh, s_rn, s_rd, s_mb, s_mh, s_mm, s_mn, s_pb, s_pn, n_queries, n_keys, n_tiles,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries of one head"""
    tile, row = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    i_b, i_h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    first = (n_tiles - 1 - tile) * BM
    o_m, o_d, o_v = first + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, DVP)
    k += i_b * s_kb + i_h * s_kh
    v += i_b * s_vb + i_h * s_vh
    if mask is not None:
        mask += i_b * s_mb + i_h * s_mh
    if padding is not None:
        padding += i_b * s_pb
    b_q = rows_of(q + i_b * s_qb + i_h * s_qh, o_m, o_d, s_qn, s_qd, n_queries, D)  # [BM, DP]
    b_do = rows_of(d_out + i_b * s_gb + i_h * s_gh, o_m, o_v, s_gn, s_gd, n_queries, DV)  # [BM, DVP]
    p_row = row.to(tl.int64) * n_queries + o_m
    b_peak = tl.load(peak + p_row, mask=o_m < n_queries, other=float("inf"))[:, None]
    b_factor = tl.load(factor + p_row, mask=o_m < n_queries, other=0.0)[:, None]
    b_delta = tl.load(delta + p_row, mask=o_m < n_queries, other=0.0)[:, None]
    b_dq = tl.zeros([BM, DP], tl.float32)

    if DROPOUT:
        seed = tl.load(seed)
    start, stop = key_span(first, n_queries, n_keys, spans, CAUSAL, BM, BN)
    whole = whole_keys(first, start, stop, n_queries, n_keys, mask, padding, spans, CAUSAL, BM, BN)
    for EDGE in tl.static_range(2):
        if EDGE:
            begin, end = whole, stop
        else:
            begin, end = start, whole
        for at in range(begin, end, BN):
            o_n = at + tl.arange(0, BN)
            b_k = rows_of(k, o_n, o_d, s_kn, s_kd, n_keys, D)  # [BN, DP]
            b_v = rows_of(v, o_n, o_v, s_vn, s_vd, n_keys, DV)  # [BN, DVP]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale  # [BM, BN]
            if EDGE:
                b_s += bias_of(o_m[:, None], o_n[None, :], n_queries, n_keys, mask, s_mm, s_mn, padding, s_pn, CAUSAL)
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)  # [BM, BN]
            if DROPOUT:
                b_dp = tl.where(kept(seed, threshold, row, first, at, 2, BM, BN), b_dp * gain, 0.0)
            b_p = weights_of(b_s, b_peak, b_factor, NORMALIZER)
            b_ds = score_gradient(b_s, b_p, b_dp, b_delta, NORMALIZER)
            b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    store_rows(d_q + i_b * s_rb + i_h * s_rh, b_dq * d_scale, o_m, o_d, s_rn, s_rd, n_queries, D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_grad_kernel(
    q, k, v, d_out, peak, factor, delta, d_k, d_v, mask, padding, spans, seed, threshold, gain, scale, d_scale,
    s_qb, s_qh, s_qn, s_qd, s_kb, s_kh, s_kn, s_kd, s_vb, s_vh, s_vn, s_vd, s_gb, s_gh, s_gn, s_gd,
    s_rb, s_rh, s_rn, s_rd, s_wb, s_wh, s_wn, s_wd, s_mb, s_mh, s_mm, s_mn, s_pb, s_pn, n_queries, n_keys, n_tiles,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    NORMALIZER: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys of one head; all tiles are transposed, [BN, BM]"""
    tile, row = tl.program_id(0) % n_tiles, tl.program_id(0) // n_tiles
    i_b, i_h = (row // H).to(tl.int64), (row % H).to(tl.int64)
    first = tile * BN
    o_n, o_d, o_v = first + tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, DVP)
    q += i_b * s_qb + i_h * s_qh
    d_out += i_b * s_gb + i_h * s_gh
    if mask is not None:
        mask += i_b * s_mb + i_h * s_mh
    if padding is not None:
        padding += i_b * s_pb
    b_k = rows_of(k + i_b * s_kb + i_h * s_kh, o_n, o_d, s_kn, s_kd, n_keys, D)  # [BN, DP]
    b_v = rows_of(v + i_b * s_vb + i_h * s_vh, o_n, o_v, s_vn, s_vd, n_keys, DV)  # [BN, DVP]
    b_dk = tl.zeros([BN, DP], tl.float32)
    b_dv = tl.zeros([BN, DVP], tl.float32)

    if DROPOUT:
        seed = tl.load(seed)
    start, stop = query_span(first, n_queries, n_keys, spans, CAUSAL, BM, BN)
    whole = whole_queries(first, start, stop, n_queries, n_keys, mask, padding, spans, CAUSAL, BM, BN)
    for EDGE in tl.static_range(2):
        if EDGE:
            begin, end = start, whole
        else:
            begin, end = whole, stop
        for at in range(begin, end, BM):
            o_m = at + tl.arange(0, BM)
            b_q = rows_of(q, o_m, o_d, s_qn, s_qd, n_queries, D)  # [BM, DP]
            b_do = rows_of(d_out, o_m, o_v, s_gn, s_gd, n_queries, DV)  # [BM, DVP]
            p_row = row.to(tl.int64) * n_queries + o_m
            b_peak = tl.load(peak + p_row, mask=o_m < n_queries, other=float("inf"))[None, :]
            b_factor = tl.load(factor + p_row, mask=o_m < n_queries, other=0.0)[None, :]
            b_delta = tl.load(delta + p_row, mask=o_m < n_queries, other=0.0)[None, :]
            b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION) * scale  # [BN, BM]
            if EDGE:
                b_s += bias_of(o_m[None, :], o_n[:, None], n_queries, n_keys, mask, s_mm, s_mn, padding, s_pn, CAUSAL)
            b_p = weights_of(b_s, b_peak, b_factor, NORMALIZER)
            b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)  # [BN, BM]
            if DROPOUT:
                keep = tl.trans(kept(seed, threshold, row, at, first, 2, BM, BN))
                b_dp = tl.where(keep, b_dp * gain, 0.0)
                b_z = tl.where(keep, b_p * gain, 0.0)
                b_dv = tl.dot(b_z.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
            else:
                b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
            b_ds = score_gradient(b_s, b_p, b_dp, b_delta, NORMALIZER)
            b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    store_rows(d_k + i_b * s_rb + i_h * s_rh, b_dk * d_scale, o_n, o_d, s_rn, s_rd, n_keys, D)
    store_rows(d_v + i_b * s_wb + i_h * s_wh, b_dv, o_n, o_v, s_wn, s_wd, n_keys, DV)
