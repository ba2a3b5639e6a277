"""Kernels for heads that do not mix: FlashAttention-2 (Dao 2023) for each normalizer.

A program has one tile of one head. What it computes for a tile is [BM, BN], queries by keys.

Without values, `flash_fwd_kernel` is also the first step of mixed heads and writes only the
statistic of each row.

The arguments of the kernels:

    q, k, v, o      `Strided` [B, H, N, D], and their gradients d_q, d_k, d_v, d_o
    sink            [H], scores times log2(e)
    peak, factor    [B, H, Nq], the statistic of each row (triton.md)
    delta           [B, H, Nq], P . dP of each row
    masks, dropout, C    see records.py
    key_spans       [Nq, 4], which keys each query sees: see `rows.spans_kernel`; None without
    query_spans     [Nk, 4], which queries see each key
    scale           of scores, times log2(e), because weights are powers of 2
    d_scale         of dQ and dK: the scale of scores without log2(e)
"""

import triton
import triton.language as tl

from mixhead_plugin.ops.triton import rows


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def flash_fwd_kernel(
    q,
    k,
    v,
    o,
    sink,
    peak,
    factor,
    masks,
    key_spans,
    dropout,
    scale,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write O and the statistic of each row; only the statistic where v is None."""
    n_tiles = rows.count_tiles(n_queries, C.BM)
    i_t, _, i_bh, i_b, i_h = rows.split_program(n_tiles, 1, C.H)
    i_m = rows.longest_first(i_t, n_tiles) * C.BM
    o_m = i_m + tl.arange(0, C.BM)
    o_d = tl.arange(0, C.DP)
    k = rows.at(k, i_b, i_h)
    b_q = rows.load_rows(rows.at(q, i_b, i_h), o_m, o_d, n_queries, C.D)  # [BM, DP]
    b_peak = tl.full([C.BM], float("-inf"), tl.float32)  # [BM]
    b_sum = tl.full([C.BM], 0.0, tl.float32)  # [BM], of weights; of their squares for l2
    if v is not None:
        o_v = tl.arange(0, C.DVP)
        v = rows.at(v, i_b, i_h)
        b_o = tl.full([C.BM, C.DVP], 0.0, tl.float32)  # [BM, DVP]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, stop = rows.key_span(i_m, key_spans, n_queries, n_keys, C)
    whole = rows.end_of_whole_keys(i_m, start, stop, key_spans, masks, n_queries, n_keys, C)
    if C.NORMALIZER == "sigmoid":
        # Its weights need log2(n) in place of a peak, and no sum: 1 stands for a row that sees a
        # key, 0 for one that sees none.
        b_peak = rows.log2_of_visible_keys(
            i_b, i_h, o_m, start, whole, stop, masks, n_queries, n_keys, C
        )
        b_sum += tl.where(b_peak == float("inf"), 0.0, 1.0)
        if v is None:  # the statistic is complete, so no tile is left for the loops below
            start, whole = stop, stop
    if sink is not None:  # each row has seen a key of this score
        b_sink = tl.load(sink + i_h) + tl.full([C.BM], 0.0, tl.float32)  # [BM]
        b_peak = rows.exponent(b_sink, C)
        b_sum += rows.sigmoid_of_abs(b_sink) if C.NORMALIZER == "sigsoftmax" else 1.0

    # First the tiles that every query sees whole, then those at the edge of a mask.
    for EDGE in tl.static_range(2):
        begin, end = (whole, stop) if EDGE else (start, whole)
        for i_n in range(begin, end, C.BN):
            o_n = i_n + tl.arange(0, C.BN)
            b_k = rows.load_rows(k, o_n, o_d, n_keys, C.D)  # [BN, DP]
            b_s = rows.product(b_q, tl.trans(b_k), C) * scale  # [BM, BN]
            if EDGE:
                b_s += rows.bias_of(
                    i_b, i_h, o_m[:, None], o_n[None, :], masks, n_queries, n_keys, C
                )
            if C.NORMALIZER == "sigmoid":
                b_shrink = tl.full([C.BM], 1.0, tl.float32)  # [BM]
                b_w = rows.weights_of(b_s, b_peak[:, None], 1.0, C)  # [BM, BN]
            else:
                b_y = rows.exponent(b_s, C)  # [BM, BN]
                b_new = tl.maximum(b_peak, tl.max(b_y, 1))  # [BM]
                # [BM], finite where all is hidden
                b_pivot = tl.where(b_new == float("-inf"), 0.0, b_new)
                b_shrink = tl.exp2(b_peak - b_pivot)  # [BM]
                b_w = tl.exp2(b_y - b_pivot[:, None])  # [BM, BN]
                if C.NORMALIZER == "sigsoftmax":
                    b_w *= rows.sigmoid_of_abs(b_s)
                if C.NORMALIZER == "l2":
                    b_sum = b_sum * b_shrink * b_shrink + tl.sum(b_w * b_w, 1)
                else:
                    b_sum = b_sum * b_shrink + tl.sum(b_w, 1)
                b_peak = b_new
            if v is not None:
                if dropout is not None:
                    b_w = tl.where(rows.not_dropped(seed, dropout, i_bh, i_m, i_n, C), b_w, 0.0)
                b_v = rows.load_rows(v, o_n, o_v, n_keys, C.DV)  # [BN, DVP]
                b_o = rows.add_product(b_w.to(b_v.dtype), b_v, b_o * b_shrink[:, None], C)

    if C.NORMALIZER == "l2":
        b_sum = tl.sqrt(b_sum)
    unseen = b_sum == 0  # [BM], rows that see no key
    b_factor = tl.where(unseen, 0.0, 1.0 / tl.where(unseen, 1.0, b_sum))  # [BM]
    rows.store_statistic(peak, tl.where(unseen, float("inf"), b_peak), i_bh, o_m, n_queries)
    rows.store_statistic(factor, b_factor, i_bh, o_m, n_queries)
    if v is not None:
        if dropout is not None:
            b_factor *= dropout.gain
        b_o *= b_factor[:, None]
        rows.store_rows(rows.at(o, i_b, i_h), b_o, o_m, o_v, n_queries, C.DV)


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def flash_bwd_delta_kernel(o, d_o, delta, n_queries, C: tl.constexpr):
    """Write delta = O . dO = P . dP of each row."""
    i_t, _, i_bh, i_b, i_h = rows.split_program(rows.count_tiles(n_queries, C.BM), 1, C.H)
    o_m = i_t * C.BM + tl.arange(0, C.BM)
    o_v = tl.arange(0, C.DVP)
    b_o = rows.load_rows(rows.at(o, i_b, i_h), o_m, o_v, n_queries, C.DV)  # [BM, DVP]
    b_do = rows.load_rows(rows.at(d_o, i_b, i_h), o_m, o_v, n_queries, C.DV)  # [BM, DVP]
    b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [BM]
    rows.store_statistic(delta, b_delta, i_bh, o_m, n_queries)


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def flash_bwd_dq_kernel(
    q,
    k,
    v,
    d_o,
    peak,
    factor,
    delta,
    d_q,
    masks,
    key_spans,
    dropout,
    scale,
    d_scale,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write dQ of a tile of queries."""
    n_tiles = rows.count_tiles(n_queries, C.BM)
    i_t, _, i_bh, i_b, i_h = rows.split_program(n_tiles, 1, C.H)
    i_m = rows.longest_first(i_t, n_tiles) * C.BM
    o_m = i_m + tl.arange(0, C.BM)
    o_d = tl.arange(0, C.DP)
    o_v = tl.arange(0, C.DVP)
    k = rows.at(k, i_b, i_h)
    v = rows.at(v, i_b, i_h)
    b_q = rows.load_rows(rows.at(q, i_b, i_h), o_m, o_d, n_queries, C.D)  # [BM, DP]
    b_do = rows.load_rows(rows.at(d_o, i_b, i_h), o_m, o_v, n_queries, C.DV)  # [BM, DVP]
    b_peak = rows.load_statistic(peak, i_bh, o_m, n_queries, float("inf"))[:, None]  # [BM, 1]
    b_factor = rows.load_statistic(factor, i_bh, o_m, n_queries, 0.0)[:, None]  # [BM, 1]
    b_delta = rows.load_statistic(delta, i_bh, o_m, n_queries, 0.0)[:, None]  # [BM, 1]
    b_dq = tl.full([C.BM, C.DP], 0.0, tl.float32)  # [BM, DP]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, stop = rows.key_span(i_m, key_spans, n_queries, n_keys, C)
    whole = rows.end_of_whole_keys(i_m, start, stop, key_spans, masks, n_queries, n_keys, C)
    for EDGE in tl.static_range(2):
        begin, end = (whole, stop) if EDGE else (start, whole)
        for i_n in range(begin, end, C.BN):
            o_n = i_n + tl.arange(0, C.BN)
            b_k = rows.load_rows(k, o_n, o_d, n_keys, C.D)  # [BN, DP]
            b_v = rows.load_rows(v, o_n, o_v, n_keys, C.DV)  # [BN, DVP]
            b_s = rows.product(b_q, tl.trans(b_k), C) * scale  # [BM, BN]
            if EDGE:
                b_s += rows.bias_of(
                    i_b, i_h, o_m[:, None], o_n[None, :], masks, n_queries, n_keys, C
                )
            b_dp = rows.product(b_do, tl.trans(b_v), C)  # [BM, BN]
            if dropout is not None:
                b_dp = tl.where(
                    rows.not_dropped(seed, dropout, i_bh, i_m, i_n, C), b_dp * dropout.gain, 0.0
                )
            b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [BM, BN]
            b_ds = rows.score_gradient(b_s, b_p, b_dp, b_delta, C)  # [BM, BN]
            b_dq = rows.add_product(b_ds.to(b_k.dtype), b_k, b_dq, C)
    rows.store_rows(rows.at(d_q, i_b, i_h), b_dq * d_scale, o_m, o_d, n_queries, C.D)


@triton.jit(do_not_specialize=rows.UNSPECIALIZED)
def flash_bwd_dkv_kernel(
    q,
    k,
    v,
    d_o,
    peak,
    factor,
    delta,
    d_k,
    d_v,
    masks,
    query_spans,
    dropout,
    scale,
    d_scale,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write dK and dV of a tile of keys; scores and weights are transposed, [BN, BM]."""
    _, i_t, i_bh, i_b, i_h = rows.split_program(1, rows.count_tiles(n_keys, C.BN), C.H)
    i_n = i_t * C.BN
    o_n = i_n + tl.arange(0, C.BN)
    o_d = tl.arange(0, C.DP)
    o_v = tl.arange(0, C.DVP)
    q = rows.at(q, i_b, i_h)
    d_o = rows.at(d_o, i_b, i_h)
    b_k = rows.load_rows(rows.at(k, i_b, i_h), o_n, o_d, n_keys, C.D)  # [BN, DP]
    b_v = rows.load_rows(rows.at(v, i_b, i_h), o_n, o_v, n_keys, C.DV)  # [BN, DVP]
    b_dk = tl.full([C.BN, C.DP], 0.0, tl.float32)  # [BN, DP]
    b_dv = tl.full([C.BN, C.DVP], 0.0, tl.float32)  # [BN, DVP]
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, stop = rows.query_span(i_n, query_spans, n_queries, n_keys, C)
    whole = rows.start_of_whole_queries(i_n, start, stop, query_spans, masks, n_queries, n_keys, C)
    for EDGE in tl.static_range(2):
        begin, end = (start, whole) if EDGE else (whole, stop)
        for i_m in range(begin, end, C.BM):
            o_m = i_m + tl.arange(0, C.BM)
            b_q = rows.load_rows(q, o_m, o_d, n_queries, C.D)  # [BM, DP]
            b_do = rows.load_rows(d_o, o_m, o_v, n_queries, C.DV)  # [BM, DVP]
            # [1, BM]
            b_peak = rows.load_statistic(peak, i_bh, o_m, n_queries, float("inf"))[None, :]
            b_factor = rows.load_statistic(factor, i_bh, o_m, n_queries, 0.0)[None, :]
            b_delta = rows.load_statistic(delta, i_bh, o_m, n_queries, 0.0)[None, :]
            b_s = rows.product(b_k, tl.trans(b_q), C) * scale  # [BN, BM]
            if EDGE:
                b_s += rows.bias_of(
                    i_b, i_h, o_m[None, :], o_n[:, None], masks, n_queries, n_keys, C
                )
            b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [BN, BM]
            b_dp = rows.product(b_v, tl.trans(b_do), C)  # [BN, BM]
            b_w = b_p  # [BN, BM], the weights after dropout
            if dropout is not None:
                keep = tl.trans(rows.not_dropped(seed, dropout, i_bh, i_m, i_n, C))  # [BN, BM]
                b_dp = tl.where(keep, b_dp * dropout.gain, 0.0)
                b_w = tl.where(keep, b_p * dropout.gain, 0.0)
            b_dv = rows.add_product(b_w.to(b_do.dtype), b_do, b_dv, C)
            b_ds = rows.score_gradient(b_s, b_p, b_dp, b_delta, C)  # [BN, BM]
            b_dk = rows.add_product(b_ds.to(b_q.dtype), b_q, b_dk, C)
    rows.store_rows(rows.at(d_k, i_b, i_h), b_dk * d_scale, o_n, o_d, n_keys, C.D)
    rows.store_rows(rows.at(d_v, i_b, i_h), b_dv, o_n, o_v, n_keys, C.DV)
