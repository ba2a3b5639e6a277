"""Tell whether parts change what their attention computes."""

from collections.abc import Mapping

import torch
from torch import nn

from mixhead_plugin.parts.kinds import Part


def first_part_with_effect(parts: Mapping[str, nn.Module | None]) -> str:
    """Return the name of the first part without which an attention would compute something else.

    It is an empty string if there is none.

    Args:
        parts: the parts of one attention by name; None where there is none

    Raises:
        ValueError: a part on the device meta
    """
    for name, part in parts.items():
        if part is None:
            continue
        if any(tensor.is_meta for tensor in part.state_dict().values()):
            raise ValueError(
                f"{name}: is on the device meta; must have numbers, which tell whether it has an "
                "effect"
            )
        if not _does_nothing(part):
            return name
    return ""


def _does_nothing(part: nn.Module) -> bool:
    """Return whether a part has the values with which it changes nothing."""
    if not isinstance(part, Part):
        return False
    state = part.state_dict()
    with torch.device("cpu"):  # whatever the default device is
        start = part.identity()
    if not start:  # frozen parts and the differential mixing have none
        return False
    # A parametrization, or torch's pruning, computes them from tensors of other names.
    if not start.keys() <= state.keys():
        return False
    for key, value in start.items():
        # In the dtype of the part, because float32 would take 1 + 1e-8 for 1.
        if not torch.equal(state[key].cpu(), value.to(state[key].dtype)):
            return False
    return True
