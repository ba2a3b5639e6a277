"""Kernels for heads that mix: the weights of a strip of queries go through memory.

A mixed head needs the weights of all heads. The registers of a program have no room for these and
for the sums of all heads as well. So each step is a kernel of its own. Between them the weights of
some queries, a strip, lie in memory [B, H, queries of the strip, keys]. strips.py launches the
kernels in their order, and says what each computes.

The arguments of the kernels:

    q, k, v, d_o    `Strided` [B, H, N, D]
    m               `Strided` [B, H, Nq, H]: sentence, head before mixing, query, head after it
    w, d_w          `Strided` [B, H, queries, keys]: weights of a strip, and their gradients
    peak, factor    [B, H, Nq], the statistics of rows that `flash_fwd_kernel` has written
    delta           [B, H, Nq], P . dP of each row
    d_m             `Strided` [B, H, Nq, H] as m; where M is shared, float32 with a tile of queries
                    in place of each query
    x, y            `Strided` [B, H, N, D], what a strip is multiplied by, and the result; D and DP
                    are their head size and its padded one
    gain            of the result: that of dropout, or the scale of scores
    first, last     the strip: queries from `first` to before `last`
    masks, C        see records.py
    dropout         see records.py; None for products with weights that nothing drops
    key_spans       [Nq, 4], which keys each query sees: see `rows.spans_kernel`; None without
    query_spans     [Nk, 4], which queries see each key
    scale           of scores, times log2(e), because weights are powers of 2

The memory of a strip holds anything where no query of a tile sees a key, because nothing is written
there. Mixing takes each key alone, so it need not know. What adds over keys or over queries reads
zeros in its place (`load_weights`).
"""

import triton
import triton.language as tl

from mixhead_plugin.ops.triton import rows

# Kernels are compiled once for all lengths and strips.
UNSPECIALIZED = (*rows.UNSPECIALIZED, "first", "last")
# In the memory of a strip the keys of a query are a multiple of STRIP_KEYS, which those of every
# tile divide. So a tile can be read and written whole: it does not reach into the next query.
STRIP_KEYS = tl.constexpr(128)


@triton.jit
def tile_of(first, last, n_keys, HEADS: tl.constexpr, C: tl.constexpr):
    """Return the first query and the first key of a program's tile, i_bh, i_b and i_h.

    HEADS is H, or 1 where a program has all heads; then i_bh is i_b, and i_h is 0.
    """
    n_m = rows.count_tiles(last - first, C.BM)
    n_n = rows.count_tiles(n_keys, C.BN)
    i_t, i_n, i_bh, i_b, i_h = rows.split_program(n_m, n_n, HEADS)
    return first + i_t * C.BM, i_n * C.BN, i_bh, i_b, i_h


@triton.jit
def weights_at(w, o_m, o_n, first, C: tl.constexpr):
    """Return pointers to [BM, BN] of one head of a strip."""
    tl.static_assert(STRIP_KEYS % C.BN == 0, "a tile reaches into the next query")
    return w.p + (o_m - first).to(tl.int64)[:, None] * w.s_n + o_n[None, :]


@triton.jit
def seen_by(o_m, o_n, last, key_spans, n_queries, n_keys, C: tl.constexpr):
    """Return which keys the queries see, [BM, BN], by causality and spans alone.

    A key that another mask hides has a weight of 0 in memory.
    """
    inside = o_m < last
    seen = inside[:, None] & (o_n < n_keys)[None, :]
    if C.CAUSAL:
        seen &= o_n[None, :] <= (o_m + (n_keys - n_queries))[:, None]
    if key_spans is not None:
        start = tl.load(key_spans + 4 * o_m, mask=inside, other=0)
        stop = tl.load(key_spans + 4 * o_m + 1, mask=inside, other=0)
        seen &= (o_n[None, :] >= start[:, None]) & (o_n[None, :] < stop[:, None])
    return seen


@triton.jit
def load_weights(w, o_m, o_n, first, last, key_spans, n_queries, n_keys, C: tl.constexpr):
    """Load [BM, BN] of one head of a strip; zeros where nothing may be written.

    All is read, and dropped later, because triton makes narrow loads where a mask differs by key.
    """
    b_w = tl.load(weights_at(w, o_m, o_n, first, C), mask=(o_m < last)[:, None], other=0.0)
    return tl.where(seen_by(o_m, o_n, last, key_spans, n_queries, n_keys, C), b_w, 0.0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mixed_weights_kernel(
    q,
    k,
    w,
    peak,
    factor,
    masks,
    scale,
    first,
    last,
    key_spans,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write the weights of a tile of one head, before mixing."""
    i_m, i_n, i_bh, i_b, i_h = tile_of(first, last, n_keys, C.H, C)
    start, stop = rows.key_span(i_m, key_spans, n_queries, n_keys, C)
    if rows.outside(i_n, start, stop, C):
        return
    o_m = i_m + tl.arange(0, C.BM)
    o_n = i_n + tl.arange(0, C.BN)
    o_d = tl.arange(0, C.DP)
    b_q = rows.load_rows(rows.at(q, i_b, i_h), o_m, o_d, n_queries, C.D)  # [BM, DP]
    b_k = rows.load_rows(rows.at(k, i_b, i_h), o_n, o_d, n_keys, C.D)  # [BN, DP]
    b_peak = rows.load_statistic(peak, i_bh, o_m, n_queries, float("inf"))[:, None]  # [BM, 1]
    b_factor = rows.load_statistic(factor, i_bh, o_m, n_queries, 0.0)[:, None]  # [BM, 1]
    b_s = rows.product(b_q, tl.trans(b_k), C) * scale  # [BM, BN]
    b_s += rows.bias_of(i_b, i_h, o_m[:, None], o_n[None, :], masks, n_queries, n_keys, C)
    b_p = rows.weights_of(b_s, b_peak, b_factor, C)  # [BM, BN]
    w = rows.at(w, i_b, i_h)
    p_w = weights_at(w, o_m, o_n, first, C)
    tl.store(p_w, b_p.to(w.p.dtype.element_ty), mask=(o_m < last)[:, None])


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mixed_bwd_dw_kernel(
    v, d_o, d_w, dropout, first, last, key_spans, n_queries, n_keys, C: tl.constexpr
):
    """Write the gradients of the mixed weights of a tile of one head."""
    i_m, i_n, i_bh, i_b, i_h = tile_of(first, last, n_keys, C.H, C)
    start, stop = rows.key_span(i_m, key_spans, n_queries, n_keys, C)
    if rows.outside(i_n, start, stop, C):
        return
    o_m = i_m + tl.arange(0, C.BM)
    o_n = i_n + tl.arange(0, C.BN)
    o_v = tl.arange(0, C.DVP)
    b_do = rows.load_rows(rows.at(d_o, i_b, i_h), o_m, o_v, n_queries, C.DV)  # [BM, DVP]
    b_v = rows.load_rows(rows.at(v, i_b, i_h), o_n, o_v, n_keys, C.DV)  # [BN, DVP]
    b_dw = rows.product(b_do, tl.trans(b_v), C)  # [BM, BN]
    if dropout is not None:
        keep = rows.not_dropped(tl.load(dropout.seed), dropout, i_bh, i_m, i_n, C)
        b_dw = tl.where(keep, b_dw * dropout.gain, 0.0)
    d_w = rows.at(d_w, i_b, i_h)
    p_w = weights_at(d_w, o_m, o_n, first, C)
    tl.store(p_w, b_dw.to(d_w.p.dtype.element_ty), mask=(o_m < last)[:, None])


@triton.jit
def load_mixing(p_m, s_row, s_column, dtype: tl.constexpr, C: tl.constexpr):
    """Load the matrix of a query, [HP, HP]; zeros beyond the last head.

    M is rounded to the dtype of the queries, as in the formula of that dtype.
    """
    o_h = tl.arange(0, C.HP)
    p_m = p_m + o_h.to(tl.int64)[:, None] * s_row + o_h.to(tl.int64)[None, :] * s_column
    return tl.load(p_m, mask=(o_h < C.H)[:, None] & (o_h < C.H)[None, :], other=0.0).to(dtype)


@triton.jit
def heads_at(w, o_n, C: tl.constexpr):
    """Return pointers to [HP, BN] of the first query of a strip, and which heads there are."""
    o_h = tl.arange(0, C.HP)
    tl.static_assert(STRIP_KEYS % C.BN == 0, "a tile reaches into the next query")
    p_w = w.p + o_h.to(tl.int64)[:, None] * w.s_h + o_n[None, :]  # [HP, BN]
    return p_w, (o_h < C.H)[:, None]


@triton.jit
def load_of_heads(x, i_b, i_m, n_queries, other: tl.constexpr, C: tl.constexpr):
    """Load a statistic [B, H, Nq] of all heads of a query, [HP, 1]."""
    o_h = tl.arange(0, C.HP)
    p_x = x + (i_b * C.H + o_h) * n_queries + i_m
    return tl.load(p_x, mask=o_h < C.H, other=other)[:, None]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mix_kernel(m, w, first, last, key_spans, n_queries, n_keys, C: tl.constexpr):
    """Mix the weights of a tile of queries and keys, all heads, in place."""
    i_m, i_n, _, i_b, _ = tile_of(first, last, n_keys, 1, C)
    start, stop = rows.key_span(i_m, key_spans, n_queries, n_keys, C)
    if rows.outside(i_n, start, stop, C):
        return
    dtype: tl.constexpr = w.p.dtype.element_ty
    m = rows.at(m, i_b, 0)
    p_w, inside = heads_at(rows.at(w, i_b, 0), i_n + tl.arange(0, C.BN), C)
    b_m = load_mixing(m.p, m.s_d, m.s_h, dtype, C)  # M^T, the heads after mixing first
    for i in range(0, tl.minimum(C.BM, last - i_m)):
        i_q = (i_m + i).to(tl.int64)
        p_q = p_w + (i_q - first) * w.s_n
        b_w = tl.load(p_q, mask=inside, other=0.0)  # [HP, BN]
        if C.PER_QUERY:
            b_m = load_mixing(m.p + i_q * m.s_n, m.s_d, m.s_h, dtype, C)
        tl.store(p_q, rows.product(b_m, b_w, C).to(dtype), mask=inside)


@triton.jit
def score_of(b_p, b_peak, b_factor):
    """Return the score, times log2(e), that a weight of sigsoftmax was made from.

    So no product computes it again.

    P / factor * 2^peak is u = e^s sigmoid(s). With x = e^s this is x^2 / (1 + x), so
    x = (u + sqrt(u^2 + 4 u)) / 2. For large u, x is u; for small ones it is the root of u.
    """
    # log2(u). A row without keys has the peak inf and the factor 0. Its weights are 0, and so are
    # their gradients, whatever the score.
    b_y = tl.where(b_peak == float("inf"), 0.0, tl.log2(b_p / b_factor) + b_peak)
    b_u = tl.exp2(tl.minimum(tl.maximum(b_y, -60.0), 60.0))
    b_s = tl.log2((b_u + tl.sqrt(b_u * b_u + 4.0 * b_u)) * 0.5)
    b_s = tl.where(b_y > 60.0, b_y, b_s)
    return tl.where(b_y < -60.0, b_y * 0.5, b_s)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mixed_bwd_ds_kernel(
    m,
    w,
    d_w,
    peak,
    factor,
    delta,
    first,
    last,
    key_spans,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write dS of a tile of queries and keys, all heads, in place of dPbar."""
    i_m, i_n, _, i_b, _ = tile_of(first, last, n_keys, 1, C)
    start, stop = rows.key_span(i_m, key_spans, n_queries, n_keys, C)
    if rows.outside(i_n, start, stop, C):
        return
    dtype: tl.constexpr = w.p.dtype.element_ty
    o_n = i_n + tl.arange(0, C.BN)
    m = rows.at(m, i_b, 0)
    p_w, inside = heads_at(rows.at(w, i_b, 0), o_n, C)
    p_dw, _ = heads_at(rows.at(d_w, i_b, 0), o_n, C)
    b_m = load_mixing(m.p, m.s_h, m.s_d, dtype, C)
    for i in range(0, tl.minimum(C.BM, last - i_m)):
        i_q = (i_m + i).to(tl.int64)
        b_p = tl.load(p_w + (i_q - first) * w.s_n, mask=inside, other=0.0)  # [HP, BN]
        b_dw = tl.load(p_dw + (i_q - first) * d_w.s_n, mask=inside, other=0.0)  # [HP, BN]
        if C.PER_QUERY:
            b_m = load_mixing(m.p + i_q * m.s_n, m.s_h, m.s_d, dtype, C)
        b_dp = rows.product(b_m, b_dw, C)
        b_p = b_p.to(tl.float32)
        b_s = b_p  # read for sigsoftmax alone
        if C.NORMALIZER == "sigsoftmax":
            b_peak = load_of_heads(peak, i_b, i_q, n_queries, float("inf"), C)
            b_factor = load_of_heads(factor, i_b, i_q, n_queries, 0.0, C)
            b_s = score_of(b_p, b_peak, b_factor)
        b_delta = load_of_heads(delta, i_b, i_q, n_queries, 0.0, C)
        b_ds = rows.score_gradient(b_s, b_p, b_dp, b_delta, C)
        tl.store(p_dw + (i_q - first) * d_w.s_n, b_ds.to(dtype), mask=inside)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mixed_bwd_dm_kernel(
    m, w, d_w, delta, d_m, first, last, key_spans, n_queries, n_keys, C: tl.constexpr
):
    """Write dM[j, i] = sum over the keys of P_j dPbar_i, and delta_j = sum_i M[j, i] dM[j, i].

    d_m takes dM of each query; where M is shared, its sum over the tile of queries.
    """
    n_tiles = rows.count_tiles(last - first, C.BM)
    i_t, _, _, i_b, _ = rows.split_program(n_tiles, 1, 1)
    i_t = rows.longest_first(i_t, n_tiles)
    i_m = first + i_t * C.BM
    dtype: tl.constexpr = w.p.dtype.element_ty
    o_h = tl.arange(0, C.HP)
    o_n = tl.arange(0, C.BN)
    m = rows.at(m, i_b, 0)
    d_m = rows.at(d_m, i_b, 0)
    p_dm = d_m.p + o_h.to(tl.int64)[:, None] * d_m.s_h + o_h.to(tl.int64)[None, :] * d_m.s_d
    p_w, inside = heads_at(rows.at(w, i_b, 0), o_n, C)
    p_dw, _ = heads_at(rows.at(d_w, i_b, 0), o_n, C)
    both = inside & (o_h < C.H)[None, :]
    b_sum = tl.full([C.HP, C.HP], 0.0, tl.float32)
    for i in range(0, tl.minimum(C.BM, last - i_m)):
        i_q = (i_m + i).to(tl.int64)
        start, stop = rows.span_of_query(i_q, key_spans, n_queries, n_keys, C)
        b_dm = tl.full([C.HP, C.HP], 0.0, tl.float32)
        for i_n in range(start // C.BN * C.BN, stop, C.BN):
            seen = ((i_n + o_n >= start) & (i_n + o_n < stop))[None, :]
            b_p = tl.load(p_w + (i_q - first) * w.s_n + i_n, mask=inside, other=0.0)  # [HP, BN]
            b_dw = tl.load(p_dw + (i_q - first) * d_w.s_n + i_n, mask=inside, other=0.0)
            b_p = tl.where(seen, b_p, 0.0)
            b_dw = tl.where(seen, b_dw, 0.0)
            b_dm = rows.add_product(b_p, tl.trans(b_dw), b_dm, C)
        p_m = m.p + i_q * m.s_n if C.PER_QUERY else m.p
        b_m = load_mixing(p_m, m.s_h, m.s_d, dtype, C).to(tl.float32)  # [HP, HP]
        p_delta = delta + (i_b * C.H + o_h) * n_queries + i_q
        tl.store(p_delta, tl.sum(b_m * b_dm, 1), mask=o_h < C.H)
        if C.PER_QUERY:
            tl.store(p_dm + i_q * d_m.s_n, b_dm.to(d_m.p.dtype.element_ty), mask=both)
        else:
            b_sum += b_dm
    if not C.PER_QUERY:
        tl.store(p_dm + i_t * d_m.s_n, b_sum, mask=both)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def product_over_keys_kernel(
    w,
    x,
    y,
    gain,
    D: tl.constexpr,
    DP: tl.constexpr,
    dropout,
    first,
    last,
    key_spans,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write y = gain W x of a tile of queries of one head; x is [B, H, Nk, D], y [B, H, Nq, D]."""
    n_tiles = rows.count_tiles(last - first, C.BM)
    i_t, _, i_bh, i_b, i_h = rows.split_program(n_tiles, 1, C.H)
    i_m = first + rows.longest_first(i_t, n_tiles) * C.BM
    o_m = i_m + tl.arange(0, C.BM)
    o_d = tl.arange(0, DP)
    w = rows.at(w, i_b, i_h)
    x = rows.at(x, i_b, i_h)
    b_y = tl.full([C.BM, DP], 0.0, tl.float32)
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, stop = rows.key_span(i_m, key_spans, n_queries, n_keys, C)
    for i_n in range(start, stop, C.BN):
        o_n = i_n + tl.arange(0, C.BN)
        b_w = load_weights(w, o_m, o_n, first, last, key_spans, n_queries, n_keys, C)  # [BM, BN]
        if dropout is not None:
            keep = rows.not_dropped(seed, dropout, i_bh, i_m, i_n, C)
            b_w = tl.where(keep, b_w, 0.0)
        b_x = rows.load_rows(x, o_n, o_d, n_keys, D)  # [BN, DP]
        b_y = rows.add_product(b_w, b_x, b_y, C)
    rows.store_rows(rows.at(y, i_b, i_h), b_y * gain, o_m, o_d, last, D)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def product_over_queries_kernel(
    w,
    x,
    y,
    gain,
    D: tl.constexpr,
    DP: tl.constexpr,
    ADDS: tl.constexpr,
    dropout,
    first,
    last,
    key_spans,
    query_spans,
    n_queries,
    n_keys,
    C: tl.constexpr,
):
    """Write y = gain W^T x of a tile of keys of one head; x is [B, H, Nq, D], y [B, H, Nk, D].

    With ADDS the result of the strips before is in y, and this one is added to it.
    """
    _, i_t, i_bh, i_b, i_h = rows.split_program(1, rows.count_tiles(n_keys, C.BN), C.H)
    i_n = i_t * C.BN
    o_n = i_n + tl.arange(0, C.BN)
    o_d = tl.arange(0, DP)
    w = rows.at(w, i_b, i_h)
    x = rows.at(x, i_b, i_h)
    y = rows.at(y, i_b, i_h)
    b_y = tl.full([C.BN, DP], 0.0, tl.float32)
    seed = tl.load(dropout.seed) if dropout is not None else 0
    start, stop = rows.query_span(i_n, query_spans, n_queries, n_keys, C)
    # of the strip, whose tiles begin at `first`
    start = first + tl.maximum(start - first, 0) // C.BM * C.BM
    stop = tl.minimum(stop, last)
    if (start >= stop) & ADDS:  # nothing to add
        return
    for i_m in range(start, stop, C.BM):
        o_m = i_m + tl.arange(0, C.BM)
        b_w = load_weights(w, o_m, o_n, first, last, key_spans, n_queries, n_keys, C)  # [BM, BN]
        if dropout is not None:
            keep = rows.not_dropped(seed, dropout, i_bh, i_m, i_n, C)
            b_w = tl.where(keep, b_w, 0.0)
        b_x = rows.load_rows(x, o_m, o_d, last, D)  # [BM, DP]
        b_y = rows.add_product(tl.trans(b_w), b_x, b_y, C)
    b_y *= gain
    if ADDS:
        b_y += rows.load_rows(y, o_n, o_d, n_keys, D)
    rows.store_rows(y, b_y, o_n, o_d, n_keys, D)
