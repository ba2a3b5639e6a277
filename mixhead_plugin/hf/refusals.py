"""Refuse to change a model whose weights or attentions are not in its own hands."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.hf.finding import interface_of
from mixhead_plugin.hf.layouts import FoundAttention

SPLIT = "heads that are split between processes, as by tp_plan, cannot be mixed"


def check_module(model: object) -> None:
    """Raise ValueError for what is no module, such as the name of a model."""
    if not isinstance(model, nn.Module):
        raise ValueError(wrong_argument("model", model, "a model of transformers"))


def check_model(model: object) -> None:
    """Raise ValueError for a module around a model of transformers, or for a layer of one.

    It has no config to read. PEFT and `torch.compile` wrap a model so that it keeps its methods.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "can_generate"):
        raise ValueError(wrong_argument("model", model, "a model of transformers"))


def refuse_adapters(model: nn.Module, what: str) -> None:
    """Raise ValueError if PEFT has changed modules, or is around the model.

    Args:
        model: any model
        what: what has to be done when, as "mixed before they are added"
    """
    inside = any(hasattr(module, "base_layer") for module in model.modules())
    if inside or hasattr(model, "peft_type"):
        raise ValueError(f"{type(model).__name__}: has adapters; must be {what}")


def refuse_offloaded(model: nn.Module, what: str) -> None:
    """Raise ValueError if weights are elsewhere between the calls; a change of them would be lost.

    They are on the device meta then, as they are while `from_pretrained` makes a model, but a hook
    brings them back.

    Args:
        model: any model
        what: what has to be done before, as "mixed"
    """
    for name, module in model.named_modules():
        if hasattr(module, "_hf_hook") and any(weight.is_meta for weight in module.parameters()):
            where = name or type(module).__name__
            raise ValueError(
                f"{type(model).__name__}: {where} is offloaded; must be {what} before it is "
                "offloaded"
            )


def refuse_quantised(model: nn.Module, attentions: Sequence[FoundAttention], what: str) -> None:
    """Raise ValueError if projections keep no weights of floats.

    `mix` follows their dtype, and `fold` and `prune` change them.

    Args:
        model: the model that has the attentions
        attentions: those that are changed
        what: what has to be done before, as "mixed"
    """
    for path, projection in _projections(model, attentions):
        weight: Any = getattr(projection, "weight", None)
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            raise ValueError(
                f"{type(model).__name__}: {path} is quantised; must be {what} before it is "
                "quantised"
            )


def refuse_computed(model: nn.Module, attentions: Sequence[FoundAttention], what: str) -> None:
    """Raise ValueError if weights are computed anew in each call, as by weight_norm.

    A change of them would be lost in the next call.

    Args:
        model: the model that has the attentions
        attentions: those that are changed
        what: what has to be done before, as "folded"
    """
    for path, projection in _projections(model, attentions):
        for name in ("weight", "bias"):
            tensor = getattr(projection, name)
            if tensor is not None and not isinstance(tensor, nn.Parameter):
                raise ValueError(
                    f"{type(model).__name__}: {path}.{name} is computed in each call, as by "
                    f"weight_norm; must be {what} before that is added"
                )


def _projections(
    model: nn.Module, attentions: Sequence[FoundAttention]
) -> Iterator[tuple[str, Any]]:
    """Yield the path and the module of each projection of some attentions."""
    for attention in attentions:
        for path in (*attention.packed(), attention.paths["output"]):
            yield path, model.get_submodule(path)


def refuse_compiled(model: nn.Module, attentions: Sequence[FoundAttention]) -> None:
    """Raise ValueError if a projection is compiled alone.

    Its graph would not see the hook of the mixing, because torch does not look for new hooks.
    """
    for attention in attentions:
        for path in attention.packed():
            projection: Any = model.get_submodule(path)
            if hasattr(projection, "_orig_mod") or projection._compiled_call_impl is not None:
                raise ValueError(
                    f"{type(model).__name__}: {path} is compiled; must be mixed before it is "
                    "compiled"
                )


def refuse_shared_weights(
    model: nn.Module, attentions: Sequence[FoundAttention], what: str
) -> None:
    """Raise ValueError if a change of the weights of an attention would change another one, too.

    Args:
        model: the model that has the attentions
        attentions: those that are changed
        what: what cannot be done then, as "folded"
    """
    _refuse_shared(model, attentions, ("queries", "keys", "values", "output"), "weight", what)


def refuse_shared_outputs(model: nn.Module, attentions: Sequence[FoundAttention]) -> None:
    """Raise ValueError if attentions share an output projection, which silences heads."""
    _refuse_shared(model, attentions, ("output",), "", "silenced or weighed")


def _refuse_shared(
    model: nn.Module,
    attentions: Sequence[FoundAttention],
    roles: Sequence[str],
    entry: str,
    what: str,
) -> None:
    """Raise ValueError if two attentions share a projection, or a tensor of it.

    Args:
        model: the model that has the attentions
        attentions: those that are changed
        roles: which of their projections, fields of Layout
        entry: the name of a tensor in them; empty for the whole projection
        what: what cannot be done then
    """
    owners: dict[int, tuple[str, str]] = {}  # the attention and the path of each
    for attention in attentions:
        for role in roles:
            path = attention.paths[role]
            projection: Any = model.get_submodule(path)
            shared = getattr(projection, entry, None) if entry else projection
            if shared is None:
                continue
            owner, other = owners.setdefault(id(shared), (attention.name, path))
            if owner != attention.name:
                raise ValueError(
                    f"{type(model).__name__}: {path} and {other} are one; each attention must have "
                    f"its own to be {what}"
                )


def refuse_split(model: nn.Module) -> None:
    """Raise ValueError if heads are split between processes."""
    if getattr(model, "_tp_size", None) is not None:
        raise ValueError(f"{type(model).__name__}: is split by tp_plan; {SPLIT}")


def refuse_own_forward(attentions: Iterable[FoundAttention]) -> None:
    """Raise ValueError if another tool computes an attention, so that `mix` cannot try it."""
    for attention in attentions:
        if "forward" in vars(attention.module):
            raise ValueError(
                f"{attention.name}: has a forward of its own, as device_map and accelerate put "
                "there; must be mixed before"
            )


def refuse_own_functions(attention: FoundAttention) -> None:
    """Raise ValueError if an attention is computed, or masked, by a function that a user has made.

    Ours, and eager of transformers, compute what the functions of transformers compute. What
    another one adds, as a bias or a mask of its own, would be lost.
    """
    config = getattr(attention.module, "config", None)
    name = getattr(config, "_attn_implementation", None)
    if name is None:
        return
    interface = interface_of(attention.module) or ALL_ATTENTION_FUNCTIONS
    computing = interface.get(name)
    # Each class has an eager attention in its own file, unless somebody has registered another.
    if not (computing is None and name == "eager") and not _is_of_transformers(computing):
        raise ValueError(_not_of_transformers(attention, "attention", name))
    if not _is_of_transformers(ALL_MASK_ATTENTION_FUNCTIONS.get(name)):
        raise ValueError(_not_of_transformers(attention, "mask", name))


def _is_of_transformers(function: Any) -> bool:
    """Return whether a function was written in a file of transformers.

    Not by its `__module__`, which `functools.wraps` copies to a function around it.
    """
    written_in = getattr(function, "__globals__", {}).get("__name__", "")
    return written_in.startswith("transformers.")


def _not_of_transformers(attention: FoundAttention, what: str, name: str) -> str:
    return (
        f"{attention.class_name}: its {what} function {name} is not one of transformers, and would "
        "be lost; model.set_attn_implementation must choose one that is, such as sdpa"
    )
