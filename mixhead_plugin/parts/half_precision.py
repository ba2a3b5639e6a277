"""Keep parts in float32 beside a model in half precision, which would not move or would round them.

Such a part computes in float32, and what it gives to the model is in half precision again.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.errors import warn_caller
from mixhead_plugin.parts.parameters import (
    is_of_a_part,
    mixing_parameters,
    name_in_attention,
    part_of,
    tensors_of_parts,
)

HALF = (torch.bfloat16, torch.float16)


def warn_of_half_precision(model: nn.Module) -> None:
    """Warn if parameters of parts hold a 1 in half precision, as M on its diagonal.

    In bfloat16 the next number below 1 is 0.996. So a step of 0.001, as AdamW takes with this
    learning rate, rounds back to 1, and so do all that follow. What starts at 0 does move, because
    the numbers near 0 are close together.

    Args:
        model: its parts are new
    """
    for dtype in HALF:
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


def keep_float32(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Make tensors of parts float32 that were saved so beside a model in half precision.

    A loaded tensor takes the dtype of the model's own, which would round it. Where the whole
    model was saved in float32, half precision is what the caller asks for, and its parts get it.

    Args:
        model: has the parts; what they hold will be replaced
        saved: the tensors to be loaded, or their shapes on the device meta. Their names may begin
            in another way than those of the model, as where the encoder alone is loaded. What is no
            tensor, as the extra state of a module, is left out
    """
    parts: dict[str, list[Tensor]] = {}  # by what a tensor is called in its attention
    for name, tensor in tensors_of_parts(model).items():
        parts.setdefault(name_in_attention(name), []).append(tensor)

    in_float32 = set()
    was_half = False
    for name, tensor in saved.items():
        if not isinstance(tensor, Tensor):
            continue
        name_of_part = name_in_attention(name) if is_of_a_part(name) else ""
        if name_of_part not in parts:
            was_half = was_half or tensor.dtype in HALF
        elif tensor.dtype in (torch.float32, torch.float64):
            in_float32.add(name_of_part)
    if not was_half:
        return

    for name_of_part in in_float32:
        for tensor in parts[name_of_part]:
            if tensor.dtype in HALF:
                tensor.data = tensor.data.float()
