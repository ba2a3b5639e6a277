"""What all kernels share: tiles of memory, masks, weights and their gradients, dropout; see triton.md.

Scores are in powers of 2, s log2(e), because exp2 is what the hardware has. Tiles b_x, positions o_x, strides s_x.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)  # of a score that is not hidden: twice it is still a number
# What changes from batch to batch and gains nothing from being known to be 1 or a multiple of 16. n_keys does: many
# numbers of a mask are read at once only where it is such a multiple. So there are two compilations, not one a length.
UNSPECIALIZED = ("threshold", "n_queries", "n_tiles", "n_groups", "n_chunks", "s_db")


@triton.jit
def rows_of(x, o_n, o_d, s_n, s_d, n, D: tl.constexpr):
    """[positions, D] of one head; zeros beyond its ends"""
    p_x = x + o_n.to(tl.int64)[:, None] * s_n + o_d.to(tl.int64)[None, :] * s_d
    return tl.load(p_x, mask=(o_n < n)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def store_rows(x, b_x, o_n, o_d, s_n, s_d, n, D: tl.constexpr):
    p_x = x + o_n.to(tl.int64)[:, None] * s_n + o_d.to(tl.int64)[None, :] * s_d
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=(o_n < n)[:, None] & (o_d < D)[None, :])


@triton.jit
def heads_of(x, o_h, o_n, o_d, s_h, s_n, s_d, n, H: tl.constexpr, D: tl.constexpr):
    """[heads, positions, D] of one sentence; zeros beyond its ends"""
    p_x = (
        x
        + o_h.to(tl.int64)[:, None, None] * s_h
        + o_n.to(tl.int64)[None, :, None] * s_n
        + o_d.to(tl.int64)[None, None, :] * s_d
    )
    inside = (o_h < H)[:, None, None] & (o_n < n)[None, :, None] & (o_d < D)[None, None, :]
    return tl.load(p_x, mask=inside, other=0.0)


@triton.jit
def turned_heads_of(x, o_h, o_n, o_d, s_h, s_n, s_d, n, H: tl.constexpr, D: tl.constexpr):
    """[heads, D, positions]: what `heads_of` loads, turned"""
    p_x = (
        x
        + o_h.to(tl.int64)[:, None, None] * s_h
        + o_d.to(tl.int64)[None, :, None] * s_d
        + o_n.to(tl.int64)[None, None, :] * s_n
    )
    inside = (o_h < H)[:, None, None] & (o_d < D)[None, :, None] & (o_n < n)[None, None, :]
    return tl.load(p_x, mask=inside, other=0.0)


@triton.jit
def store_heads(x, b_x, o_h, o_n, o_d, s_h, s_n, s_d, n, H: tl.constexpr, D: tl.constexpr):
    p_x = (
        x
        + o_h.to(tl.int64)[:, None, None] * s_h
        + o_n.to(tl.int64)[None, :, None] * s_n
        + o_d.to(tl.int64)[None, None, :] * s_d
    )
    inside = (o_h < H)[:, None, None] & (o_n < n)[None, :, None] & (o_d < D)[None, None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=inside)


@triton.jit
def statistic_of(x, o_h, o_n, n, H: tl.constexpr, other: tl.constexpr):
    """[heads, positions] of a statistic [H, n] of one sentence"""
    p_x = x + o_h.to(tl.int64)[:, None] * n + o_n[None, :]
    return tl.load(p_x, mask=(o_h < H)[:, None] & (o_n < n)[None, :], other=other)


@triton.jit
def key_span(first, n_queries, n_keys, spans, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """From where to where the keys lie that any query of a tile may see; the start is a multiple of BN."""
    start, stop = 0, n_keys
    if CAUSAL:
        stop = tl.minimum(stop, tl.maximum(first + BM + n_keys - n_queries, 0))
    if spans is not None:
        o_m = first + tl.arange(0, BM)
        start = tl.min(tl.load(spans + 4 * o_m, mask=o_m < n_queries, other=n_keys)) // BN * BN
        stop = tl.minimum(stop, tl.max(tl.load(spans + 4 * o_m + 1, mask=o_m < n_queries, other=0)))
    return start, stop


@triton.jit
def whole_keys(
    first, start, stop, n_queries, n_keys, mask, padding, spans,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Up to which key, from `start`, every query of a tile sees every key as it is: tiles that need no `bias_of`."""
    whole = start
    if padding is None and (mask is None or spans is not None):
        whole = stop
        if CAUSAL:
            whole = tl.minimum(whole, tl.maximum(first + 1 + n_keys - n_queries, 0))
        if spans is not None:
            o_m = first + tl.arange(0, BM)
            whole = tl.minimum(whole, tl.min(tl.load(spans + 4 * o_m + 2, mask=o_m < n_queries, other=n_keys)))
        whole = tl.maximum(whole // BN * BN, start)
    return whole


@triton.jit
def query_span(first, n_queries, n_keys, spans, CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """From where to where the queries lie that may see any key of a tile; the start is a multiple of BM."""
    start, stop = 0, n_queries
    if CAUSAL:
        start = tl.maximum(first - (n_keys - n_queries), 0) // BM * BM
    if spans is not None:
        o_n = first + tl.arange(0, BN)
        seen = tl.min(tl.load(spans + 4 * o_n, mask=o_n < n_keys, other=n_queries)) // BM * BM
        start = tl.maximum(start, seen)
        stop = tl.max(tl.load(spans + 4 * o_n + 1, mask=o_n < n_keys, other=0))
    return start, stop


@triton.jit
def whole_queries(
    first, start, stop, n_queries, n_keys, mask, padding, spans,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """From which query on, up to `stop`, every query sees every key of a tile as it is; a multiple of BM, or `stop`"""
    whole = stop
    if padding is None and (mask is None or spans is not None):
        whole = start
        if CAUSAL:
            last = first + BN - 1 - (n_keys - n_queries)  # the query that sees the last key of the tile
            whole = tl.maximum(whole, tl.maximum(last + BM - 1, 0) // BM * BM)
        if spans is not None:
            o_n = first + tl.arange(0, BN)
            biased = tl.max(tl.load(spans + 4 * o_n + 3, mask=o_n < n_keys, other=0))
            whole = tl.maximum(whole, (biased + BM - 1) // BM * BM)
        whole = tl.minimum(whole, stop)
    return whole


@triton.jit(do_not_specialize=["rows"])
def spans_kernel(mask, spans, s_m, s_n, rows, n, BM: tl.constexpr, BN: tl.constexpr):
    """Of each row of a mask [rows, n]: from where to where it is not -inf, and from where to where it is not 0"""
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    b_seen, b_biased = tl.zeros([BM], tl.int32) + n, tl.zeros([BM], tl.int32) + n
    b_unseen, b_plain = tl.zeros([BM], tl.int32), tl.zeros([BM], tl.int32)
    for at in range(0, n, BN):
        o_n = at + tl.arange(0, BN)
        inside = (o_m < rows)[:, None] & (o_n < n)[None, :]
        p_a = mask + o_m.to(tl.int64)[:, None] * s_m + o_n.to(tl.int64)[None, :] * s_n
        b_a = tl.load(p_a, mask=inside, other=0.0).to(tl.float32)  # [BM, BN]
        seen, biased = inside & (b_a != float("-inf")), inside & (b_a != 0.0)
        b_seen = tl.minimum(b_seen, tl.min(tl.where(seen, o_n[None, :], n), 1))
        b_unseen = tl.maximum(b_unseen, tl.max(tl.where(seen, o_n[None, :] + 1, 0), 1))
        b_biased = tl.minimum(b_biased, tl.min(tl.where(biased, o_n[None, :], n), 1))
        b_plain = tl.maximum(b_plain, tl.max(tl.where(biased, o_n[None, :] + 1, 0), 1))
    p_spans = spans + 4 * o_m
    tl.store(p_spans, b_seen, mask=o_m < rows)
    tl.store(p_spans + 1, b_unseen, mask=o_m < rows)
    tl.store(p_spans + 2, b_biased, mask=o_m < rows)
    tl.store(p_spans + 3, b_plain, mask=o_m < rows)


@triton.jit
def bias_of(o_m, o_n, n_queries, n_keys, mask, s_mm, s_mn, padding, s_pn, CAUSAL: tl.constexpr):
    """What is added to the scores, -inf where a key is hidden; for positions of any two shapes that go together."""
    seen = (o_m < n_queries) & (o_n < n_keys)
    if CAUSAL:
        seen &= o_n <= o_m + (n_keys - n_queries)
    if padding is not None:
        seen &= tl.load(padding + o_n.to(tl.int64) * s_pn, mask=o_n < n_keys, other=1) == 0
    if mask is not None:
        p_a = mask + o_m.to(tl.int64) * s_mm + o_n.to(tl.int64) * s_mn
        b_a = tl.load(p_a, mask=seen, other=float("-inf")).to(tl.float32)
        # The lowest float32 times log2(e) would be a hidden key; NaN stays.
        low = tl.maximum(b_a * LOG2E, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        return tl.where(b_a == float("-inf"), float("-inf"), low)
    else:  # triton compiles what stands behind a return
        return tl.where(seen, 0.0, float("-inf"))


@triton.jit
def sigmoid_of_size(b_s):
    """sigmoid(|s|), which neither overflows nor vanishes"""
    return 1.0 / (1.0 + tl.exp2(-tl.abs(b_s)))


@triton.jit
def exponent(b_s, NORMALIZER: tl.constexpr):
    """y of the weights 2^y f: f is 1, for sigsoftmax sigmoid(|s|), since exp(s) sigmoid(s) = exp(s + min(s, 0)) f."""
    if NORMALIZER == "sigsoftmax":
        return b_s + tl.minimum(b_s, 0.0)
    else:
        return b_s


@triton.jit
def weights_of(b_s, b_peak, b_factor, NORMALIZER: tl.constexpr):
    """P, from the scores and the statistics of their rows: largest exponent and what normalizes, apart to stay exact

    where the largest is -1e8 and everything smaller than 8 would be lost. An infinite one makes zeros.
    """
    # Computed in another order than the peak was, a score beside -1e8 may be rounded to 16 more than it.
    b_y = tl.minimum(exponent(b_s, NORMALIZER) - b_peak, 0.0, propagate_nan=tl.PropagateNan.ALL)
    b_p = tl.exp2(b_y) * b_factor
    if NORMALIZER == "sigsoftmax":
        b_p *= sigmoid_of_size(b_s)
    return b_p


@triton.jit
def score_gradient(b_s, b_p, b_dp, b_delta, NORMALIZER: tl.constexpr):
    """dS from scores, weights, the weights' gradient and its sum with the weights over the row (triton.md)"""
    if NORMALIZER == "l2":
        return b_p * (b_dp - b_p * b_delta)
    else:
        b_ds = b_p * (b_dp - b_delta)
        if NORMALIZER == "sigsoftmax":
            b_f = sigmoid_of_size(b_s)
            b_ds *= tl.where(b_s >= 0, 2.0 - b_f, 1.0 + b_f)
        return b_ds


@triton.jit
def kept(seed, threshold, rows, o_m, o_n, RANK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Whether dropout keeps a weight: the same for every tile that holds it, [BM, BN] or [heads, BM, BN].

    The counter is (key / 4, query, sentence and head), four draws in each; o_m, o_n are the first positions.
    """
    c_n = o_n // 4 + tl.arange(0, BN // 4)
    c_m = o_m + tl.arange(0, BM)
    if RANK == 2:
        c_n, c_m = c_n[None, :], c_m[:, None]
        nothing = tl.zeros([BM, BN // 4], tl.int32)
    else:
        c_n, c_m, rows = c_n[None, None, :], c_m[None, :, None], rows[:, None, None]
        nothing = tl.zeros([rows.shape[0], BM, BN // 4], tl.int32)
    r0, r1, r2, r3 = tl.philox(seed, nothing + c_n, nothing + c_m, nothing + rows, nothing, 7)
    draws = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    shape: tl.constexpr = [BM, BN] if RANK == 2 else [nothing.shape[0], BM, BN]
    return tl.reshape(draws, shape) >= threshold.to(tl.uint32)
