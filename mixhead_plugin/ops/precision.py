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


def _under_autocast(device: torch.device) -> bool:
    # As above, the device "meta" has none.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def as_autocast(tensor: Tensor) -> Tensor:
    """Return what autocast makes of an argument of scaled_dot_product_attention.

    float64 stays, and so does everything outside of autocast.
    """
    if not _under_autocast(tensor.device) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def finer_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return torch.matmul of two tensors in the finer of their dtypes.

    So a part in float32 computes in float32 beside a model in bfloat16, where torch.matmul would
    refuse the two dtypes. Under autocast the dtype is autocast's.
    """
    # First, because what follows takes longer than a small product.
    if left.dtype == right.dtype:
        return torch.matmul(left, right)
    # Autocast would only round a copy in float32 again.
    # TorchScript: cannot ask for the autocast of a device. It leaves out what is inside of this
    # `if`, but would compile what is behind an `and`.
    if not torch.jit.is_scripting():  # noqa: SIM102
        if _under_autocast(left.device):
            return torch.matmul(left, right)
    dtype = torch.promote_types(left.dtype, right.dtype)
    return torch.matmul(left.to(dtype), right.to(dtype))
