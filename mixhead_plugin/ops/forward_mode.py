"""Refuse forward-mode derivatives where an implementation has none.

torch gives an operator without forward-mode derivatives a tangent of zero, silently. Only `reference` supports them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def in_forward_mode(*values: Any) -> bool:
    """Return whether any tensor among the values, or in a tuple of them, carries a tangent."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    tensors = [part for value in values for part in (value if isinstance(value, tuple) else (value,))]
    return any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def refuse_forward_mode(impl: str, *values: Any) -> None:
    """Raise NotImplementedError if any of the values carries a tangent."""
    if in_forward_mode(*values):
        raise NotImplementedError(f"impl {impl!r} has no forward-mode derivative; impl 'reference' has")
