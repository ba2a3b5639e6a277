"""Tell whether torch transforms, traces or exports the call that is running."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def while_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the compiler call a function while it traces the caller, and take its answer as constant.

    `torch.compiler.assume_constant_result` does the same, but would load the compiler: two seconds
    at every import.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# The compiler guards the stack of transformations: a program compiled under one does not run under
# another.
@while_traced
def transformations() -> str:
    """Return the names of the active ones, separated by spaces; empty for none.

    The names are Grad, Jvp (forward mode of any kind), Vmap and Functionalize.
    """
    stack = torch._C._functorch.get_interpreter_stack()
    if not stack and forward_ad._current_level < 0:  # as nearly always
        return ""
    names = {interpreter.key().name for interpreter in stack or ()}
    if forward_ad._current_level >= 0:
        names.add("Jvp")
    return " ".join(sorted(names))


def have_tangents(tensors: Iterable[object]) -> bool:
    """Return whether a tensor carries a tangent of forward mode."""
    if forward_ad._current_level < 0:
        return False
    return any(
        isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )


def unserved(tensors: Iterable[object]) -> str:
    """Return which derivative our operators lack under the active transformations; empty for none.

    An operator of torch needs rules of its own for these transformations, and ours have none.

    Args:
        tensors: the tensors of a call. The compiler's do not tell whether they carry a tangent. So
            any forward mode around them counts there.
    """
    active = transformations()
    if "Jvp" in active and (torch.compiler.is_compiling() or have_tangents(tensors)):
        return "forward-mode derivative"
    if "Grad" in active:
        return "derivative for torch.func, only for autograd"
    return ""


@torch.jit.unused
def exporting() -> bool:
    """Return whether torch records a program, which must hold for other sizes than the example's.

    `torch.export` does, and `torch.jit.trace`, by which the classic exporter to ONNX works. What
    reads the program later does not know the operators of this plugin either.
    """
    is_exporting = getattr(torch.compiler, "is_exporting", None)  # torch 2.6 may lack it
    return torch.jit.is_tracing() or (is_exporting is not None and is_exporting())
