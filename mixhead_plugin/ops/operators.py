"""Register an implementation as operators of torch, one for each pass.

torch.compile takes each as a whole.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from mixhead_plugin.ops.inputs import DIMENSIONS, AttentionInputs
from mixhead_plugin.ops.precision import without_autocast
from mixhead_plugin.ops.transforms import have_tangents, transformations, while_traced

_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", str: "str", bool: "bool", float: "float"}
# The fields of AttentionInputs, as arguments of an operator.
SCHEMA = ", ".join(
    f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(AttentionInputs).items()
)
_TENSORS = AttentionInputs._fields.index("normalizer")  # the number of tensors among the fields
# What a backward pass returns, a tensor for each: `is_grads_batched` of autograd serves no operator
# with lists.
LEARNED = (*DIMENSIONS, "attn_mask")
GRADIENTS = f"({', '.join(['Tensor'] * len(LEARNED))})"


def register(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Define the operator `mixhead_plugin::<name>`.

    `fake` gives the shapes and strides of its results, on the device meta, too.
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        # `ops.attention` refuses this before. A program that was compiled without tangents, and
        # gets some later, does not ask again, and its results would have no tangent.
        if have_tangents(tensors):
            raise no_derivative(name, "forward-mode derivative")
        # autocast would give some of the operations inside another dtype, and refuse stacks of both
        # half precisions
        with without_autocast(tensors[0].device):
            return function(*arguments)

    # torch.library.custom_op would load the compiler at its first call: a second and 35 MiB.
    torch.library.define(f"mixhead_plugin::{name}", schema)
    torch.library.impl(f"mixhead_plugin::{name}", "default", run)
    torch.library.register_fake(f"mixhead_plugin::{name}", fake)
    operator = getattr(torch.ops.mixhead_plugin, name)
    torch.library.register_vmap(f"mixhead_plugin::{name}", functools.partial(_one_by_one, operator))
    _COUNTED[operator] = functools.partial(_flops, schema, name.endswith("_backward"))


# how many operations each operator takes, by its arguments' shapes
_COUNTED: dict[Any, Callable[..., int]] = {}


@while_traced
def announce_flops() -> bool:
    """Tell torch's counter of FLOPs what the operators do; return whether a program uses it.

    Importing the counter with this package would import triton, which takes most of a second. So
    each call of an operator asks whether the program has imported it, and a counter that already
    counts is told, too.
    """
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return False
    for operator in _COUNTED.keys() - counter.flop_registry.keys():
        counter.register_flop_formula(operator)(_COUNTED[operator])
    for mode in _get_current_dispatch_mode_stack():
        counting = getattr(getattr(mode, "counter", mode), "flop_registry", {})
        counting.update({operator: counter.flop_registry[operator] for operator in _COUNTED})
    return True


def no_derivative(name: str, kind: str) -> NotImplementedError:
    """Return the refusal of a derivative by the operator `name`."""
    return NotImplementedError(
        f"impl {name.removesuffix('_backward')!r} has no {kind}; impl 'reference' has"
    )


def _one_by_one(
    operator: Callable[..., Any], info: Any, dims: Sequence[int | None], *arguments: Any
) -> Any:
    """Call the operator for each sample, under torch.vmap and for gradients of several outputs."""
    samples = []
    for sample in range(info.batch_size):
        taken = [x if dim is None else x.select(dim, sample) for x, dim in zip(arguments, dims)]
        samples.append(operator(*taken))
    if isinstance(samples[0], Tensor):
        return torch.stack(samples), 0
    stacked = tuple(torch.stack(results) for results in zip(*samples))
    return stacked, (0,) * len(stacked)


def _flops(schema: str, backward: bool, *shapes: Any, out_shape: Any = None, **_: Any) -> int:
    """Return the operations of the products of matrices.

    There are 2 for each multiplication, as torch counts its own attention.

    Hidden keys count. The backward pass computes the weights again, and then two products for each
    one of the forward pass, but the product with the values is not computed again.
    """
    names = [argument.split()[-1] for argument in schema[1 : schema.index(")")].split(", ")]
    given = dict(zip(names, shapes))
    batch, heads, n_queries, head_dim = given["query"]
    mixed_heads, n_keys, value_dim = given["value"][1:]

    pairs = 2 * batch * n_queries * n_keys
    weights = pairs * heads * head_dim
    if given["mixing"] is not None:
        weights += pairs * heads * mixed_heads
    if given["mixing_left"] is not None:
        rank = given["mixing_left"][-1]
        weights += 2 * pairs * heads * rank
    if given["score_mixing"] is not None:
        weights += pairs * heads * heads
    if given["relative_query"] is not None:
        distances, size = given["relative_key"][1:]
        weights += 2 * batch * heads * n_queries * distances * size
    values = pairs * mixed_heads * value_dim
    return 3 * weights + 2 * values if backward else weights + values


def all_gradients(found: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients in the order of LEARNED; an empty tensor if one was not asked for."""
    return tuple(found[name] if name in found else like.new_empty(0) for name in LEARNED)


def by_field(gradients: Sequence[Tensor], names: Iterable[str]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the fields of AttentionInputs, from those of LEARNED.

    None for all but `names`.
    """
    found = dict(zip(LEARNED, gradients))
    asked = set(names)
    return tuple(found[field] if field in asked else None for field in AttentionInputs._fields)


def register_backward(
    impl: str, save: Callable[..., None], differentiate: Callable[..., Any]
) -> None:
    """Give `impl` a derivative, and its operator `<impl>_backward` none."""

    def first_derivative(ctx: Any, *d_outputs: Any) -> Any:
        if "Grad" in transformations():
            raise no_derivative(impl, "second derivative")
        return differentiate(ctx, *d_outputs)

    def no_second_derivative(ctx: Any, *d_grads: Any) -> None:
        raise no_derivative(impl, "second derivative")

    torch.library.register_autograd(f"mixhead_plugin::{impl}", first_derivative, setup_context=save)
    torch.library.register_autograd(f"mixhead_plugin::{impl}_backward", no_second_derivative)


def save_inputs(ctx: Any, inputs: tuple[Any, ...], *more: Any) -> None:
    """Save the fields of `inputs` and more tensors for the backward pass."""
    ctx.save_for_backward(*inputs[:_TENSORS], *more)
    ctx.options = inputs[_TENSORS:]


def saved_inputs(ctx: Any) -> tuple[Any, ...]:
    """Return the saved inputs as AttentionInputs, and after them the other saved tensors."""
    # read once: activation checkpointing computes them here and returns them once
    saved = ctx.saved_tensors
    return AttentionInputs(*saved[:_TENSORS], *ctx.options), *saved[_TENSORS:]


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Return memory for [B, H', Nq, Dv] in the memory order of `query`.

    So reshaping it needs no copy.
    """
    shape = [query.shape[0], value.shape[1], query.shape[2], value.shape[3]]
    strides, extent = [0] * 4, 1
    for dim in sorted(range(4), key=query.stride):
        strides[dim] = extent
        extent = extent * shape[dim]
    # Not a permuted view: autograd refuses in-place operations on an output that is one.
    return query.new_empty_strided(shape, strides)
