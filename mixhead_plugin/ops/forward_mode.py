"""Refuse forward-mode derivatives where an implementation has none.

torch gives an operator without forward-mode derivatives a tangent of zero, silently. Only `reference` supports them.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mixhead_plugin.ops.inputs import AttentionInputs


def in_forward_mode(inputs: AttentionInputs) -> bool:
    """Return whether any tensor of the inputs carries a tangent."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in inputs)


def refuse_forward_mode(impl: str, inputs: AttentionInputs) -> None:
    """Raise NotImplementedError if any tensor of the inputs carries a tangent."""
    if in_forward_mode(inputs):
        raise NotImplementedError(f"impl {impl!r} has no forward-mode derivative; impl 'reference' has")
