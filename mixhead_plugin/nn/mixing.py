"""Mix the heads of any torch model, take the mixing away again, and load a mixed model."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.errors import warn_caller
from mixhead_plugin.nn import example as examples
from mixhead_plugin.nn import multihead, sdpa
from mixhead_plugin.nn.attention import MixedAttention
from mixhead_plugin.nn.example import Example, Seen, Sizes, same_random_numbers
from mixhead_plugin.ops.api import FLOATS
from mixhead_plugin.parts import PARTS, Assembly, Variant, check_any_given, place_parts, record

# Keywords for an attention that projects its input itself, as `MixedAttention` does.
OF_PROJECTIONS = ("head_dim", "value_head_dim", "relative_position", "relative_gain", "causal")
# Keywords that do not fit an attention to other keys than its own.
OF_SELF_ATTENTION = ("causal", "relative_gain", "relative_position")


def mix(
    model: nn.Module,
    head_mixing: str | None = None,
    *,
    example: Example | None = None,
    impl: str = "auto",
    **variant: Any,
) -> nn.Module:
    """Mix the heads of every attention of `model`, in place, and return it.

    A trained mixing starts as the identity, so the outputs stay. Every `nn.MultiheadAttention`
    becomes a `MixedAttention`. With an `example`, every module that calls
    `F.scaled_dot_product_attention` is mixed, too. Weights, hooks, mode and what is frozen stay.
    Make the optimizer afterwards, because the parameters of the mixing are new.

    A warning names attentions that stay as they are: of the same class as a mixed one, but not
    reached by the example; computed by another function, such as `F.multi_head_attention_forward`;
    or without an example, those whose code calls `F.scaled_dot_product_attention`.

    Args:
        model: any module; a model of transformers belongs to `mixhead_plugin.hf.mix`
        head_mixing: where M comes from, as in `Variant`; None for another field alone
        example: a tuple of arguments, a dict of keywords, or a function that takes the model. It
            runs once, without gradients; afterwards the model is as before. None for a model of
            `nn.MultiheadAttention` alone
        impl: the implementation of `ops.attention`
        variant: other fields of `Variant`, and `causal` of `MixedAttention`; those in
            OF_PROJECTIONS are for `nn.MultiheadAttention` alone

    Raises:
        ValueError: an unknown value, nothing that is asked for, no attention, or one that cannot be
            mixed, with its name and the reason. The model is as before.
    """
    asked = dict(variant)
    if head_mixing is not None:
        asked["head_mixing"] = head_mixing
    check_any_given(asked)
    refuse_mixed(model)

    seen = Seen({}, {}) if example is None else examples.run(model, example)
    # A `MixedAttention` that was built by hand may call the function, too, and stays.
    calling = {m: sizes for m, sizes in seen.calling.items() if not isinstance(m, Assembly)}
    of_torch = [
        module
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) and module not in calling
    ]
    if not of_torch and not calling:
        raise ValueError(_nothing_found(model, example))
    if of_torch:
        check_of_torch(model, of_torch, asked)
    if calling:
        check_calling(model, calling, asked)

    # All are built before the first change, because one of them may be refused.
    keywords = {**asked, "impl": impl}
    with same_random_numbers(model.parameters()):
        replaced = {module: multihead.mixed_of(module, keywords) for module in of_torch}
    mixed = {}
    if calling:
        fields = Variant.of(keywords)
        for module, sizes in calling.items():
            mixed[module] = sdpa.MixedSdpa(name_of(model, module), fields, sizes)
    put(model, replaced)
    attach_all(model, mixed)
    warn_of_others(model, mixed, seen.others)
    if example is None:
        warn_of_callers(model)
    return model


def name_of(model: nn.Module, module: nn.Module) -> str:
    """Return the name of a module in the model; of the model itself, that of its class."""
    for name, other in model.named_modules():
        if other is module and name:
            return name
    return type(module).__name__


def refuse_mixed(model: nn.Module) -> None:
    for module in model.modules():
        if sdpa.is_mixed(module):
            raise ValueError(f"{name_of(model, module)}: is mixed already; must be unmixed first")


def _nothing_found(model: nn.Module, example: Example | None) -> str:
    """Return why a model has nothing to mix, and what would help."""
    class_name = type(model).__name__
    if any(of_transformers(module) for module in model.modules()):
        return f"{class_name}: is a model of transformers, must be mixed by mixhead_plugin.hf.mix"
    if example is None:
        return (
            f"{class_name}: has no nn.MultiheadAttention inside; if it calls "
            "F.scaled_dot_product_attention, an example must be given, as example=(x,)"
        )
    return (
        f"{class_name}: the example reached no call of F.scaled_dot_product_attention, and there "
        "is no nn.MultiheadAttention inside; must have one of them"
    )


def of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a whole model of transformers, which need not be installed."""
    return any(
        cls.__name__ == "PreTrainedModel" and cls.__module__.startswith("transformers.")
        for cls in type(module).__mro__
    )


def check_of_torch(
    model: nn.Module, of_torch: list[nn.MultiheadAttention], asked: Mapping[str, Any]
) -> None:
    """Raise ValueError if an `nn.MultiheadAttention` cannot be replaced."""
    for module in of_torch:
        if module is model:
            raise ValueError(
                f"{type(model).__name__}: must be inside of a model, where a MixedAttention can "
                "take its place"
            )
        if type(module) is not nn.MultiheadAttention:
            raise ValueError(
                f"{name_of(model, module)}: is a {type(module).__name__}, must be exactly "
                "nn.MultiheadAttention, or call F.scaled_dot_product_attention and be reached by "
                "an example"
            )
        _refuse_changed(model, module)
    _refuse_tied(model, of_torch)
    if not any(isinstance(module, nn.TransformerDecoderLayer) for module in model.modules()):
        return
    for name in OF_SELF_ATTENTION:
        if asked.get(name, 0) not in (0, "none"):
            raise ValueError(
                f"{name}: must not be given where there is cross-attention, only for self-attention"
            )


def _refuse_changed(model: nn.Module, module: nn.MultiheadAttention) -> None:
    """Raise ValueError if a tool has changed an attention, which would be lost."""
    changed = multihead.problem_of(module)
    if changed:
        raise ValueError(
            f"{name_of(model, module)}: {changed}, which a tool has put there; must be mixed before"
        )


def _refuse_tied(
    model: nn.Module, attentions: Sequence[nn.MultiheadAttention | MixedAttention]
) -> None:
    """Raise ValueError if a parameter that is copied belongs to another module, too."""
    copied: set[int] = set()
    for attention in attentions:
        copied.update(id(parameter) for parameter in multihead.copied_of(attention))
    owners: dict[int, str] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            other = owners.setdefault(id(parameter), name)
            if other != name and id(parameter) in copied:
                raise ValueError(
                    f"{name}: is {other}, too; each attention must have its own parameters"
                )


def _refuse_kept(model: nn.Module, old: Iterable[nn.Module]) -> None:
    """Raise ValueError if something goes on with a module that is replaced, and not with the new.

    So does the wrapper that `torch.compile(attention)` is, whoever has put the module into a list
    of Python, and whoever keeps one of its methods.
    """
    names = {id(module): name_of(model, module) for module in old}
    for path, module in model.named_modules():
        if id(module._modules.get("_orig_mod")) in names:
            raise ValueError(
                f"{path or 'the model'}: is compiled, and its graph would go on with the former "
                "attention; must be compiled afterwards"
            )
        for attribute, value in vars(module).items():
            # Its children find the new one. What a replaced module has is replaced with it.
            if attribute == "_modules" or id(module) in names:
                continue
            for kept in _inside(value):
                if isinstance(kept, functools.partial):
                    kept = kept.func
                owner = kept.__self__ if isinstance(kept, MethodType) else kept
                if id(owner) in names:
                    place = f"{path}.{attribute}" if path else attribute
                    raise ValueError(
                        f"{names[id(owner)]}: is kept as {place}, too, which would go on without "
                        "the change; must not be kept there"
                    )


def _inside(value: Any) -> list[Any]:
    """Return what an attribute holds: itself, or the elements of containers, however deep."""
    leaves = []
    waiting = [value]
    seen = set()  # a list may contain itself
    while waiting:
        held = waiting.pop()
        if isinstance(held, (Mapping, list, tuple, set)):
            if id(held) not in seen:
                seen.add(id(held))
                waiting.extend(held.values() if isinstance(held, Mapping) else held)
        else:
            leaves.append(held)
    return leaves


def check_calling(
    model: nn.Module, calling: Mapping[nn.Module, Sizes], asked: Mapping[str, Any]
) -> None:
    """Raise ValueError if a module that calls scaled_dot_product_attention cannot be mixed."""
    for name in OF_PROJECTIONS:
        if name in asked:
            raise ValueError(
                f"{name}: must be left out, a module that calls scaled_dot_product_attention has "
                "its own"
            )
    variant = Variant.of(asked)
    if "query" in variant.part_kinds()["feature_mixing"].parameters:
        raise ValueError(
            f"feature_mixing {variant.feature_mixing}: acts on projections, which a module that "
            "calls scaled_dot_product_attention does not show; must be none or output"
        )
    for module, sizes in calling.items():
        _refuse_of_transformers(model, module)
        _refuse_nested(model, module, calling)
        _refuse_taken(model, module)
        _refuse_unknown_input(model, module, sizes, variant)


def _refuse_of_transformers(model: nn.Module, module: nn.Module) -> None:
    for name, other in model.named_modules():
        if of_transformers(other) and module in set(other.modules()):
            raise ValueError(
                f"{name or type(model).__name__}: is a model of transformers, must be mixed by "
                "mixhead_plugin.hf.mix, which saves and loads it"
            )


def _refuse_nested(model: nn.Module, module: nn.Module, calling: Mapping[nn.Module, Sizes]) -> None:
    """Raise ValueError if a module inside computes attention, too.

    Its call would be taken for that of the module around it.
    """
    for inner in module.modules():
        attends = inner in calling or isinstance(inner, (nn.MultiheadAttention, Assembly))
        if inner is not module and attends:
            raise ValueError(
                f"{name_of(model, module)}: calls scaled_dot_product_attention, and so does "
                f"{name_of(model, inner)} inside of it; must be beside each other"
            )


def _refuse_taken(model: nn.Module, module: nn.Module) -> None:
    """Raise ValueError if a name that the mixing needs is there already."""
    name = name_of(model, module)
    if "forward" in vars(module):
        raise ValueError(
            f"{name}: has a forward of its own, which a tool has put there; must be mixed before"
        )
    for taken in (sdpa.ATTRIBUTE, *PARTS):
        if hasattr(module, taken):
            raise ValueError(f"{name}.{taken}: is an attribute, must be free for the mixing")


def _refuse_unknown_input(
    model: nn.Module, module: nn.Module, sizes: Sizes, variant: Variant
) -> None:
    """Raise ValueError if a part reads the input of the queries, and the example shows none."""
    reader = sdpa.reads_input(variant)
    if reader and sizes.embed_dim is None:
        raise ValueError(
            f"{reader} {getattr(variant, reader)}: reads the input of the queries; so the first "
            f"argument of {name_of(model, module)} must be it, [batch, positions, features], with "
            "another number of positions than of examples in the batch"
        )


def put(model: nn.Module, new: Mapping[Any, nn.Module]) -> None:
    """Put new modules in the place of old ones, wherever they are in the model.

    Raises:
        ValueError: something keeps an old one. Nothing was changed yet.
    """
    _refuse_kept(model, new)
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in new:
            model.set_submodule(name, new[module])


def attach_all(model: nn.Module, mixed: Mapping[nn.Module, sdpa.MixedSdpa]) -> None:
    """Mix modules that call scaled_dot_product_attention."""
    likes = {module: _like(model, module) for module in mixed}  # before they get parameters of ours
    place_parts((module, what, likes[module]) for module, what in mixed.items())
    for module, what in mixed.items():
        sdpa.attach(module, what)


def _like(model: nn.Module, module: nn.Module) -> Tensor:
    """Return a tensor with the device and the type of floats that parts in a module should have.

    It is the module's first parameter, or that of the nearest module around it: some modules
    compute the attention alone, and have no parameters.
    """
    path = name_of(model, module).split(".") if module is not model else []
    for length in range(len(path), -1, -1):
        around = model.get_submodule(".".join(path[:length]))
        for parameter in around.parameters():
            if parameter.dtype in FLOATS:
                return parameter
    return torch.empty(())


def warn_of_others(
    model: nn.Module, mixed: Mapping[nn.Module, object], others: Mapping[nn.Module, str]
) -> None:
    """Warn of attentions that the example has shown to be there, and that stay as they are."""
    classes = {getattr(type(module), "_mixhead_class", None) for module in mixed}
    missed = [
        name_of(model, module)
        for module in model.modules()
        if type(module) in classes and module not in mixed
    ]
    if missed:
        warn_caller(
            f"{type(model).__name__}: was mixed without {', '.join(missed)}; the example did not "
            "call them",
        )
    by_function: dict[str, list[str]] = {}
    for module, function in others.items():
        if not isinstance(module, (nn.MultiheadAttention, Assembly)):
            by_function.setdefault(function, []).append(name_of(model, module))
    for function, names in by_function.items():
        warn_caller(
            f"{type(model).__name__}: was mixed without {', '.join(names)}, which call {function}",
        )


def warn_of_callers(model: nn.Module) -> None:
    """Warn of modules that call scaled_dot_product_attention, as far as their code shows it."""
    names = []
    for name, module in model.named_modules():
        if not isinstance(module, Assembly) and names_the_function(type(module)):
            names.append(name or type(module).__name__)
    if names:
        warn_caller(
            f"{type(model).__name__}: was mixed without {', '.join(names)}, which call "
            "F.scaled_dot_product_attention; an example must be given to mix them",
        )


def names_the_function(cls: type) -> bool:
    """Return whether a method of a class, none of torch's own, names the function."""
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for method in vars(base).values():
            code = getattr(method, "__code__", None)
            if code is not None and "scaled_dot_product_attention" in code.co_names:
                return True
    return False


def unmix(model: nn.Module) -> nn.Module:
    """Remove the mixing of `model`, in place, and return it with the same outputs.

    Modules that call scaled_dot_product_attention get their class back, and every `MixedAttention`
    becomes an `nn.MultiheadAttention`.

    Args:
        model: what `mix` returned, or a model with `MixedAttention` inside

    Raises:
        ValueError: no mixing, or one without which the outputs would change. The model is as
            before.
    """
    calling = [module for module in model.modules() if sdpa.is_mixed(module)]
    ours = [module for module in model.modules() if isinstance(module, MixedAttention)]
    if not calling and not ours:
        raise ValueError(f"{type(model).__name__}: has no mixing, must be mixed")
    if model in ours:
        raise ValueError(
            f"{type(model).__name__}: must be inside of a model, where an nn.MultiheadAttention "
            "can take its place"
        )
    for attention in ours:
        _refuse_loss(model, attention, multihead.lost_without(attention))
        changed = multihead.problem_of_mixed(attention)
        if changed:
            raise ValueError(
                f"{name_of(model, attention)}: {changed}; must be as nn.MultiheadAttention knows it"
            )
    _refuse_tied(model, ours)
    for module in calling:
        _refuse_loss(model, module, vars(module)[sdpa.ATTRIBUTE].lost_without(module))
        if not sdpa.has_own_class(module):
            raise ValueError(
                f"{name_of(model, module)}: another tool has changed its class; must be unmixed "
                "after that is undone"
            )
    with same_random_numbers(model.parameters()):
        plain = {attention: multihead.plain_of(attention) for attention in ours}
    put(model, plain)
    for module in calling:
        sdpa.detach(module)
    return model


def _refuse_loss(model: nn.Module, module: nn.Module, lost: str) -> None:
    if lost:
        raise ValueError(
            f"{name_of(model, module)}: without {lost} its outputs would change; must stay mixed"
        )


def load(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    head_mixing: str | None = None,
    *,
    example: Example | None = None,
    impl: str = "auto",
    **variant: Any,
) -> nn.Module:
    """Mix a model that was built anew as a state dict tells, load it, and return the model.

    The metadata of a state dict tell which modules were mixed, and how. Files of safetensors keep
    none, and neither does a copy of the dict; then the arguments of `mix` must be given.

    Args:
        model: as it was before it was mixed, or mixed in the same way
        state_dict: of the mixed model, from `model.state_dict()`
        head_mixing: as in `mix`; None for what the metadata tell
        example: as in `mix`; None where the metadata tell which modules were mixed
        impl: the implementation of `ops.attention`
        variant: as in `mix`; what the metadata tell may be left out

    Raises:
        ValueError: a state dict that does not tell how to mix, or tells something else than the
            arguments; modules that the model lacks
        RuntimeError: tensors that are missing or have no place, as `load_state_dict` raises
    """
    asked = dict(variant)
    if head_mixing is not None:
        asked["head_mixing"] = head_mixing
    saved = record.entries(state_dict)
    if saved:
        _check_saved(saved, asked)
        _mix_as_saved(model, saved, impl)
    elif asked:
        mix(model, example=example, impl=impl, **asked)
    else:
        raise ValueError(_not_told(state_dict))
    model.load_state_dict(state_dict)
    return model


def _not_told(state_dict: Mapping[str, Any]) -> str:
    """Return why a state dict without metadata cannot be loaded."""
    parts = [name for name in state_dict if not {*PARTS}.isdisjoint(name.split("."))]
    if not parts:
        return "state_dict: has no mixing, must be loaded by load_state_dict"
    return (
        f"state_dict: has {parts[0]}, but no metadata of the mixing, as in a file of safetensors "
        "or in a copy of the dict; the arguments of mix must be given, too"
    )


def _check_saved(saved: Mapping[str, dict[str, Any]], asked: Mapping[str, Any]) -> None:
    """Raise ValueError if the arguments ask for something else than the metadata tell."""
    for name, entry in saved.items():
        told = {**entry, **entry["variant"]}
        for field, value in asked.items():
            if field in told and told[field] != value:
                raise ValueError(
                    f"{field} {value}: must be {told[field]}, as in the state dict, at "
                    f"{name or 'the model'}"
                )


def _mix_as_saved(model: nn.Module, saved: Mapping[str, dict[str, Any]], impl: str) -> None:
    """Mix the modules that the metadata name, as far as they are not mixed yet."""
    modules = dict(model.named_modules(remove_duplicate=False))
    new: dict[Any, nn.Module] = {}
    mixed = {}
    for name, entry in saved.items():
        if name not in modules:
            raise ValueError(f"{name}: is mixed in the state dict, must be in the model, too")
        module = modules[name]
        if sdpa.is_mixed(module) or isinstance(module, MixedAttention):
            continue  # `load_state_dict` compares them
        variant = dict(entry["variant"])
        numbers = {field: entry[field] for field in entry if field != "variant"}
        calls = numbers.pop("calls", None)
        if calls == record.CALLS_INTERFACE:
            raise ValueError(
                f"{name}: is of a model of transformers, must be loaded by mixhead_plugin.hf.load"
            )
        if calls == record.CALLS_SDPA:
            fields = Variant.of({**variant, "impl": impl})
            mixed[module] = sdpa.MixedSdpa(name or type(model).__name__, fields, Sizes(**numbers))
        elif type(module) is nn.MultiheadAttention and module is not model:
            _refuse_changed(model, module)
            keywords = {**variant, "causal": numbers["causal"], "impl": impl}
            with same_random_numbers(module.parameters()):
                new[module] = multihead.mixed_of(module, keywords)
        else:
            raise ValueError(
                f"{name or 'the model'}: is a {type(module).__name__}, must be an "
                "nn.MultiheadAttention inside of a model, as before it was mixed"
            )
    _refuse_tied(model, [module for module in modules.values() if module in new])
    put(model, new)
    attach_all(model, mixed)
