"""The operators `triton` and `triton_backward` of torch: autograd, and shapes for the compiler."""

from typing import Any

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.operators import (
    GRADIENTS,
    SCHEMA,
    all_gradients,
    by_field,
    empty_output,
    register,
    register_backward,
    save_inputs,
    saved_inputs,
)
from mixhead_plugin.ops.triton.calls import Call
from mixhead_plugin.ops.triton.passes import backward, forward


def _forward(*fields: Any) -> tuple[Tensor, Tensor]:
    inputs = AttentionInputs(*fields)
    with torch.cuda.device_of(inputs.query):
        return forward(Call(inputs))


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_output(query, value), query.new_empty(2, *query.shape[:3], dtype=torch.float32)


def _backward(
    d_output: Tensor, statistics: Tensor, output: Tensor | None, *fields: Any
) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*fields)
    with torch.cuda.device_of(d_output):
        grads = backward(Call(inputs), d_output, statistics, output)
    return all_gradients(grads, d_output)


def _backward_fake(
    d_output: Tensor, statistics: Tensor, output: Tensor | None, *fields: Any
) -> tuple[Tensor, ...]:
    operands = AttentionInputs(*fields).operands()
    grads = {name: torch.empty_like(tensor) for name, tensor in operands.items()}
    return all_gradients(grads, d_output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    out, statistics = output
    # Where heads mix, delta comes from dM and not from the output.
    mixes = AttentionInputs(*inputs).mixing is not None
    save_inputs(ctx, inputs, statistics, None if mixes else out)
    ctx.mark_non_differentiable(statistics)
    ctx.set_materialize_grads(False)  # the gradient of `statistics` is not made


def _differentiate(
    ctx: Any, d_output: Tensor | None, d_statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    if d_output is None:
        return (None,) * len(AttentionInputs._fields)
    inputs, statistics, output = saved_inputs(ctx)
    grads = torch.ops.mixhead_plugin.triton_backward(d_output, statistics, output, *inputs)
    return by_field(grads, inputs.operands())


_RESULTS = "Tensor d_output, Tensor statistics, Tensor? output"
register("triton", f"({SCHEMA}) -> (Tensor, Tensor)", _forward, _forward_fake)
register("triton_backward", f"({_RESULTS}, {SCHEMA}) -> {GRADIENTS}", _backward, _backward_fake)
register_backward("triton", _save, _differentiate)
