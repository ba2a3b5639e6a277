"""Refuse a call of `ops.attention` whose arguments do not fit together."""

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from mixhead_plugin.ops.choice import IMPLEMENTATIONS
from mixhead_plugin.ops.inputs import DIMENSIONS, AttentionInputs
from mixhead_plugin.ops.low_rank import LowRank
from mixhead_plugin.ops.normalizers import NORMALIZERS, sink_problem
from mixhead_plugin.ops.relative import RelativeScores

# What every implementation computes with.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS_IN_WORDS = "float16, bfloat16, float32 or float64"
# These have one dtype.
AS_THE_QUERY = ("query", "key", "value", "relative_query", "relative_key")


def check_are_tensors(arguments: Mapping[str, object]) -> None:
    """Refuse an argument, given by its name, that is no tensor."""
    for name, argument in arguments.items():
        if not isinstance(argument, Tensor):
            raise TypeError(f"{name} is {type(argument).__name__}: must be a tensor")


def check_relative(relative: object) -> None:
    """Refuse what is no pair of tensors that gives relative scores."""
    if relative is None:
        return
    if not isinstance(relative, RelativeScores):
        raise TypeError(
            f"relative is {type(relative).__name__}: must be ops.RelativeScores(query, key)"
        )
    # Without one of them the other would be left out in silence.
    check_are_tensors({"relative.query": relative.query, "relative.key": relative.key})


def check_mixing(mixing: object) -> None:
    """Refuse what is neither M nor all of its factors."""
    if mixing is None or isinstance(mixing, Tensor):
        return
    if not isinstance(mixing, LowRank):
        raise TypeError(
            f"mixing is {type(mixing).__name__}: must be a tensor or ops.LowRank(left, right, "
            "diagonal)"
        )
    check_are_tensors({f"mixing.{name}": each for name, each in mixing._asdict().items()})


def check_call(inputs: AttentionInputs, impl: str) -> None:
    """Refuse inputs that do not fit together, and names that are unknown.

    A tiny call takes much of its time here. So names are made readable only where something is
    wrong.

    Raises:
        ValueError, TypeError: as `attention`
    """
    _check_options(inputs, impl)
    operands = inputs.operands()
    _check_tensors(inputs, operands)
    _check_dimensions(operands)
    _check_dtypes(inputs, operands)
    _check_shapes(inputs, operands)
    _check_attn_mask(inputs)
    _check_padding_mask(inputs)


def _check_options(inputs: AttentionInputs, impl: str) -> None:
    """Refuse names that are unknown, and options that do not fit together."""
    if inputs.normalizer not in NORMALIZERS:
        raise ValueError(
            f"normalizer {inputs.normalizer!r}: must be one of {', '.join(NORMALIZERS)}"
        )
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl {impl!r}: must be one of auto, {', '.join(IMPLEMENTATIONS)}")
    if isinstance(inputs.scale, Tensor):
        raise ValueError(f"scale {inputs.scale}: must be a float, not a tensor")
    if not 0.0 <= inputs.dropout_p <= 1.0:
        raise ValueError(f"dropout_p {inputs.dropout_p}: must be a probability")
    if inputs.sink is not None:
        problem = sink_problem(inputs.normalizer)
        if problem:
            raise ValueError(f"sink: {problem}")
    factors = (inputs.mixing_left, inputs.mixing_right, inputs.mixing_diagonal)
    if inputs.mixing is not None and any(factor is not None for factor in factors):
        raise ValueError("mixing: must be M or its factors, not both; with_mixing() sets one")


def _check_tensors(inputs: AttentionInputs, operands: dict[str, Tensor]) -> None:
    """Refuse what is no dense tensor on the device of the query."""
    device = inputs.query.device
    masks = {"attn_mask": inputs.attn_mask, "key_padding_mask": inputs.key_padding_mask}
    for name, tensor in chain(operands.items(), masks.items()):
        if tensor is None:
            continue
        if tensor.is_nested:
            wanted = "must be padded, with key_padding_mask for what is no key"
            raise TypeError(f"{_shown(name)} is a nested tensor: {wanted}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{_shown(name)} is {tensor.layout}: must be dense, as by to_dense()")
        if tensor.device != device:
            raise ValueError(
                f"{_shown(name)} is on {tensor.device}: must be on {device}, as the query"
            )


def _check_dimensions(operands: dict[str, Tensor]) -> None:
    """Refuse a query, key or value that has not four dimensions."""
    for name in ("query", "key", "value"):
        shape = operands[name].shape
        if len(shape) != 4:
            raise ValueError(f"{name} {list(shape)}: must be [batch, heads, positions, head size]")


def _check_dtypes(inputs: AttentionInputs, operands: dict[str, Tensor]) -> None:
    """Refuse dtypes that no implementation computes with, and ones that differ from the query's."""
    for name, tensor in operands.items():
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{_shown(name)} is {tensor.dtype}: must be {FLOATS_IN_WORDS}")
        if name in AS_THE_QUERY and tensor.dtype != inputs.query.dtype:
            raise TypeError(
                f"{_shown(name)} is {tensor.dtype}: must be {inputs.query.dtype}, as the query"
            )


def _check_shapes(inputs: AttentionInputs, operands: dict[str, Tensor]) -> None:
    """Refuse shapes that are none of those in DIMENSIONS for the sizes of query, key and value."""
    batch, heads, n_queries, head_dim = inputs.query.shape
    n_keys = inputs.key.shape[2]
    sizes = {
        "B": batch,
        "H": heads,
        "Nq": n_queries,
        "Nk": n_keys,
        "P": max(0, n_queries + n_keys - 1),
        "D": head_dim,
        "H'": heads if inputs.mixing is None else inputs.value.shape[1],
        "Dv": inputs.value.shape[3],
    }
    if inputs.relative_query is not None:
        sizes["R"] = inputs.relative_query.shape[-1:].numel()  # 1 where there is no dimension
    if inputs.mixing_left is not None:
        sizes["rank"] = inputs.mixing_left.shape[-1:].numel()  # likewise
    for name, tensor in operands.items():
        allowed = []
        for dims in DIMENSIONS[name]:
            shape = [sizes[dim] for dim in dims]
            allowed.append(tuple(shape))
        _check_shape(name, tensor, allowed)


def _check_attn_mask(inputs: AttentionInputs) -> None:
    """Refuse an attn_mask that cannot be added to the scores [B, H, Nq, Nk]."""
    mask = inputs.attn_mask
    if mask is None:
        return
    if mask.dtype not in FLOATS:
        raise TypeError(
            f"attn_mask is {mask.dtype}: must be {FLOATS_IN_WORDS}, which is added; -inf hides a "
            "key"
        )
    full = [*inputs.query.shape[:3], inputs.key.shape[2]]
    fits = mask.dim() <= 4
    for size, wanted in zip(mask.shape[::-1], full[::-1]):  # dimensions in front may be missing
        if size not in (1, wanted):
            fits = False
    if not fits:
        raise ValueError(f"attn_mask {list(mask.shape)}: must be broadcastable to {full}")


def _check_padding_mask(inputs: AttentionInputs) -> None:
    """Refuse a key_padding_mask that is no bool [B, Nk]."""
    mask = inputs.key_padding_mask
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"key_padding_mask is {mask.dtype}: must be bool, True hides a key")
    _check_shape("key_padding_mask", mask, [(inputs.query.shape[0], inputs.key.shape[2])])


def _shown(name: str) -> str:
    """Return the name of an input as the caller of `attention` wrote it."""
    return name.replace("relative_", "relative.").replace("mixing_", "mixing.")


def _check_shape(name: str, tensor: Tensor, allowed: Sequence[tuple[int, ...]]) -> None:
    """Refuse a tensor with another shape than one of those that are allowed."""
    for shape in allowed:
        if len(shape) == tensor.dim() and tensor.shape == shape:
            return
    expected = " or ".join(str(list(shape)) for shape in allowed)
    raise ValueError(f"{_shown(name)} {list(tensor.shape)}: must be {expected}")
