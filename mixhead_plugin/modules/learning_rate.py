"""Scale the learning rate of some parameters, for any optimizer (mixhead section 4.3.1).

fairseq has one learning rate for all parameters. Hooks therefore multiply the change of a marked parameter after each
step. That equals a scaled learning rate for every optimizer whose step is proportional to it, such as Adam and SGD.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_FACTOR = "mixing_lr_scale"
_before: dict[int, list[tuple[nn.Parameter, Tensor]]] = {}  # by id of the optimizer whose step runs
_hooked = False


def scale_learning_rate(module: nn.Module, factor: float) -> None:
    """Multiply the learning rate of all parameters of `module` by `factor`."""
    global _hooked
    if factor == 1:
        return
    for parameter in module.parameters():
        # Under fp16 and bf16 fairseq copies this attribute to the float32 parameters that it optimizes.
        parameter.optim_overrides = {_FACTOR: factor}
    if not _hooked:
        register_optimizer_step_pre_hook(_save)
        register_optimizer_step_post_hook(_scale_change)
        _hooked = True


def _save(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # An optimizer may call another one with the same parameters: the outer one scales them.
    taken = {id(parameter) for others in _before.values() for parameter, _ in others}
    saved = _before[id(optimizer)] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            marked = _FACTOR in (getattr(parameter, "optim_overrides", None) or {})
            if marked and id(parameter) not in taken:
                saved.append((parameter, parameter.detach().clone()))


def _scale_change(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for parameter, before in _before.pop(id(optimizer), []):
        with torch.no_grad():
            parameter.copy_(before + parameter.optim_overrides[_FACTOR] * (parameter - before))
