"""Tell whether an nn.Linear computes with its weight and its bias, and nothing else.

Whoever multiplies something into the weight and calls F.linear goes around the module. What a tool
has put on the module, such as a hook or an adapter, would not run then. So such a shortcut asks
`is_plain` first.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

# What a plain projection is made of: a module's own tables, all empty, and two sizes. Whatever has
# more, or has any of them filled, may compute something else.
_TABLES = {
    name: table
    for name, table in vars(nn.Module()).items()
    if name not in ("training", "_parameters")
}
_ATTRIBUTES = {*vars(nn.Module()), "in_features", "out_features"}
_FORWARD = nn.Linear.forward
_CALL = nn.Linear.__call__


def is_plain(linear: Any) -> bool:
    """Return whether a call of `linear` is certainly weight times input plus bias, no more.

    LoRA tools patch `forward` or add modules, quantisation changes the weight's type, offloading
    and pruning add hooks, and so does whoever reads or changes inputs, outputs and gradients, of
    one module or of all. A mode of torch may look for the product with this weight.
    """
    # Another class, or a program that replaced methods of nn.Linear itself.
    if type(linear) is not nn.Linear:
        return False
    if nn.Linear.forward is not _FORWARD or nn.Linear.__call__ is not _CALL:
        return False
    if has_hooks_on_all_modules() or torch._C._len_torch_function_stack() > 0:
        return False

    # Own attributes, child modules, or hooks.
    state = vars(linear)
    if state.keys() != _ATTRIBUTES:
        return False
    if any(state[name] != table for name, table in _TABLES.items()):
        return False

    # Weights of a type of their own, as of quantisation.
    if linear._parameters.keys() != {"weight", "bias"}:
        return False
    return all(
        tensor is None or type(tensor) in (Tensor, nn.Parameter)
        for tensor in linear._parameters.values()
    )


def has_hooks_on_all_modules() -> bool:
    """Return whether a hook acts on the calls of every module.

    torch has a function for this, `_has_any_global_hook`, but torch 2.6 does not have it yet.
    """
    return bool(
        torch_modules._global_forward_pre_hooks
        or torch_modules._global_forward_hooks
        or torch_modules._global_backward_pre_hooks
        or torch_modules._global_backward_hooks
    )
