"""Guard adapters of PEFT: they keep the mixing of their base, and tell of it.

Adapters are saved without the tensors of their base, and without its config. So an adapter whose
file would lack tensors of a mixing is refused, and adapter_config.json gets an entry with the
variant of the base. Whoever loads such an adapter on another base is refused.
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from mixhead_plugin.hf.attention_hooks import mixed_heads_of
from mixhead_plugin.hf.layouts import MIXHEAD
from mixhead_plugin.parts import PART_NAMES, Assembly, Variant, part_of, record


def guard_adapters() -> None:
    """Check adapters that are saved and loaded, where PEFT is installed."""
    if not is_peft_available():
        return
    try:
        from peft import PeftModel
        from peft.config import PeftConfigMixin
        from peft.utils import save_and_load
    except ImportError:  # of another version of torch, so nobody can use it
        return
    if hasattr(PeftConfigMixin.to_dict, MIXHEAD):
        return

    # Every way to save an adapter goes through the first one, and PEFT's to load it through the
    # second one.
    _replace_everywhere(save_and_load.get_peft_model_state_dict, _refuse_to_lose_tensors)
    _replace_everywhere(save_and_load.set_peft_model_state_dict, _refuse_adapter_of_another_base)

    # adapter_config.json is made by `to_dict`, and read by `from_peft_type`.
    config: Any = PeftConfigMixin
    config.to_dict = _writing_entry(config.to_dict)
    config.from_peft_type = classmethod(_reading_entry(config.from_peft_type.__func__))

    # Before PEFT puts the layers of an adapter into a base, where they would stay after a refusal.
    adapted: Any = PeftModel
    adapted.from_pretrained = classmethod(_checking_base(adapted.from_pretrained.__func__))
    adapted.load_adapter = _checking_base_of_more(adapted.load_adapter)

    # transformers loads adapters without the two functions of PEFT above.
    model: Any = PreTrainedModel
    model.load_adapter = _checking_adapters(model.load_adapter)


def _replace_everywhere(function: Any, check: Any) -> None:
    """Put a check in front of a function, also where a module has imported it by its name."""

    @functools.wraps(function)
    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        check(model, *args, **kwargs)
        return function(model, *args, **kwargs)

    for module in list(sys.modules.values()):
        # a copy, because names are set on the way
        names = dict(getattr(module, "__dict__", {}))
        for name, value in names.items():
            if value is function:
                setattr(module, name, checked)


def _writing_entry(to_dict: Any) -> Any:
    """Return a `to_dict` that has the entry of a config, so that adapter_config.json has it."""

    @functools.wraps(to_dict)
    def to_dict_with_entry(config: Any) -> dict[str, Any]:
        fields = to_dict(config)
        entry = vars(config).get(MIXHEAD)
        return fields if entry is None else {**fields, MIXHEAD: entry}

    setattr(to_dict_with_entry, MIXHEAD, True)
    return to_dict_with_entry


def _reading_entry(from_peft_type: Any) -> Any:
    """Return a `from_peft_type` whose config has the entry; PEFT would drop it with a warning."""

    @functools.wraps(from_peft_type)
    def from_peft_type_with_entry(cls: Any, **kwargs: Any) -> Any:
        entry = kwargs.pop(MIXHEAD, None)
        config = from_peft_type(cls, **kwargs)
        if entry is not None:
            vars(config)[MIXHEAD] = entry
        return config

    return from_peft_type_with_entry


def _checking_base(from_pretrained: Any) -> Any:
    """Return a `PeftModel.from_pretrained` that refuses another base before it changes it."""
    signature = inspect.signature(from_pretrained)

    @functools.wraps(from_pretrained)
    def from_pretrained_checked(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        config = given.get("config")
        if config is None:
            config = _config_in(given["model_id"], kwargs)
        _refuse_other_base(given["model"], config)
        return from_pretrained(*args, **kwargs)

    return from_pretrained_checked


def _checking_base_of_more(load_adapter: Any) -> Any:
    """Return a `PeftModel.load_adapter` that refuses another base before it changes it."""

    @functools.wraps(load_adapter)
    def load_adapter_checked(
        model: Any, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        if adapter_name not in model.peft_config:  # else its config is known, and was checked
            _refuse_other_base(model, _config_in(model_id, kwargs))
        return load_adapter(model, model_id, adapter_name, *args, **kwargs)

    return load_adapter_checked


def _config_in(folder: Any, settings: dict[str, Any]) -> Any:
    """Return the config of an adapter.

    Args:
        folder: a folder, or a name on the hub
        settings: the arguments of the call that loads it, which say where on the hub
    """
    from peft import PeftConfig

    own = ("subfolder", "revision", "cache_dir", "token")
    where = {name: settings[name] for name in own if settings.get(name) is not None}
    return PeftConfig.from_pretrained(folder, **where)


def _checking_adapters(load_adapter: Any) -> Any:
    """Return a `load_adapter` of transformers that refuses adapters of another base."""

    @functools.wraps(load_adapter)
    def load_checked_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse_tensors(model, kwargs.get("adapter_state_dict") or {})
        before = {*getattr(model, "peft_config", {})}
        result = load_adapter(model, *args, **kwargs)
        try:
            for config in model.peft_config.values():
                _refuse_other_base(model, config)
        except ValueError:
            for name in {*model.peft_config} - before:
                model.delete_adapter(name)
            raise
        return result

    return load_checked_adapter


def _mixed_modules(model: nn.Module) -> Iterator[tuple[nn.Module, Variant]]:
    """Yield what holds the parts of a mixed attention, of any door, and what it is mixed by."""
    for module in model.modules():
        mixed = mixed_heads_of(module)
        if mixed is not None:
            yield module, mixed.variant
        elif isinstance(module, Assembly):  # it holds its parts itself, as a `MixedAttention`
            yield module, module.variant


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts of all mixed attentions that have tensors, by the name of their option."""
    for module, _ in _mixed_modules(model):
        for name in PART_NAMES:
            part = getattr(module, name, None)
            if isinstance(part, nn.Module) and part.state_dict():
                yield name, part


def _variant_of(model: nn.Module) -> dict[str, Any] | None:
    """Return the fields of what a model is mixed by; None if it computes what it did before."""
    for _, variant in _mixed_modules(model):
        fields = record.fields_of(variant)
        # the model's own, and towers may differ
        fields["head_dim"] = None
        fields["value_head_dim"] = None
        if fields != record.fields_of(Variant()):
            return fields
    return None


def _refuse_to_lose_tensors(
    model: Any, state_dict: Any = None, adapter_name: str = "default", **settings: Any
) -> None:
    """Refuse to save an adapter without tensors of a mixing; let its config tell of the base."""
    lost = any("_adapters" not in vars(part) for _, part in _parts(model))
    config = model.peft_config[adapter_name]
    if lost:
        needed = sorted({option for option, _ in _parts(model)})
        problem = f"adapter: must have modules_to_save={needed}, or it would lose the mixing"
        # Prompts cannot be merged, and beside modules_to_save few kinds of adapters can.
        if not config.is_prompt_learning and not getattr(config, "modules_to_save", None):
            problem += "; merge_and_unload() keeps it, where PEFT can merge this kind of adapter"
        raise ValueError(problem)

    # Of this base: somebody may have saved an adapter of another base with the same config.
    vars(config).pop(MIXHEAD, None)
    entry = _variant_of(model)
    if entry is not None:
        vars(config)[MIXHEAD] = entry


def _refuse_adapter_of_another_base(
    model: Any, state: dict[str, Any], adapter_name: str = "default", **settings: Any
) -> None:
    """Refuse an adapter of mixed heads on a base that is not mixed in the same way."""
    _refuse_tensors(model, state)
    _refuse_other_base(model, model.peft_config[adapter_name])


def _refuse_tensors(model: Any, state: dict[str, Any]) -> None:
    """Raise ValueError if an adapter has tensors of a mixing that its base lacks."""
    # The base may have been mixed by `mixhead_plugin.nn`, too.
    own = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    in_adapter = {part_of(name) for name in state} - {""}
    in_base = {part_of(name) for name in own}
    lost = sorted(in_adapter - in_base)
    if lost:
        raise ValueError(
            f"adapter: has tensors of {lost}, which its base lacks; the base must be mixed in the "
            "same way"
        )


def _refuse_other_base(model: Any, config: Any) -> None:
    """Raise ValueError if an adapter was trained on a base of another variant."""
    entry = vars(config).get(MIXHEAD)
    if entry is None:
        return  # of a plain base, or older
    own = _variant_of(model) or record.fields_of(Variant())
    for name, value in entry.items():
        if own.get(name) != value:
            raise ValueError(
                f"adapter: was trained on a base with {name} {value}, this one has "
                f"{own.get(name)}; the base must be mixed in the same way"
            )
