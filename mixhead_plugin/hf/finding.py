"""Find the attentions of a model of `transformers`."""

import functools
import inspect
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mixhead_plugin.hf.layouts import (
    LAYOUTS,
    ROLES,
    USUAL,
    FoundAttention,
    check_rows,
    is_projection,
    several,
)

# The name that all files of transformers give to the AttentionInterface.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"
# The function of torch by which other modules attend.
TORCH_FUNCTION = "scaled_dot_product_attention"


def find_attentions(model: nn.Module) -> list[FoundAttention]:
    """Return the attentions of a model in its order.

    Raise ValueError if there are none, one lacks what its row names, or a row is none.
    """
    check_rows()
    attentions = []
    for name, module in model.named_modules():
        attention = _attention(model, name, module)
        if attention is not None:
            attentions.append(attention)
    if not attentions and not any(isinstance(each, PreTrainedModel) for each in model.modules()):
        raise ValueError(
            f"{type(model).__name__}: is no model of transformers; the functions of "
            "mixhead_plugin.nn take other models of torch"
        )
    if not attentions:
        raise ValueError(
            f"{type(model).__name__}: has no attention that goes through the AttentionInterface "
            "and whose projections are known; for other names of projections, hf.LAYOUTS needs a "
            "row (docs/huggingface.md)"
        )
    return attentions


def _attention(model: nn.Module, name: str, module: nn.Module) -> FoundAttention | None:
    """Return a module as an attention; None if it is none, or its projections are not known."""
    class_name = type(module).__name__
    row = LAYOUTS.get(class_name, USUAL)
    if row is None:
        return None  # the user wants the class to stay as it is
    is_listed = class_name in LAYOUTS
    if not is_listed and not calls_the_interface(module):
        return None

    paths = {}
    for role in (*ROLES, "output"):
        paths[role] = _path(model, name, several(getattr(row, role)))
    attention = FoundAttention(name, module, row, paths)

    lacks = attention.lacks(model)
    if not lacks:
        return attention
    if not is_listed:
        return None
    # A wrapper of an older version may have the name of a row, but none of its projections.
    if not calls_the_interface(module) and not is_projection(model, paths["queries"]):
        return None
    raise ValueError(f"{class_name}: does not fit its row of hf.LAYOUTS, it has {lacks}")


def _path(model: nn.Module, attention: str, names: Sequence[str]) -> str:
    """Return the name in the model of the first of some projections that an attention has."""
    paths = []
    for name in names:
        if name.startswith(".."):  # in the module around
            around = attention.rpartition(".")[0]
            paths.append(f"{around}.{name[2:]}".lstrip("."))
        else:
            paths.append(f"{attention}.{name}".lstrip("."))
    return next((path for path in paths if is_projection(model, path)), paths[0])


def left_out(model: nn.Module, found: Sequence[FoundAttention]) -> dict[str, list[str]]:
    """Return the names of attentions that are not among those found, by their class.

    Other towers of a model may have attentions whose projections are not known.
    """
    names_of: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        # A BertAttention is around a BertSelfAttention, which was found.
        related = any(is_inside(each.name, name) or is_inside(name, each.name) for each in found)
        weights = [getattr(child, "weight", None) for child in module.children()]
        has_projections = any(isinstance(w, torch.Tensor) and w.dim() == 2 for w in weights)
        if has_projections and not related and _is_named_or_computes_attention(module):
            names_of.setdefault(type(module).__name__, []).append(name)
    return names_of


def calls_the_interface(module: nn.Module) -> bool:
    """Return whether an attention goes through the AttentionInterface: its code names it.

    Whole models name it, too, because they choose it; they are no attentions.
    """
    return not isinstance(module, PreTrainedModel) and interface_of(module) is not None


def interface_of(module: nn.Module) -> AttentionInterface | None:
    """Return the table of attention functions that the code of a module names; None for none.

    A file may have one of its own, as that of Doge.
    """
    cls: Any = type(module)
    return _interface_of(cls)


@functools.cache
def _interface_of(cls: Any) -> AttentionInterface | None:
    for function in _functions_of(cls):
        if INTERFACE in function.__code__.co_names:
            # Not there if the function imports it itself.
            return function.__globals__.get(INTERFACE, ALL_ATTENTION_FUNCTIONS)
    return None


def _functions_of(cls: Any) -> Iterator[FunctionType]:
    """Yield the functions in a class and its bases, without what is wrapped around them."""
    for base in cls.__mro__:
        for method in vars(base).values():
            if inspect.isfunction(method):
                yield inspect.unwrap(method)


def _is_named_or_computes_attention(module: nn.Module) -> bool:
    """Return whether a module is an attention by its name, or by the function of torch it calls."""
    cls: Any = type(module)
    if cls.__name__.endswith("Attention"):
        return True
    return any(TORCH_FUNCTION in each.__code__.co_names for each in _functions_of(cls))


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is another one, or inside of it.

    Args:
        name: the name of the module in the model
        outer: the name of the other one; "" for the model itself
    """
    return outer in ("", name) or name.startswith(f"{outer}.")
