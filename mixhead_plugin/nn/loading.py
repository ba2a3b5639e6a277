"""Load the state dict of a mixed model into one that is mixed in the same way."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.nn import sdpa
from mixhead_plugin.nn.attention import MixedAttention
from mixhead_plugin.nn.example import CallSizes, Example
from mixhead_plugin.nn.mixing import Plan, asked_for, carry_out, mix_as_asked
from mixhead_plugin.nn.refusals import (
    check_module,
    refuse_changed,
    refuse_host,
    refuse_tied,
)
from mixhead_plugin.parts import OPTIONS, HostedAttention, Variant, keep_float32, record
from mixhead_plugin.parts.parameters import is_of_a_part

# What the names in a state dict begin with if it is that of a wrapper around the model.
_WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DistributedDataParallel"}


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

    A mixing that was saved in float32 beside a model in half precision stays in float32.

    Args:
        model: as it was before it was mixed; or mixed in the same way, if there are metadata
        state_dict: what `model.state_dict()` of the mixed model returned
        head_mixing: what `mix` was given; None for what the metadata tell
        example: what `mix` was given; None where the metadata tell which modules were mixed
        impl: which code computes the attention: "auto", "reference", "blockwise" or "triton"
        variant: as in `mix`; what the metadata tell may be left out

    Raises:
        ValueError: what is no state dict of a model alone; one that does not tell how to mix, or
            tells something else than the arguments; modules that the model lacks
        RuntimeError: tensors that are missing or have no place, as `load_state_dict` raises. The
            model is mixed then, and has got the tensors that fit. Another state dict may be loaded
            into it, by `load` if it has metadata, and by `load_state_dict` else.
    """
    check_module(model)
    asked = asked_for(head_mixing, variant)
    _check_state_dict(model, state_dict)
    saved = record.entries(state_dict)
    if saved:
        _check_saved(saved, asked)
        carry_out(model, _plan_as_saved(model, saved, impl))
    elif _has_nothing_left_to_mix(model):
        raise ValueError(
            "state_dict: has no metadata of a mixing, and the model is mixed already; must be "
            "loaded by load_state_dict"
        )
    elif asked:
        mix_as_asked(model, asked, example, impl)
    else:
        raise ValueError(_not_told(model, state_dict))
    keep_float32(model, state_dict)
    model.load_state_dict(state_dict)
    return model


def _check_state_dict(model: nn.Module, state_dict: object) -> None:
    """Raise ValueError for what is no state dict, or for one whose names are those around a model.

    A program often saves more than the model, or saves it as `torch.compile` has wrapped it.
    """
    if not isinstance(state_dict, Mapping):
        wanted = "a dict of tensors, as model.state_dict() or torch.load(file) returns"
        raise ValueError(wrong_argument("state_dict", state_dict, wanted))
    if not _holds_tensors(state_dict):
        for name, value in state_dict.items():
            # That of an optimizer is a dict, too, but its tensors lie deeper.
            if _holds_tensors(value):
                raise ValueError(
                    f"state_dict: has no tensors, but a dict of tensors as {name!r}; must be that "
                    f"dict alone, state_dict[{name!r}]"
                )
    for prefix, wrapper in _WRAPPERS.items():
        is_inside = all(name.startswith(prefix) for name in state_dict)
        if state_dict and is_inside and not hasattr(model, prefix.removesuffix(".")):
            raise ValueError(
                f"state_dict: all its names begin with {prefix} of {wrapper}; must be without, as "
                "after torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "
                f"{prefix!r})"
            )


def _holds_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(each, Tensor) for each in value.values())


def _not_told(model: nn.Module, state_dict: Mapping[str, Any]) -> str:
    """Return why a state dict without metadata cannot be loaded."""
    own = model.state_dict()
    # What the model has itself, too, tells nothing, whatever its name is.
    others = [name for name in state_dict if name not in own]
    of_parts = [name for name in others if is_of_a_part(name)]
    # Every `MixedAttention` has a q_proj, also one without parts.
    projections = [name for name in others if name.endswith("q_proj.weight")]
    telling = of_parts + projections
    if telling:
        return (
            f"state_dict: has {telling[0]}, but no metadata of the mixing, as in a file of "
            "safetensors or in a copy of the dict; the arguments of mix must be given, too"
        )
    return (
        "state_dict: has no metadata of a mixing; the arguments of mix must be given, or, for a "
        "model that is plain or mixed already, load_state_dict must be used"
    )


def _check_saved(saved: Mapping[str, dict[str, Any]], asked: Mapping[str, Any]) -> None:
    """Raise ValueError if the arguments ask for something else than the metadata tell."""
    told_of = {}
    for name, entry in saved.items():
        told_of[name] = {**record.DEFAULTS, **entry, **entry["variant"]}
    for field, value in asked.items():
        if field in OPTIONS and not OPTIONS[field].in_record:
            continue
        # `causal` is told of a `MixedAttention` alone.
        if not any(field in told for told in told_of.values()):
            raise ValueError(
                f"{field} {value}: must be left out, no module of the state dict was mixed with it"
            )
        for name, told in told_of.items():
            if field in told and told[field] != value:
                raise ValueError(
                    f"{field} {value}: must be {told[field]}, as in the state dict, at "
                    f"{name or 'the model'}"
                )


def _plan_as_saved(model: nn.Module, saved: Mapping[str, dict[str, Any]], impl: str) -> Plan:
    """Return how to mix the modules that the metadata name, as far as they are not mixed yet.

    Raise ValueError if one of them cannot be mixed as it was.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    of_torch: dict[nn.MultiheadAttention, dict[str, Any]] = {}
    calling: dict[nn.Module, sdpa.MixedSdpa] = {}
    for name, entry in saved.items():
        if name not in modules:
            raise ValueError(f"{name}: is mixed in the state dict, must be in the model, too")
        module = modules[name]
        if _is_mixed(module):
            continue  # `load_state_dict` compares them
        calls = entry.get("calls")
        if calls == record.CALLS_INTERFACE:
            raise ValueError(
                f"{name}: is of a model of transformers, must be mixed by mixhead_plugin.hf.mix "
                "before"
            )

        keywords = {**entry["variant"], "impl": impl}
        if calls == record.CALLS_SDPA:
            refuse_host(model, module)
            sizes = CallSizes(**{field: entry[field] for field in CallSizes._fields})
            variant = Variant.of(keywords)
            calling[module] = sdpa.MixedSdpa(name or type(model).__name__, variant, sizes)
        elif type(module) is nn.MultiheadAttention and module is not model:
            refuse_changed(model, module)
            of_torch[module] = {**keywords, "causal": entry["causal"]}
        else:
            raise ValueError(
                f"{name or 'the model'}: is a {type(module).__name__}, must be an "
                "nn.MultiheadAttention inside of a model, as before it was mixed"
            )
    refuse_tied(model, list(of_torch))
    return Plan(of_torch, calling)


def _has_nothing_left_to_mix(model: nn.Module) -> bool:
    """Return whether `mix` has mixed a model already.

    A model that is built with `MixedAttention` may have other attentions, which can still be mixed.
    """
    modules = list(model.modules())
    if any(sdpa.is_mixed(module) for module in modules):
        return True
    has_torchs = any(isinstance(module, nn.MultiheadAttention) for module in modules)
    return not has_torchs and any(isinstance(module, MixedAttention) for module in modules)


def _is_mixed(module: nn.Module) -> bool:
    """Return whether a module is mixed, by this door or by that of transformers."""
    # `hf.mix` notes what it has added under the same name.
    is_hosted = isinstance(vars(module).get(sdpa.ATTRIBUTE), HostedAttention)
    return is_hosted or isinstance(module, MixedAttention)
