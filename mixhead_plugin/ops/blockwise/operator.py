"""Register both passes as operators of torch, which torch.compile takes as a whole."""

from typing import Any, List, Optional, Tuple

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.backward import backward
from mixhead_plugin.ops.blockwise.forward import forward
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.forward_mode import refuse_forward_mode
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.reference import upcast

_TYPES = {Tensor: "Tensor", Optional[Tensor]: "Tensor?", str: "str", bool: "bool", float: "float"}
_INPUTS = ", ".join(f"{_TYPES[type_]} {name}" for name, type_ in AttentionInputs.__annotations__.items())


def blockwise_attention(inputs: AttentionInputs) -> Tensor:
    """Compute `ops.attention` by blocks: the same values in memory linear in Nq + Nk."""
    refuse_forward_mode("blockwise", *inputs)
    if inputs.dropout_p > 0:
        # torch's own generator on the CPU repeats with torch.manual_seed and under activation checkpointing.
        inputs = inputs._replace(seed=torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
    return torch.ops.mixhead_plugin.blockwise(*inputs)


def _forward(*arguments: Any) -> Tensor:
    inputs = AttentionInputs(*arguments)
    output = _output_like(upcast(inputs.query), inputs.value)
    forward(Plan(inputs), output)
    return output.to(inputs.value.dtype)


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return _output_like(query, value)


def _output_like(query: Tensor, value: Tensor) -> Tensor:
    """Return zeros [B, H', Nq, Dv] with the memory order of `query`, so that reshaping them needs no copy."""
    order = sorted(range(4), key=query.stride, reverse=True)
    shape = [query.shape[0], value.shape[1], query.shape[2], value.shape[3]]
    return query.new_zeros([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


def _learned(inputs: AttentionInputs, learned_mask: bool) -> List[str]:
    """Return the names of the inputs whose gradients the backward pass returns, in its order."""
    return [*inputs.given(), *["attn_mask"] * learned_mask]


def _backward(d_output: Tensor, *arguments: Any) -> List[Tensor]:
    inputs, learned_mask = AttentionInputs(*arguments[:-1]), arguments[-1]
    grads = backward(Plan(inputs, learned_mask), d_output, _learned(inputs, learned_mask))
    if inputs.relative_key is not None:
        d_key = grads["relative_key"][:, : inputs.relative_key.shape[1]]
        grads["relative_key"] = torch.empty_like(inputs.relative_key, dtype=d_key.dtype).copy_(d_key)
    return [grad.to(getattr(inputs, name).dtype) for name, grad in grads.items()]


def _backward_fake(d_output: Tensor, *arguments: Any) -> List[Tensor]:
    inputs = AttentionInputs(*arguments[:-1])
    return [torch.empty_like(getattr(inputs, name)) for name in _learned(inputs, arguments[-1])]


def _save(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
    ctx.inputs = AttentionInputs(*(None if isinstance(value, Tensor) else value for value in inputs))
    ctx.tensors = [name for name, value in zip(AttentionInputs._fields, inputs) if isinstance(value, Tensor)]


def _differentiate(ctx: Any, d_output: Tensor) -> Tuple[Optional[Tensor], ...]:
    inputs = ctx.inputs._replace(**dict(zip(ctx.tensors, ctx.saved_tensors)))
    learned_mask = inputs.attn_mask is not None and ctx.needs_input_grad[AttentionInputs._fields.index("attn_mask")]
    grads = torch.ops.mixhead_plugin.blockwise_backward(d_output, *inputs, learned_mask)
    by_name = dict(zip(_learned(inputs, learned_mask), grads))
    return tuple(by_name.get(name) for name in AttentionInputs._fields)


def _no_second_derivative(ctx: Any, *d_grads: Any) -> None:
    raise NotImplementedError("impl 'blockwise' has no second derivative; impl 'reference' has")


def _register(name: str, schema: str, function: Any, fake: Any) -> None:
    """Define an operator; `fake` gives the shapes and strides of its results, on the device meta too."""
    # torch.library.custom_op would load the compiler at its first call: a second and 35 MiB.
    torch.library.define(name, schema)
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)


_register("mixhead_plugin::blockwise", f"({_INPUTS}) -> Tensor", _forward, _forward_fake)
_register(
    "mixhead_plugin::blockwise_backward",
    f"(Tensor d_output, {_INPUTS}, bool learned_mask) -> Tensor[]",
    _backward,
    _backward_fake,
)
torch.library.register_autograd("mixhead_plugin::blockwise", _differentiate, setup_context=_save)
torch.library.register_autograd("mixhead_plugin::blockwise_backward", _no_second_derivative)
