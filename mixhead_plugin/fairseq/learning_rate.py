"""Scale the learning rate of some parameters, for any optimizer (mixhead section 4.3.1).

Hooks of the optimizer multiply the change of a marked parameter after each step. That equals a
scaled learning rate for every optimizer whose step is proportional to it, such as Adam and SGD.
fairseq's trainer calls `scale_steps`, see `fairseq/hooks.py`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError, option_name

_FACTOR = "mixing_lr_scale"


def mark_learning_rate(module: nn.Module, factor: float) -> None:
    """Mark all parameters of `module`, so that `scale_steps` multiplies their learning rate.

    Args:
        module: a part of a model
        factor: multiplies the learning rate; 1 marks nothing
    """
    if factor == 1:
        return
    for parameter in module.parameters():
        # Under fp16 and bf16 fairseq copies this attribute to the float32 parameters that it
        # optimizes.
        parameter.optim_overrides = {_FACTOR: factor}  # type: ignore[attr-defined]


def check_optimizer(cfg: Any) -> None:
    """Refuse --mixing-lr-scale in a training that would not keep it.

    Args:
        cfg: the whole config of the training; the model's flags alone do not tell

    Raises:
        OptionError: if the optimizer does not step each parameter as far as it is told
    """
    factor = getattr(cfg.model, _FACTOR, None)  # fairseq's own models have none
    if factor is None or float(factor) == 1:
        return
    problem = _optimizer_problem(cfg)
    if problem:
        raise OptionError(f"--mixing-lr-scale {float(factor)}: {problem}")


def _optimizer_problem(cfg: Any) -> str:
    """Return why the optimizer cannot step some parameters less far; empty if it can."""
    # These two round small steps to 0.
    for name in ("memory_efficient_fp16", "memory_efficient_bf16"):
        if cfg.common[name]:
            return f"must be 1 with {option_name(name)}"
    if cfg.common.fp16 and not cfg.common.fp16_no_flatten_grads:
        return "with --fp16 needs --fp16-no-flatten-grads, which keeps the parameters apart"
    # These two rearrange the parameters.
    if cfg.distributed_training.zero_sharding == "os":
        return "must be 1 with --zero-sharding os"
    if getattr(cfg.optimizer, "_name", None) == "composite":
        return "must be 1 with --optimizer composite"
    return ""


def scale_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let every step of `optimizer` move the marked parameters by their factor."""
    factors: dict[nn.Parameter, float] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            marks = getattr(parameter, "optim_overrides", None) or {}
            if _FACTOR in marks:
                factors[parameter] = marks[_FACTOR]
    before: dict[nn.Parameter, Tensor] = {}  # the values before a step

    def save(*call: Any) -> None:
        for parameter in factors:
            before[parameter] = parameter.detach().clone()

    def scale_change(*call: Any) -> None:
        with torch.no_grad():
            for parameter, factor in factors.items():
                old = before.pop(parameter)
                parameter.copy_(old + factor * (parameter - old))

    if factors:
        optimizer.register_step_pre_hook(save)
        optimizer.register_step_post_hook(scale_change)
