"""A learning rate of their own for some parameters, whatever the optimizer (mixhead section 4.3.1).

fairseq has one learning rate for all parameters. What an optimizer does to a marked parameter in one step is therefore
multiplied afterwards: for every optimizer whose step is proportional to its learning rate, Adam and SGD alike, that is
the same as a learning rate multiplied by the factor, and the stored parameter remains the one that acts.
"""

from typing import Any, Iterator, List, Tuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_FACTOR = "mixing_lr_scale"
_before: "dict[int, List[Tuple[nn.Parameter, Tensor]]]" = {}  # by id of the optimizer that is stepping
_hooked = False


def scale_learning_rate(module: nn.Module, factor: float) -> None:
    """Multiply the learning rate of all parameters of `module` by `factor`."""
    global _hooked
    if factor == 1:
        return
    for parameter in module.parameters():
        # fairseq hands this attribute, and few others, on to the float32 copies that it optimizes under fp16 and bf16
        parameter.optim_overrides = {_FACTOR: factor}
    if not _hooked:
        register_optimizer_step_pre_hook(_remember)
        register_optimizer_step_post_hook(_stretch)
        _hooked = True


def _marked(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if _FACTOR in (getattr(parameter, "optim_overrides", None) or {}):
                yield parameter


def _remember(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # An optimizer may step another one around the same parameters: the outermost stretches.
    taken = {id(parameter) for others in _before.values() for parameter, _ in others}
    _before[id(optimizer)] = [(p, p.detach().clone()) for p in _marked(optimizer) if id(p) not in taken]


def _stretch(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for parameter, before in _before.pop(id(optimizer), []):
        with torch.no_grad():
            parameter.copy_(before + parameter.optim_overrides[_FACTOR] * (parameter - before))
