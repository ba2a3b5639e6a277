"""The forward and the backward pass of a call: which kernels are launched, in order."""

import torch
from torch import Tensor

from mixhead_plugin.ops.operators import empty_output
from mixhead_plugin.ops.triton import flash, strips
from mixhead_plugin.ops.triton.calls import Call, Statistics
from mixhead_plugin.ops.triton.programs import Grid
from mixhead_plugin.ops.triton.records import strided
from mixhead_plugin.ops.triton.rows import LOG2E
from mixhead_plugin.ops.triton.tuning import Tile


def forward(call: Call) -> tuple[Tensor, Tensor]:
    """Return O [B, H, Nq, Dv] and the statistics of rows, [2, B, H, Nq]: peak and factor."""
    out = call.unwritten(empty_output(call.query, call.inputs.value))
    shape = (2, *call.query.shape[:3])
    stacked = call.unwritten(call.query.new_empty(shape, dtype=torch.float32))
    if call.empty:
        return out.zero_(), stacked.zero_()
    statistics = Statistics(*stacked)
    o = strided(out)
    mixes = call.mixing is not None

    # Of heads that mix first the statistics of all rows, without values: a mixed head needs
    # those of all heads.
    call.launch(
        flash.flash_fwd_kernel,
        Grid(call.batch * call.heads, queries=call.n_queries),
        q=call.q,
        k=call.k,
        v=None if mixes else call.v,
        o=None if mixes else o,
        sink=call.sink,
        peak=statistics.peak,
        factor=statistics.factor,
        masks=call.masks,
        key_spans=call.key_spans,
        dropout=None if mixes else call.dropout,
        scale=call.scale,
        **call.lengths,
    )
    if mixes:
        strips.write_output(call, statistics, o)
    return out, stacked


def backward(call: Call, d_out: Tensor, stacked: Tensor, out: Tensor | None) -> dict[str, Tensor]:
    """Return the gradients of query, key and value, and of mixing and sink if they are given.

    Args:
        call: the call
        d_out: the gradient of the output, [B, H, Nq, Dv]
        stacked: the statistics that `forward` has returned, [2, B, H, Nq]
        out: what `forward` has returned, [B, H, Nq, Dv]; not read where heads mix
    """
    grads = {}
    for name, tensor in call.inputs.operands().items():
        grads[name] = call.unwritten(torch.empty_like(tensor))
    if call.empty:
        return {name: grad.zero_() for name, grad in grads.items()}

    statistics = Statistics(*stacked)
    if call.mixing is None:
        assert out is not None  # saved where heads are not mixed
        delta = write_unmixed_grads(call, grads, d_out, statistics, out)
    else:
        delta = strips.write_mixed_grads(call, grads, d_out, statistics)
    if call.sink is not None:
        grads["sink"].copy_(sink_grad(call, statistics, delta))
    return grads


def write_unmixed_grads(
    call: Call,
    grads: dict[str, Tensor],
    d_out: Tensor,
    statistics: Statistics,
    out: Tensor,
) -> Tensor:
    """Write the gradients of query, key and value where heads do not mix.

    Args:
        call: the call
        grads: memory for them, by name
        d_out: the gradient of the output, [B, H, Nq, Dv]
        statistics: those of the forward pass
        out: the output, [B, H, Nq, Dv]

    Returns:
        delta of each row, [B, H, Nq]
    """
    query_spans = call.query_spans()
    d_o = strided(d_out)

    # delta = P . dP = O . dO of each row, which dQ and dK need. One tile for all devices: this
    # takes next to no time.
    delta = call.unwritten(torch.empty_like(statistics.peak))
    call.launch_with(
        Tile(64, 16, 4, 1),
        flash.flash_bwd_delta_kernel,
        Grid(call.batch * call.heads, queries=call.n_queries),
        {"o": strided(out), "d_o": d_o, "delta": delta, "n_queries": call.n_queries},
    )
    given = {
        "q": call.q,
        "k": call.k,
        "v": call.v,
        "d_o": d_o,
        "peak": statistics.peak,
        "factor": statistics.factor,
        "delta": delta,
        "masks": call.masks,
        "dropout": call.dropout,
        "scale": call.scale,
        "d_scale": call.inputs.scale,
        **call.lengths,
    }
    call.launch(
        flash.flash_bwd_dq_kernel,
        Grid(call.batch * call.heads, queries=call.n_queries),
        d_q=strided(grads["query"]),
        key_spans=call.key_spans,
        **given,
    )
    call.launch(
        flash.flash_bwd_dkv_kernel,
        Grid(call.batch * call.heads, keys=call.n_keys),
        d_k=strided(grads["key"]),
        d_v=strided(grads["value"]),
        query_spans=query_spans,
        **given,
    )
    return delta


def sink_grad(call: Call, statistics: Statistics, delta: Tensor) -> Tensor:
    """Return dS of triton.md for the sink, whose dP is 0, summed to [H].

    Args:
        call: the call, which has a sink
        statistics: those of the forward pass
        delta: P . dP of each row, [B, H, Nq]
    """
    assert call.inputs.sink is not None
    score = call.inputs.sink.float()[:, None]  # [H, 1]
    sigsoftmax = call.inputs.normalizer == "sigsoftmax"

    # The sink's weight in each row, as `rows.weights_of` computes those of keys
    exponent = score
    if sigsoftmax:
        exponent = score + score.clamp(max=0)
    weights = torch.exp2(exponent * LOG2E.value - statistics.peak) * statistics.factor  # [B, H, Nq]
    if sigsoftmax:
        weights = weights * torch.sigmoid(score.abs())

    # -dS / delta, as in `rows.score_gradient`
    slope = weights
    if sigsoftmax:
        slope = weights * (2 - torch.sigmoid(score))
    elif call.inputs.normalizer == "l2":
        slope = weights * weights
    return -(slope * delta).sum((0, 2))
