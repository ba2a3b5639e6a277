"""The precision in which the formula is computed, whatever the dtype of the inputs."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def upcast(tensor: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 stay."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context in which operations on the device keep the dtype of their inputs."""
    # The device "meta" has no autocast, and asking torch for it is an error.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def as_autocast(tensor: Tensor) -> Tensor:
    """Return what autocast makes of an argument of scaled_dot_product_attention.

    float64 stays, and so does everything outside of autocast.
    """
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
