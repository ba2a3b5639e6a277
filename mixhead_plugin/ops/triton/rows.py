"""Device functions of all kernels: loads and stores, masks, weights and gradients, dropout.

triton.md explains them. Tiles are named b_x, pointers p_x, offsets o_x (vectors), strides s_x, and
indices i_x (scalars): i_b a sentence, i_h a head, i_bh both in one, i_m the first query of a tile,
i_n its first key. Scores are multiplied by log2(e), because the hardware computes exp2.
"""

import triton
import triton.language as tl

from mixhead_plugin.ops.triton.records import Strided

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)  # the lowest score that is not hidden; twice of it is still finite
# A kernel is compiled once for all numbers of queries. It is compiled three times for n_keys: for
# multiples of 16, because rows of a mask are read in wide loads there alone; for 1, which triton
# takes for a constant; and for all others.
UNSPECIALIZED = ("n_queries",)


@triton.jit
def count_tiles(n, BLOCK: tl.constexpr):
    return (n + BLOCK - 1) // BLOCK


@triton.jit
def split_program(n_m, n_n, HEADS: tl.constexpr):
    """Return which tile of queries, which of keys, i_bh, i_b and i_h a program has.

    `programs.Grid` counts the programs of a kernel. n_m and n_n are its tiles of queries and of
    keys, 1 where a program has all of them. HEADS is H, or 1 where a program has all heads.
    """
    i = tl.program_id(0)
    i_bh = i // n_n // n_m
    i_b = (i_bh // HEADS).to(tl.int64)
    i_h = (i_bh % HEADS).to(tl.int64)
    return i // n_n % n_m, i % n_n, i_bh, i_b, i_h


@triton.jit
def longest_first(i_t, n_tiles):
    """Return the tile of queries that a program takes in place of tile i_t: the last one first.

    Under a causal mask the last queries see most keys. A device starts programs in their order, so
    it would else wait for the longest ones at the end.
    """
    return n_tiles - 1 - i_t


@triton.jit
def at(x, i_b, i_h):
    """Move the pointer of x to one sentence and head."""
    return Strided(x.p + i_b * x.s_b + i_h * x.s_h, x.s_b, x.s_h, x.s_n, x.s_d)


@triton.jit
def rows_at(x, o_n, o_d, n, D):
    """Return pointers to [N, D] of one head, and which of them are inside x."""
    p_x = x.p + o_n.to(tl.int64)[:, None] * x.s_n + o_d.to(tl.int64)[None, :] * x.s_d  # [N, D]
    return p_x, (o_n < n)[:, None] & (o_d < D)[None, :]


@triton.jit
def load_rows(x, o_n, o_d, n, D):
    """Load [N, D] of one head; zeros outside."""
    p_x, inside = rows_at(x, o_n, o_d, n, D)
    return tl.load(p_x, mask=inside, other=0.0)


@triton.jit
def store_rows(x, b_x, o_n, o_d, n, D):
    p_x, inside = rows_at(x, o_n, o_d, n, D)
    tl.store(p_x, b_x.to(x.p.dtype.element_ty), mask=inside)


@triton.jit
def load_statistic(x, i_bh, o_m, n_queries, other: tl.constexpr):
    """Load x [B, H, Nq] of some queries of one head, [BM]; `other` beyond the last one."""
    o_x = i_bh.to(tl.int64) * n_queries + o_m  # [BM]
    return tl.load(x + o_x, mask=o_m < n_queries, other=other)


@triton.jit
def store_statistic(x, b_x, i_bh, o_m, n_queries):
    o_x = i_bh.to(tl.int64) * n_queries + o_m  # [BM]
    tl.store(x + o_x, b_x, mask=o_m < n_queries)


@triton.jit
def rounded(b_x, C: tl.constexpr):
    """Round float32 to the 10 bits of tf32.

    Tensor cores only cut them off, and then errors are three times as large.
    """
    if C.PRECISION == "tf32":
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_nan = (b_bits & 0x7FFFFFFF) > 0x7F800000  # which could become a number
        return tl.where(b_nan, b_bits, b_bits + 0x1000).to(tl.float32, bitcast=True)
    else:
        return b_x


@triton.jit
def product(b_x, b_y, C: tl.constexpr):
    return tl.dot(rounded(b_x, C), rounded(b_y, C), input_precision=C.PRECISION)


@triton.jit
def add_product(b_x, b_y, b_sum, C: tl.constexpr):
    """Return b_sum + the product of b_x and b_y."""
    return tl.dot(rounded(b_x, C), rounded(b_y, C), b_sum, input_precision=C.PRECISION)


@triton.jit
def key_span(i_m, key_spans, n_queries, n_keys, C: tl.constexpr):
    """Return start and stop of the keys that some query of a tile sees, as far as is known.

    Causality and the spans of a mask say it (`spans_kernel`); padding, and a mask without spans,
    are not looked at. `start` is a multiple of BN.
    """
    start = 0
    stop = n_keys
    if C.CAUSAL:
        stop = tl.minimum(stop, tl.maximum(i_m + C.BM + n_keys - n_queries, 0))
    if key_spans is not None:
        o_m = i_m + tl.arange(0, C.BM)
        p_span = key_spans + 4 * o_m  # [BM]
        inside = o_m < n_queries
        start = tl.min(tl.load(p_span, mask=inside, other=n_keys)) // C.BN * C.BN
        stop = tl.minimum(stop, tl.max(tl.load(p_span + 1, mask=inside, other=0)))
    return start, stop


@triton.jit
def end_of_whole_keys(i_m, start, stop, key_spans, masks, n_queries, n_keys, C: tl.constexpr):
    """Return the key `whole`, up to which the tiles need no `bias_of`.

        keys   0 ...  start ...  whole ...  stop ...  n_keys
                      |  seen by |  some    |
                      |  all     |  hidden  |

    Up to there every query of the tile sees every key, without a bias. `start` and `stop` are those
    of `key_span`, and `whole` is a multiple of BN.
    """
    whole = start
    if masks.padding is None and (masks.mask is None or key_spans is not None):
        whole = stop
        if C.CAUSAL:
            whole = tl.minimum(whole, tl.maximum(i_m + 1 + n_keys - n_queries, 0))
        if key_spans is not None:
            o_m = i_m + tl.arange(0, C.BM)
            p_biased = key_spans + 4 * o_m + 2  # [BM]
            biased = tl.load(p_biased, mask=o_m < n_queries, other=n_keys)
            whole = tl.minimum(whole, tl.min(biased))
        whole = tl.maximum(whole // C.BN * C.BN, start)
    return whole


@triton.jit
def outside(i_n, start, stop, C: tl.constexpr):
    """Return whether a tile has no key of a `key_span`."""
    return (i_n + C.BN <= start) | (i_n >= stop)


@triton.jit
def span_of_query(i_q, key_spans, n_queries, n_keys, C: tl.constexpr):
    """Return start and stop of the keys that one query may see."""
    start = i_q * 0  # with the 64 bits of i_q, as `stop` and the keys between them
    stop = start + n_keys
    if C.CAUSAL:
        stop = tl.minimum(stop, tl.maximum(i_q + 1 + n_keys - n_queries, 0))
    if key_spans is not None:
        start = tl.maximum(start, tl.load(key_spans + 4 * i_q))
        stop = tl.minimum(stop, tl.load(key_spans + 4 * i_q + 1))
    return start, stop


@triton.jit
def query_span(i_n, query_spans, n_queries, n_keys, C: tl.constexpr):
    """Return start and stop of the queries that see some key of a tile, as far as is known.

    As `key_span`, but `start` is a multiple of BM.
    """
    start = 0
    stop = n_queries
    if C.CAUSAL:
        start = tl.maximum(i_n - (n_keys - n_queries), 0) // C.BM * C.BM
    if query_spans is not None:
        o_n = i_n + tl.arange(0, C.BN)
        p_span = query_spans + 4 * o_n  # [BN]
        inside = o_n < n_keys
        start = tl.maximum(
            start, tl.min(tl.load(p_span, mask=inside, other=n_queries)) // C.BM * C.BM
        )
        stop = tl.max(tl.load(p_span + 1, mask=inside, other=0))
    return start, stop


@triton.jit
def start_of_whole_queries(
    i_n, start, stop, query_spans, masks, n_queries, n_keys, C: tl.constexpr
):
    """Return the query `whole`, from which on the tiles need no `bias_of`.

        queries   0 ...  start ...  whole ...  stop ...  n_queries
                         |  some    |  all     |
                         |  hidden  |  see it  |

    Unlike in `end_of_whole_keys`, the tiles at the edge of a mask come first, because later queries
    see more keys. `whole` is a multiple of BM if it is not `stop`.
    """
    whole = stop
    if masks.padding is None and (masks.mask is None or query_spans is not None):
        whole = start
        if C.CAUSAL:
            # the first query that sees the last key of the tile
            last = i_n + C.BN - 1 - (n_keys - n_queries)
            whole = tl.maximum(whole, tl.maximum(last + C.BM - 1, 0) // C.BM * C.BM)
        if query_spans is not None:
            o_n = i_n + tl.arange(0, C.BN)
            p_biased = query_spans + 4 * o_n + 3  # [BN]
            biased = tl.max(tl.load(p_biased, mask=o_n < n_keys, other=0))
            whole = tl.maximum(whole, (biased + C.BM - 1) // C.BM * C.BM)
        whole = tl.minimum(whole, stop)
    return whole


@triton.jit(do_not_specialize=["n_rows"])
def spans_kernel(mask, spans, n_rows, n, BM: tl.constexpr, BN: tl.constexpr):
    """Write, for each row of a mask [n_rows, n], two pairs of start and stop.

    The first is of what is not -inf, the second of what is not 0.
    """
    o_m = tl.program_id(0) * BM + tl.arange(0, BM)
    # Starts and stops of both spans, [BM]; a span without keys starts at n and stops at 0.
    b_seen_start = tl.zeros([BM], tl.int32) + n
    b_biased_start = tl.zeros([BM], tl.int32) + n
    b_seen_stop = tl.zeros([BM], tl.int32)
    b_biased_stop = tl.zeros([BM], tl.int32)
    for i_n in range(0, n, BN):
        o_n = i_n + tl.arange(0, BN)
        p_a, inside = rows_at(mask, o_m, o_n, n_rows, n)
        b_a = tl.load(p_a, mask=inside, other=0.0).to(tl.float32)  # [BM, BN]
        seen = inside & (b_a != float("-inf"))
        biased = inside & (b_a != 0.0)
        b_seen_start = tl.minimum(b_seen_start, tl.min(tl.where(seen, o_n[None, :], n), 1))
        b_seen_stop = tl.maximum(b_seen_stop, tl.max(tl.where(seen, o_n[None, :] + 1, 0), 1))
        b_biased_start = tl.minimum(b_biased_start, tl.min(tl.where(biased, o_n[None, :], n), 1))
        b_biased_stop = tl.maximum(b_biased_stop, tl.max(tl.where(biased, o_n[None, :] + 1, 0), 1))
    p_spans = spans + 4 * o_m
    tl.store(p_spans, b_seen_start, mask=o_m < n_rows)
    tl.store(p_spans + 1, b_seen_stop, mask=o_m < n_rows)
    tl.store(p_spans + 2, b_biased_start, mask=o_m < n_rows)
    tl.store(p_spans + 3, b_biased_stop, mask=o_m < n_rows)


@triton.jit
def load_wide(p, mask, other: tl.constexpr):
    """Load numbers of two bytes or more; refuse narrower ones when the kernel is compiled.

    From the narrowest load that a product depends on, halved by `join`, triton chooses how many
    neighbours of a row a thread multiplies. For one byte it is 8 in each of 4 threads, and triton
    before 3.9 then skips half of 16 numbers.
    """
    tl.static_assert(
        p.dtype.element_ty.primitive_bitwidth >= 16, "the kernels read no numbers of one byte"
    )
    return tl.load(p, mask=mask, other=other)


@triton.jit
def bias_of(i_b, i_h, o_m, o_n, masks, n_queries, n_keys, C: tl.constexpr):
    """Return what is added to the scores, -inf where a key is hidden.

    The shapes of o_m and o_n broadcast to that of the tile.
    """
    seen = (o_m < n_queries) & (o_n < n_keys)
    if C.CAUSAL:
        seen &= o_n <= o_m + (n_keys - n_queries)
    if masks.padding is not None:
        p_pad = masks.padding + i_b * n_keys + o_n
        seen &= load_wide(p_pad, o_n < n_keys, 1) == 0
    if masks.mask is not None:
        p_a = masks.mask + i_b * masks.s_b + i_h * masks.s_h
        p_a = p_a + o_m.to(tl.int64) * masks.s_n + o_n.to(tl.int64) * masks.s_d
        b_a = load_wide(p_a, seen, float("-inf")).to(tl.float32)
        # The lowest float32 times log2(e) would be -inf, a hidden key. NaN stays NaN.
        low = tl.maximum(b_a * LOG2E, LOWEST, propagate_nan=tl.PropagateNan.ALL)
        return tl.where(b_a == float("-inf"), float("-inf"), low)
    else:  # triton also compiles the lines after a return
        return tl.where(seen, 0.0, float("-inf"))


@triton.jit
def log2_of_visible_keys(
    i_b, i_h, o_m, start, whole, stop, masks, n_queries, n_keys, C: tl.constexpr
):
    """Return log2 of the number of keys that each query sees, [BM]; inf for none.

    Up to `whole` (`end_of_whole_keys`) nothing has to be counted.
    """
    b_n = tl.full([C.BM], 0.0, tl.float32) + (whole - start)  # [BM]
    for i_n in range(whole, stop, C.BN):
        o_n = i_n + tl.arange(0, C.BN)
        b_a = bias_of(i_b, i_h, o_m[:, None], o_n[None, :], masks, n_queries, n_keys, C)  # [BM, BN]
        b_n += tl.sum(tl.where(b_a == float("-inf"), 0.0, 1.0), 1)
    return tl.where(b_n == 0, float("inf"), tl.log2(tl.maximum(b_n, 1.0)))


@triton.jit
def sigmoid_of_abs(b_s):
    """Return sigmoid(|s|), which neither overflows nor vanishes."""
    return 1.0 / (1.0 + tl.exp2(-tl.abs(b_s)))


@triton.jit
def exponent(b_s, C: tl.constexpr):
    """Return y of the weights 2^y f (triton.md)."""
    return b_s + tl.minimum(b_s, 0.0) if C.NORMALIZER == "sigsoftmax" else b_s


@triton.jit
def weights_of(b_s, b_peak, b_factor, C: tl.constexpr):
    """Return the weights P from the scores and the statistics of their rows.

    They are 0 where the peak is inf. The peak of sigmoid is log2(n), n the number of visible keys.

    The peak and the factor stay separate. Beside a peak of -1e8, their combination would lose
    differences below 8.
    """
    if C.NORMALIZER == "sigmoid":
        return b_factor / (1.0 + tl.exp2(b_peak - b_s))
    else:
        # The peak was rounded in another order of sums. Beside -1e8 a score can exceed it by 16.
        b_y = tl.minimum(exponent(b_s, C) - b_peak, 0.0, propagate_nan=tl.PropagateNan.ALL)
        b_p = tl.exp2(b_y) * b_factor
        if C.NORMALIZER == "sigsoftmax":
            b_p *= sigmoid_of_abs(b_s)
        return b_p


@triton.jit
def score_gradient(b_s, b_p, b_dp, b_delta, C: tl.constexpr):
    """Return dS from scores, weights, dP and delta = P . dP of each row (triton.md)."""
    if C.NORMALIZER == "l2":
        return b_p * (b_dp - b_p * b_delta)
    elif C.NORMALIZER == "sigmoid":
        return b_p * (1.0 - b_p) * b_dp
    else:
        b_ds = b_p * (b_dp - b_delta)
        if C.NORMALIZER == "sigsoftmax":
            b_f = sigmoid_of_abs(b_s)
            b_ds *= tl.where(b_s >= 0, 2.0 - b_f, 1.0 + b_f)
        return b_ds


@triton.jit
def not_dropped(seed, dropout, i_bh, i_m, i_n, C: tl.constexpr):
    """Return which weights of a tile of one head dropout leaves, [BM, BN].

    A weight has the same draw in every tile, and in every kernel. The counter of the random numbers
    is (key / 4, query, i_bh), and each gives four draws, for four keys. `seed` is the number that
    dropout.seed points to, loaded once for all tiles of a program.
    """
    c_n = i_n // 4 + tl.arange(0, C.BN // 4)[None, :]
    c_m = i_m + tl.arange(0, C.BM)[:, None]
    zeros = tl.full([C.BM, C.BN // 4], 0, tl.int32)
    r0, r1, r2, r3 = tl.philox(seed, zeros + c_n, zeros + c_m, zeros + i_bh, zeros, 7)
    # `join` adds a last dimension of 2, so in memory the draws of a counter are r0, r1, r2, r3.
    draws = tl.join(tl.join(r0, r2), tl.join(r1, r3))
    return tl.reshape(draws, [C.BM, C.BN]) >= tl.cast(dropout.threshold, tl.uint32)
