"""The two operators of torch, `blockwise` and `blockwise_backward`."""

from typing import Any

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.backward import backward
from mixhead_plugin.ops.blockwise.forward import forward
from mixhead_plugin.ops.blockwise.kept import MEMORY, new_handle
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
from mixhead_plugin.ops.precision import upcast


def blockwise_attention(inputs: AttentionInputs) -> Tensor:
    """Compute `ops.attention` by blocks: the same values in memory linear in Nq + Nk."""
    if inputs.dropout_p > 0:
        # From torch's own generator on the CPU, so that the same weights are dropped after
        # torch.manual_seed, and again where activation checkpointing repeats the forward pass.
        inputs = inputs._replace(seed=torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    announce_flops()
    output, _ = torch.ops.mixhead_plugin.blockwise(*inputs, _will_be_differentiated(inputs))
    return output


def _will_be_differentiated(inputs: AttentionInputs) -> bool:
    """Return whether a backward pass may follow, so that it pays to keep weights for it."""
    if not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in inputs.tensors().values())


_FIELD_COUNT = len(AttentionInputs._fields)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the output, and a handle of the weights that are kept for the backward pass.

    Args:
        arguments: the fields of `AttentionInputs`, and whether to keep weights
    """
    inputs = AttentionInputs(*arguments[:_FIELD_COUNT])
    # torch leaves out a last argument that is its default.
    keep = len(arguments) > _FIELD_COUNT and arguments[_FIELD_COUNT]
    plan = Plan(inputs)
    output = empty_output(upcast(inputs.query), inputs.value)
    if not plan.has_every_query:
        output.zero_()

    handle = new_handle()
    if keep and inputs.query.is_cpu and plan.blocks:
        handle = MEMORY.reserve(_kept_bytes(plan))
    forward(plan, output, _kept(plan, handle))
    return output.to(inputs.value.dtype), handle


def _kept_bytes(plan: Plan) -> int:
    return plan.kept_numbers * plan.inputs.query.dtype.itemsize


def _kept(plan: Plan, handle: Tensor) -> Tensor | None:
    """Return the memory that a call has for weights, or None."""
    return MEMORY.piece(handle, _kept_bytes(plan), plan.inputs.query.dtype)


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_output(upcast(query), value).to(value.dtype), new_handle()


def _backward(d_output: Tensor, asked: str, *arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients in the order of `operators.DIFFERENTIABLE`.

    Args:
        d_output: [B, H', Nq, Dv]
        asked: names of the inputs whose gradients are asked for, separated by spaces
        arguments: the fields of `AttentionInputs`, and the handle of what was kept
    """
    inputs = AttentionInputs(*arguments[:_FIELD_COUNT])
    handle = arguments[_FIELD_COUNT] if len(arguments) > _FIELD_COUNT else new_handle()
    names = asked.split()
    plan = Plan(inputs, learned_mask="attn_mask" in names)
    grads = backward(plan, d_output, names, _kept(plan, handle))
    if inputs.relative_key is not None and "relative_key" in grads:
        # The plan has added rows of zeros for distances without one.
        d_key = grads["relative_key"][:, : inputs.relative_key.shape[1]]
        like = torch.empty_like(inputs.relative_key, dtype=d_key.dtype)  # with its strides
        grads["relative_key"] = like.copy_(d_key)
    grads = {name: grad.to(getattr(inputs, name).dtype) for name, grad in grads.items()}
    return all_gradients(grads, d_output)


def _backward_fake(d_output: Tensor, asked: str, *arguments: Any) -> tuple[Tensor, ...]:
    inputs = AttentionInputs(*arguments[:_FIELD_COUNT])
    grads = {name: torch.empty_like(getattr(inputs, name)) for name in asked.split()}
    return all_gradients(grads, d_output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, handle = output
    save_inputs(ctx, inputs[:_FIELD_COUNT], handle)


def _differentiate(ctx: Any, d_output: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    inputs, handle = saved_inputs(ctx)
    asked = []  # without frozen tensors, whose gradients would cost products
    for name, needed in zip(AttentionInputs._fields, ctx.needs_input_grad):
        if needed:
            asked.append(name)
    names = " ".join(asked)  # the operators of torch that compile take texts, but no lists of them
    grads = torch.ops.mixhead_plugin.blockwise_backward(d_output, names, *inputs, handle)
    return *by_field(grads, asked), None


register(
    "blockwise",
    f"({SCHEMA}, bool keep=False) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
register(
    "blockwise_backward",
    f"(Tensor d_output, str asked, {SCHEMA}, Tensor? handle=None) -> {GRADIENTS}",
    _backward,
    _backward_fake,
)
register_backward("blockwise", _save, _differentiate)
