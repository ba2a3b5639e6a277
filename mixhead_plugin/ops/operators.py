"""Register an implementation as two operators of torch, one for each pass.

torch.compile takes an operator as a whole, so nothing in an implementation has to be traceable.
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
_TENSOR_COUNT = AttentionInputs._fields.index("normalizer")  # the tensors come first
# The inputs that may have a gradient. A backward pass returns a tensor for each, and no list of
# tensors, because autograd's `is_grads_batched` serves no operator with lists.
DIFFERENTIABLE = (*DIMENSIONS, "attn_mask")
GRADIENTS = f"({', '.join(['Tensor'] * len(DIFFERENTIABLE))})"


def register(
    name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Define the operator `mixhead_plugin::<name>`.

    Args:
        name: name of the operator
        schema: its arguments and results, as torch writes them
        function: computes the results
        fake: gives tensors with the shapes and strides of the results, on the device meta, too
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        # `ops.attention` refuses this before; but a program that was compiled for tensors without
        # tangents skips its checks. The results would have no tangent.
        if have_tangents(tensors):
            raise no_derivative(name, "forward-mode derivative")
        # autocast would give some of the operations inside another dtype, and refuse stacks of both
        # half precisions.
        with without_autocast(tensors[0].device):
            return function(*arguments)

    # torch.library.custom_op would load the compiler at its first call: a second and 35 MiB.
    torch.library.define(f"mixhead_plugin::{name}", schema)
    torch.library.impl(f"mixhead_plugin::{name}", "default", run)  # for all devices
    torch.library.register_fake(f"mixhead_plugin::{name}", fake)
    operator = getattr(torch.ops.mixhead_plugin, name)
    torch.library.register_vmap(f"mixhead_plugin::{name}", functools.partial(_one_by_one, operator))
    _COUNTED[operator] = functools.partial(_flops, schema, name.endswith("_backward"))


# How many operations each operator takes, by its arguments' shapes.
_COUNTED: dict[Any, Callable[..., int]] = {}


@while_traced
def announce_flops() -> None:
    """Tell torch's counter of FLOPs what the operators do, if the program uses it.

    Importing the counter with this package would import triton, which takes most of a second. So
    each call of an operator asks whether the program has imported it, and a counter that already
    counts is told, too.
    """
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    for operator in _COUNTED.keys() - counter.flop_registry.keys():
        counter.register_flop_formula(operator)(_COUNTED[operator])
    # A counter copies the registry when it begins. In some versions of torch the active mode is the
    # counter, in others it has one.
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is None:  # another kind of mode
            continue
        for operator in _COUNTED:
            registry[operator] = counter.flop_registry[operator]


def no_derivative(name: str, kind: str) -> NotImplementedError:
    """Return the refusal of a derivative by the operator `name`."""
    return NotImplementedError(
        f"impl {name.removesuffix('_backward')!r} has no {kind}; impl 'reference' has"
    )


def _one_by_one(
    operator: Callable[..., Any], info: Any, dims: Sequence[int | None], *arguments: Any
) -> Any:
    """Call the operator for each sample, under torch.vmap and for gradients of several outputs.

    Args:
        operator: the operator
        info: what torch.vmap tells: the number of samples
        dims: the dimension of the samples in each argument; None where all have the same argument
        arguments: arguments of the operator

    Returns:
        the stacked results, and the dimension of the samples in each
    """
    samples = []
    for sample in range(info.batch_size):
        own = []
        for argument, dim in zip(arguments, dims):
            own.append(argument if dim is None else argument.select(dim, sample))
        samples.append(operator(*own))
    if isinstance(samples[0], Tensor):
        return torch.stack(samples), 0
    stacked = tuple(torch.stack(results) for results in zip(*samples))
    return stacked, (0,) * len(stacked)


def _flops(schema: str, backward: bool, *shapes: Any, out_shape: Any = None, **_: Any) -> int:
    """Return the operations of the products of matrices, 2 for each multiplication.

    So torch counts its own attention. Hidden keys and frozen tensors count. The backward pass
    computes the weights again, and then two products for each one of the forward pass, but the
    product with the values is not computed again.

    Args:
        schema: arguments and results, such as "(Tensor query, Tensor key, ...) -> Tensor"
        backward: whether it is that of the backward pass
        shapes: shapes of the arguments; None for those that are not given
        out_shape: shapes of the results, which torch's counter passes
    """
    arguments = schema[1 : schema.index(")")].split(", ")
    names = [argument.split()[-1] for argument in arguments]  # "Tensor query" -> "query"
    given = dict(zip(names, shapes))
    batch, heads, n_queries, head_dim = given["query"]
    mixed_heads, n_keys, value_dim = given["value"][1:]

    pairs = 2 * batch * n_queries * n_keys
    for_weights = pairs * heads * head_dim
    if given["mixing"] is not None:
        for_weights += pairs * heads * mixed_heads
    if given["mixing_left"] is not None:
        rank = given["mixing_left"][-1]
        for_weights += 2 * pairs * heads * rank
    if given["score_mixing"] is not None:
        for_weights += pairs * heads * heads
    if given["relative_query"] is not None:
        distances, size = given["relative_key"][1:]
        for_weights += 2 * batch * heads * n_queries * distances * size
    for_outputs = pairs * mixed_heads * value_dim
    if not backward:
        return for_weights + for_outputs
    # Two products for each one of the forward pass, and the weights once more.
    return 3 * for_weights + 2 * for_outputs


def all_gradients(found: Mapping[str, Tensor], like: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients in the order of DIFFERENTIABLE.

    One that was not asked for is an empty tensor.
    """
    ordered = []
    for name in DIFFERENTIABLE:
        ordered.append(found[name] if name in found else like.new_empty(0))
    return tuple(ordered)


def by_field(gradients: Sequence[Tensor], names: Iterable[str]) -> tuple[Tensor | None, ...]:
    """Return the gradients of the fields of AttentionInputs, as autograd wants them.

    Args:
        gradients: in the order of DIFFERENTIABLE
        names: names of those that were asked for; all other fields have None
    """
    found = dict(zip(DIFFERENTIABLE, gradients))
    asked = set(names)
    return tuple(found[field] if field in asked else None for field in AttentionInputs._fields)


def register_backward(
    impl: str, save: Callable[..., None], differentiate: Callable[..., Any]
) -> None:
    """Give `impl` a derivative, and its operator `<impl>_backward` none.

    Args:
        impl: the name of an operator
        save: a function like the `setup_context` of an autograd.Function
        differentiate: a function like its `backward`
    """

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
    ctx.save_for_backward(*inputs[:_TENSOR_COUNT], *more)
    ctx.options = inputs[_TENSOR_COUNT:]


def saved_inputs(ctx: Any) -> tuple[Any, ...]:
    """Return the saved inputs as AttentionInputs, and after them the other saved tensors."""
    # Read once: with activation checkpointing, reading computes the saved tensors, and a second
    # reading is an error.
    saved = ctx.saved_tensors
    return AttentionInputs(*saved[:_TENSOR_COUNT], *ctx.options), *saved[_TENSOR_COUNT:]


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """Return memory for [B, H', Nq, Dv], with its dimensions in the order of the query's memory.

    A module splits the heads of [N, B, H * D] or [B, N, H * D] by a view. In this order it joins
    them again without a copy.
    """
    shape = [query.shape[0], value.shape[1], query.shape[2], value.shape[3]]
    strides = [0] * 4
    extent = 1  # numbers in memory that the dimensions so far take
    for dim in sorted(range(4), key=query.stride):
        strides[dim] = extent
        extent = extent * shape[dim]
    # Not a permuted view: autograd refuses in-place operations on an output that is one.
    return query.new_empty_strided(shape, strides)
