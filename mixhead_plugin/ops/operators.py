"""Register an implementation as operators of torch, one for each pass; torch.compile takes each as a whole."""

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs

_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", bool: "bool", float: "float"}
# The fields of AttentionInputs, as arguments of an operator.
SCHEMA = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(AttentionInputs).items())
_TENSORS = AttentionInputs._fields.index("normalizer")  # the number of tensors among the fields


def register(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `mixhead_plugin::<name>`; `fake` gives shapes and strides of its results, on the device meta too."""
    # torch.library.custom_op would load the compiler at its first call: a second and 35 MiB.
    torch.library.define(f"mixhead_plugin::{name}", schema)
    torch.library.impl(f"mixhead_plugin::{name}", "default", function)
    torch.library.register_fake(f"mixhead_plugin::{name}", fake)


def register_backward(impl: str, save: Callable[..., None], differentiate: Callable[..., Any]) -> None:
    """Give `impl` a derivative, and its operator `<impl>_backward` none."""

    def no_second_derivative(ctx: Any, *d_grads: Any) -> None:
        raise NotImplementedError(f"impl {impl!r} has no second derivative; impl 'reference' has")

    torch.library.register_autograd(f"mixhead_plugin::{impl}", differentiate, setup_context=save)
    torch.library.register_autograd(f"mixhead_plugin::{impl}_backward", no_second_derivative)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], *more: Any) -> None:
    """Save the fields of `inputs` and more tensors for the backward pass."""
    ctx.save_for_backward(*inputs[:_TENSORS], *more)
    ctx.options = inputs[_TENSORS:]


def saved_inputs(ctx: Any) -> tuple[Any, ...]:
    """Return the saved inputs as AttentionInputs, and after them the other saved tensors."""
    saved = ctx.saved_tensors  # read once: activation checkpointing computes them here and returns them once
    return AttentionInputs(*saved[:_TENSORS], *ctx.options), *saved[_TENSORS:]


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Return memory for [B, H', Nq, Dv] in the memory order of `query`, so that reshaping it needs no copy."""
    order = sorted(range(4), key=query.stride, reverse=True)
    shape = [query.shape[0], value.shape[1], query.shape[2], value.shape[3]]
    return query.new_empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
