"""A second device that needs no hardware.

Its tensors say `meta` and hold their numbers on the CPU.

Inside of `Elsewhere()` an operation that meets tensors of both devices raises, as on a GPU.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
# torch lets these take tensors of both devices. Indices may be on the CPU, but not on a GPU for a
# tensor of the CPU.
COPIES = (aten.copy_.default, aten._to_copy.default)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class Far(Tensor):
    """A tensor that is not on the CPU."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "Far":
        sizes = dict(
            strides=numbers.stride(), storage_offset=numbers.storage_offset(), dtype=numbers.dtype
        )
        made = Tensor._make_wrapper_subclass(cls, numbers.shape, device=DEVICE, **sizes)
        made.numbers = numbers
        return made

    def tolist(self) -> Any:
        return self.numbers.tolist()

    def new(self, *arguments: Any) -> "Far":
        return Far(self.numbers.new(*arguments))

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{function}: used outside of Elsewhere()")


class Elsewhere(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        far = [tensor for tensor in tensors if isinstance(tensor, Far)]
        near = [tensor for tensor in tensors if not isinstance(tensor, Far) and tensor.dim() > 0]
        crosses = function in COPIES or (function in INDEXING and isinstance(args[0], Far))
        if far and near and not crosses:
            raise RuntimeError(
                f"{function}: tensors on {DEVICE} and on the CPU, {[list(t.shape) for t in near]}"
            )
        device = kwargs.get("device")
        if device is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        found = function(*tree_map(_numbers, args), **tree_map(_numbers, kwargs))
        # in place: the tensor that was given
        if function._schema.is_mutable and isinstance(found, Tensor):
            return args[0]
        stays = torch.device(device) == DEVICE if device is not None else bool(far)
        return tree_map(_far, found) if stays else found


def _numbers(leaf: Any) -> Any:
    return leaf.numbers if isinstance(leaf, Far) else leaf


def _far(leaf: Any) -> Any:
    return Far(leaf) if isinstance(leaf, Tensor) and not isinstance(leaf, Far) else leaf


def move(given: Any) -> Any:
    """Return a module, moved in place, or nested tensors, on the other device.

    Tensors that a module does not register stay on the CPU.
    """
    if not isinstance(given, nn.Module):
        return tree_map(_far, given)
    for module in given.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    _far(parameter.data), parameter.requires_grad
                )
        for name, buffer in module._buffers.items():
            module._buffers[name] = _far(buffer)
    return given
