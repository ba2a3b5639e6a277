"""Warn of parts that a training in half precision would not move."""

import torch
from torch import nn

from mixhead_plugin.errors import warn_caller
from mixhead_plugin.parts.parameters import mixing_parameters, part_of


def warn_of_half_precision(model: nn.Module) -> None:
    """Warn if parameters of parts hold a 1 in half precision, as M on its diagonal.

    In bfloat16 the next number below 1 is 0.996. So a step of 0.001, as AdamW takes with this
    learning rate, rounds back to 1, and so do all that follow. What starts at 0 does move, because
    the numbers near 0 are close together.

    Args:
        model: its parts are new
    """
    for dtype in (torch.bfloat16, torch.float16):
        parts = []
        for name, parameter in mixing_parameters(model).items():
            # On the device meta there are no numbers yet: they will be loaded.
            if parameter.dtype != dtype or parameter.is_meta:
                continue
            if part_of(name) not in parts and (parameter == 1).any():
                parts.append(part_of(name))
        if parts:
            lost = torch.finfo(dtype).eps / 4  # half the distance from 1 to the number below it
            warn_caller(
                f"{type(model).__name__}: was mixed in {dtype}, where steps below {lost:.1g}, as "
                f"AdamW usually takes, do not move the 1s of {', '.join(parts)}; to train it, make "
                "the model in float32 and use torch.autocast, or make only "
                "mixing_parameters(model) float32"
            )
