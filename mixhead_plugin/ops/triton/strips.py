"""The passes of heads that mix. Their weights are in memory, some queries at a time: a strip."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops.rounding import ceil_div, round_up
from mixhead_plugin.ops.triton import mixed, tuning
from mixhead_plugin.ops.triton.calls import Call, Statistics
from mixhead_plugin.ops.triton.programs import Grid
from mixhead_plugin.ops.triton.records import Strided, strided, strided_mixing
from mixhead_plugin.ops.triton.tuning import Tile

STRIP_QUERIES = 64  # a strip has a multiple of them, so that its tiles are full


class Strip(NamedTuple):
    """Some queries, whose weights are in memory at once."""

    first: int
    last: int  # the one behind the last query

    @property
    def n_queries(self) -> int:
        return self.last - self.first


# ---- both passes -------------------------------------------------------------------------------


def write_output(call: Call, statistics: Statistics, o: Strided) -> None:
    """Write the output.

    Args:
        call: the call
        statistics: those of all heads
        o: memory for the output, [B, H, Nq, Dv]
    """
    strips, (weights,) = split(call, count=1)
    of_values = value_product_arguments(call)
    for strip in strips:
        write_weights(call, strip, weights, statistics)  # P
        mix(call, strip, weights)  # Pbar, in place of P
        # O = (Z * Pbar) V / (1 - p)
        multiply_over_keys(call, strip, weights, call.v, o, of_values)


def write_mixed_grads(
    call: Call,
    grads: dict[str, Tensor],
    d_out: Tensor,
    statistics: Statistics,
) -> Tensor:
    """Write the gradients of query, key, value and mixing.

    Args:
        call: the call
        grads: memory for them, by name
        d_out: the gradient of the output, [B, H, Nq, Dv]
        statistics: those of the forward pass

    Returns:
        delta of each row, [B, H, Nq]
    """
    query_spans = call.query_spans()
    d_o = strided(d_out)
    delta = call.unwritten(torch.empty_like(statistics.peak))
    strips, (weights, d_weights) = split(call, count=2)
    # dK and dV are sums over the strips, in float32 where there are several.
    sums = {name: grads[name] for name in ("key", "value")}
    if len(strips) > 1:
        for name, grad in sums.items():
            sums[name] = call.unwritten(torch.empty_like(grad, dtype=torch.float32))
    d_q = strided(grads["query"])
    d_k = strided(sums["key"])
    d_v = strided(sums["value"])
    of_keys = key_product_arguments(call)
    of_values = value_product_arguments(call)
    shared_grads = []  # dM of each strip, [H, H], where all queries share M

    for strip in strips:
        write_weights(call, strip, weights, statistics)  # P
        write_mixed_weight_grads(call, strip, d_weights, d_o)  # dPbar
        d_mixing = mixing_grad(call, strip, weights, d_weights, delta, grads["mixing"])
        if d_mixing is not None:
            shared_grads.append(d_mixing)
        # dS, in place of dPbar
        write_score_grads(call, strip, weights, d_weights, statistics, delta)
        # dQ = scale dS K
        multiply_over_keys(call, strip, d_weights, call.k, d_q, of_keys)
        # dK = scale dS^T Q, and dK of the strips before
        add_over_queries(call, strip, d_weights, call.q, d_k, query_spans, of_keys)
        mix(call, strip, weights)  # Pbar again, in place of P
        # dV = (Z * Pbar)^T dO / (1 - p), and dV of the strips before
        add_over_queries(call, strip, weights, d_o, d_v, query_spans, of_values)

    if len(strips) > 1:
        for name, total in sums.items():
            grads[name].copy_(total)
    if shared_grads:
        grads["mixing"].copy_(torch.stack(shared_grads).sum(0))
    return delta


def split(call: Call, count: int) -> tuple[list[Strip], list[Strided]]:
    """Return the strips of a call, and the memory that holds one strip after the other.

    Args:
        call: the call
        count: how many memories are needed at once
    """
    width = round_up(call.n_keys, mixed.STRIP_KEYS.value)
    bytes_of_query = call.batch * call.heads * width * call.query.element_size()
    at_once = tuning.strip_bytes() // count // bytes_of_query
    at_once = max(1, at_once // STRIP_QUERIES) * STRIP_QUERIES
    if call.short_strips:
        at_once = STRIP_QUERIES
    strips = []
    for first in range(0, call.n_queries, at_once):
        strips.append(Strip(first, min(first + at_once, call.n_queries)))

    shape = (call.batch, call.heads, min(at_once, call.n_queries), width)
    memories = []
    for _ in range(count):
        memories.append(strided(call.unwritten(call.query.new_empty(shape))))
    return strips, memories


# ---- weights, and what the mixing does to them -------------------------------------------------


def write_weights(call: Call, strip: Strip, weights: Strided, statistics: Statistics) -> None:
    """Write P of a strip, the weights before mixing.

    Args:
        call: the call
        strip: its queries
        weights: the memory of strips
        statistics: those of the forward pass
    """
    call.launch(
        mixed.mixed_weights_kernel,
        Grid(call.batch * call.heads, queries=strip.n_queries, keys=call.n_keys),
        q=call.q,
        k=call.k,
        w=weights,
        peak=statistics.peak,
        factor=statistics.factor,
        masks=call.masks,
        scale=call.scale,
        **strip_arguments(call, strip),
    )


def mix(call: Call, strip: Strip, weights: Strided) -> None:
    """Write Pbar_i = sum_j M[j, i] P_j of a strip, in place of P."""
    call.launch(
        mixed.mix_kernel,
        Grid(call.batch, queries=strip.n_queries, keys=call.n_keys),
        m=call.m,
        w=weights,
        **strip_arguments(call, strip),
    )


def write_mixed_weight_grads(call: Call, strip: Strip, d_weights: Strided, d_o: Strided) -> None:
    """Write dPbar = Z * (dO V^T) / (1 - p) of a strip.

    Args:
        call: the call
        strip: its queries
        d_weights: the memory of strips for it
        d_o: the gradient of the output
    """
    call.launch(
        mixed.mixed_bwd_dw_kernel,
        Grid(call.batch * call.heads, queries=strip.n_queries, keys=call.n_keys),
        v=call.v,
        d_o=d_o,
        d_w=d_weights,
        dropout=call.dropout,
        **strip_arguments(call, strip),
    )


def mixing_grad(
    call: Call,
    strip: Strip,
    weights: Strided,
    d_weights: Strided,
    delta: Tensor,
    d_mixing: Tensor,
) -> Tensor | None:
    """Write dM[j, i] = P_j . dPbar_i of each query, and delta_j = sum_i M[j, i] dM[j, i].

    Args:
        call: the call
        strip: the queries
        weights: P
        d_weights: dPbar
        delta: memory for delta, [B, H, Nq]
        d_mixing: memory for dM, which is written where every query has its own M

    Returns:
        the sum of dM over the strip, [H, H], where all queries share M; else None
    """
    grid = Grid(call.batch, queries=strip.n_queries)
    given = {
        "m": call.m,
        "w": weights,
        "d_w": d_weights,
        "delta": delta,
        **strip_arguments(call, strip),
    }
    if not call.constants.PER_QUERY:
        return shared_mixing_grad(call, grid, given)
    call.launch(mixed.mixed_bwd_dm_kernel, grid, d_m=strided_mixing(d_mixing), **given)
    return None


def shared_mixing_grad(call: Call, grid: Grid, given: dict[str, Any]) -> Tensor:
    """Return dM of a strip, [H, H], where all queries share M.

    Each tile of queries writes a sum of its own, so the memory of the sums depends on the tile.

    Args:
        call: the call
        grid: the grid of mixed_bwd_dm_kernel
        given: its arguments, but for d_m
    """
    kernel = mixed.mixed_bwd_dm_kernel

    def launch(tile: Tile) -> Tensor:
        shape = (call.batch, ceil_div(grid.queries, tile.BM), call.heads, call.heads)
        sums = call.unwritten(call.query.new_empty(shape, dtype=torch.float32))
        call.launch_with(tile, kernel, grid, {**given, "d_m": strided_mixing(sums)})
        return sums

    return call.with_best_tile(kernel, launch).sum((0, 1))


def write_score_grads(
    call: Call,
    strip: Strip,
    weights: Strided,
    d_weights: Strided,
    statistics: Statistics,
    delta: Tensor,
) -> None:
    """Write dS of a strip in place of dPbar, by dP_j = sum_i M[j, i] dPbar_i.

    Args:
        call: the call
        strip: its queries
        weights: P
        d_weights: dPbar
        statistics: those of the forward pass
        delta: P . dP of each row, [B, H, Nq]
    """
    call.launch(
        mixed.mixed_bwd_ds_kernel,
        Grid(call.batch, queries=strip.n_queries, keys=call.n_keys),
        m=call.m,
        w=weights,
        d_w=d_weights,
        peak=statistics.peak,
        factor=statistics.factor,
        delta=delta,
        **strip_arguments(call, strip),
    )


# ---- products with values, keys and queries ----------------------------------------------------


def multiply_over_keys(
    call: Call, strip: Strip, w: Strided, x: Strided, y: Strided, arguments: dict[str, Any]
) -> None:
    """Write y = w x for the queries of a strip: O = Pbar V, or dQ = dS K.

    Args:
        call: the call
        strip: its queries
        w: the matrices of the strip, by queries and keys
        x: vectors of the keys, [B, H, Nk, D]
        y: memory for vectors of the queries, [B, H, Nq, D]
        arguments: those of the product
    """
    call.launch(
        mixed.product_over_keys_kernel,
        Grid(call.batch * call.heads, queries=strip.n_queries),
        w=w,
        x=x,
        y=y,
        **arguments,
        **strip_arguments(call, strip),
    )


def add_over_queries(
    call: Call,
    strip: Strip,
    w: Strided,
    x: Strided,
    y: Strided,
    query_spans: Tensor | None,
    arguments: dict[str, Any],
) -> None:
    """Add w^T x over the queries of a strip to y: dK = dS^T Q, or dV = Pbar^T dO.

    The first strip writes y.

    Args:
        call: the call
        strip: its queries
        w: the matrices of the strip, by queries and keys
        x: vectors of the queries, [B, H, Nq, D]
        y: the sums for the keys, [B, H, Nk, D]
        query_spans: the spans of queries that see each key, [Nk, 4]; None if there are none
        arguments: those of the product
    """
    call.launch(
        mixed.product_over_queries_kernel,
        Grid(call.batch * call.heads, keys=call.n_keys),
        w=w,
        x=x,
        y=y,
        ADDS=strip.first > 0,
        query_spans=query_spans,
        **arguments,
        **strip_arguments(call, strip),
    )


# ---- arguments that kernels share --------------------------------------------------------------


def strip_arguments(call: Call, strip: Strip) -> dict[str, Any]:
    """Return what each kernel of a strip takes."""
    return {
        "first": strip.first,
        "last": strip.last,
        "key_spans": call.key_spans,
        **call.lengths,
    }


def value_product_arguments(call: Call) -> dict[str, Any]:
    """Return what the products O and dV take: the sizes of values, and dropout."""
    gain = 1.0 if call.dropout is None else call.dropout.gain
    sizes = {"D": call.constants.DV, "DP": call.constants.DVP}
    return {**sizes, "gain": gain, "dropout": call.dropout}


def key_product_arguments(call: Call) -> dict[str, Any]:
    """Return what the products dQ and dK take: the sizes of keys, and the scale."""
    sizes = {"D": call.constants.D, "DP": call.constants.DP}
    return {**sizes, "gain": call.inputs.scale, "dropout": None}
