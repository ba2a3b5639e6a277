"""Scale the learning rate of some parameters, for any optimizer (mixhead section 4.3.1).

Hooks of the optimizer multiply the change of a marked parameter after each step. That equals a
scaled learning rate for every optimizer whose step is proportional to it, such as Adam and SGD.
fairseq's trainer calls `scale_steps`, see `fairseq/repairs/learning_rate.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn

_FACTOR = "mixing_lr_scale"


def scale_learning_rate(module: nn.Module, factor: float) -> None:
    """Mark all parameters of `module`: `scale_steps` will multiply their learning rate
    by `factor`.
    """
    if factor == 1:
        return
    for parameter in module.parameters():
        # Under fp16 and bf16 fairseq copies this attribute to the float32 parameters that it
        # optimizes.
        parameter.optim_overrides = {_FACTOR: factor}


def scale_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let every step of `optimizer` move the marked parameters by their factor."""
    before: list[tuple[nn.Parameter, Tensor]] = []

    def save(*call: Any) -> None:
        before[:] = [(parameter, parameter.detach().clone()) for parameter in marked]

    def scale_change(*call: Any) -> None:
        with torch.no_grad():
            for parameter, old in before:
                parameter.copy_(old + parameter.optim_overrides[_FACTOR] * (parameter - old))

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    marked = [p for p in parameters if _FACTOR in (getattr(p, "optim_overrides", None) or {})]
    if marked:
        optimizer.register_step_pre_hook(save)
        optimizer.register_step_post_hook(scale_change)
