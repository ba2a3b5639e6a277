"""The two operators of torch, `blockwise` and `blockwise_backward`."""

from typing import Any

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.backward import backward
from mixhead_plugin.ops.blockwise.forward import forward
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.operators import (
    GRADIENTS,
    SCHEMA,
    all_gradients,
    announce_flops,
    by_field,
    empty_output,
    register,
    register_backward,
    save_inputs,
    saved_inputs,
)
from mixhead_plugin.ops.reference import upcast


def blockwise_attention(inputs: AttentionInputs) -> Tensor:
    """Compute `ops.attention` by blocks: the same values in memory linear in Nq + Nk."""
    if inputs.dropout_p > 0:
        # torch's own generator on the CPU repeats with torch.manual_seed and under activation
        # checkpointing.
        inputs = inputs._replace(seed=torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    announce_flops()
    return torch.ops.mixhead_plugin.blockwise(*inputs)


def _forward(*fields: Any) -> Tensor:
    inputs = AttentionInputs(*fields)
    plan, output = Plan(inputs), empty_output(upcast(inputs.query), inputs.value)
    forward(plan, output if plan.complete else output.zero_())
    return output.to(inputs.value.dtype)


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return empty_output(upcast(query), value).to(value.dtype)


def _learned(inputs: AttentionInputs, learned_mask: bool) -> list[str]:
    """Return the names of the inputs whose gradients the backward pass computes."""
    return [*inputs.given(), "attn_mask"] if learned_mask else list(inputs.given())


def _backward(d_output: Tensor, learned_mask: bool, *fields: Any) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*fields)
    grads = backward(Plan(inputs, learned_mask), d_output, _learned(inputs, learned_mask))
    if inputs.relative_key is not None:
        d_key = grads["relative_key"][:, : inputs.relative_key.shape[1]]
        grads["relative_key"] = torch.empty_like(inputs.relative_key, dtype=d_key.dtype).copy_(
            d_key
        )
    grads = {name: grad.to(getattr(inputs, name).dtype) for name, grad in grads.items()}
    return all_gradients(grads, d_output)


def _backward_fake(d_output: Tensor, learned_mask: bool, *fields: Any) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*fields)
    grads = {
        name: torch.empty_like(getattr(inputs, name)) for name in _learned(inputs, learned_mask)
    }
    return all_gradients(grads, d_output)


def _differentiate(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
    (inputs,) = saved_inputs(ctx)
    learned_mask = (
        inputs.attn_mask is not None
        and ctx.needs_input_grad[AttentionInputs._fields.index("attn_mask")]
    )
    grads = torch.ops.mixhead_plugin.blockwise_backward(d_output, learned_mask, *inputs)
    return by_field(grads, _learned(inputs, learned_mask))


register("blockwise", f"({SCHEMA}) -> Tensor", _forward, _forward_fake)
_GIVEN = "Tensor d_output, bool learned_mask"
register("blockwise_backward", f"({_GIVEN}, {SCHEMA}) -> {GRADIENTS}", _backward, _backward_fake)
register_backward("blockwise", lambda ctx, inputs, output: save_inputs(ctx, inputs), _differentiate)
