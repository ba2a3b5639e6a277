"""Refuse to save the tensors of a mixing without what is needed to load them.

`save_pretrained` writes the tensors of a whole model, but only the config of the outermost. Adapters are saved without
the tensors of their base. Neither asks the modules inside, so the two functions that write get a check in front.
"""

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from mixhead_plugin.hf.layouts import NAME
from mixhead_plugin.parts import PARTS


def watch_models() -> None:
    """Let `save_pretrained` refuse a model that was mixed inside only, whose config does not know of it."""
    if not hasattr(PreTrainedModel.save_pretrained, NAME):
        setattr(PreTrainedModel, "save_pretrained", _checked(PreTrainedModel.save_pretrained, _refuse_inner))  # noqa: B010


def watch_adapters() -> None:
    """Let PEFT refuse to save or to load an adapter without the mixing, where it is installed."""
    if not is_peft_available():
        return
    import peft
    from peft import peft_model
    from peft.utils import save_and_load

    for name, check in (
        ("get_peft_model_state_dict", _refuse_adapter),  # every way to save an adapter goes through it
        ("set_peft_model_state_dict", _refuse_unmixed),
    ):
        function = getattr(save_and_load, name)
        if not hasattr(function, NAME):
            for module in (peft, peft.utils, peft_model, save_and_load):
                setattr(module, name, _checked(function, check))


def _checked(function: Any, check: Any) -> Any:
    @functools.wraps(function)
    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        check(model, *args, **kwargs)
        return function(model, *args, **kwargs)

    setattr(checked, NAME, True)
    return checked


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the parts with tensors of all attentions that are mixed, by the name of their option."""
    for module in model.modules():
        if NAME in vars(module):
            for option in PARTS:
                part = getattr(module, option, None)
                if part is not None and part.state_dict():
                    yield option, part


def _refuse_inner(model: Any, *args: Any, **kwargs: Any) -> None:
    inside = [name for name, module in model.named_modules() if NAME in vars(module)]
    if inside and not hasattr(model.config, NAME):
        raise ValueError(
            f"{type(model).__name__}: is mixed inside alone ({inside[0]}), so its config has no entry to load it by; "
            "mix the outermost model"
        )


def _refuse_adapter(model: Any, *args: Any, **kwargs: Any) -> None:
    lost = sorted({option for option, part in _parts(model) if "_adapters" not in vars(part)})
    if lost:
        raise ValueError(
            f"adapter: must have modules_to_save={lost}, or it would lose the mixing; merge_and_unload() keeps it"
        )


def _refuse_unmixed(model: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    given = {option for name in state for option in PARTS if f".{option}." in name}
    if lost := sorted(given - {option for option, _ in _parts(model)}):
        raise ValueError(
            f"adapter: has tensors of {lost}, which its base lacks; the base must be mixed in the same way"
        )
