"""Run a model once on an example, and see which of its modules call scaled_dot_product_attention.

Afterwards the model is as before: parameters, buffers, attributes, hooks, mode and random numbers.
"""

import contextlib
import inspect
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.heads.uncompiled import uncompiled, without_fast_path

# What may be given: the arguments of one call of the model, or a function that takes the model.
Example = tuple[Any, ...] | Mapping[str, Any] | Callable[[Any], object]

# The function, and the operator below it, which a program may call, too, as it is or by `.default`.
SDPA = F.scaled_dot_product_attention
ATEN_SDPA = torch.ops.aten.scaled_dot_product_attention


def is_sdpa(func: Any) -> bool:
    """Return whether what torch is about to call is scaled_dot_product_attention."""
    return func is SDPA or func is ATEN_SDPA or func is ATEN_SDPA.default


def called_twice(name: str) -> str:
    """Return the message about a module that calls it twice in one call.

    Args:
        name: the name of the module in the model
    """
    return (
        f"{name}: calls scaled_dot_product_attention twice in one call; must call it once, because "
        "each mixing needs a module of its own"
    )


def check_query(name: str, query: Tensor) -> None:
    """Raise ValueError if a query of a module has not the four dimensions [B, H, Nq, D]."""
    if query.dim() != 4:
        raise ValueError(
            f"{name}: its query is {list(query.shape)}, must be [batch, heads, positions, head "
            "size]"
        )


class CallSizes(NamedTuple):
    """The sizes of the calls of scaled_dot_product_attention that one module makes."""

    heads: int  # H, of the queries
    head_dim: int  # D, of queries and keys
    value_dim: int  # Dv
    # C, where the first tensor that the module gets is the input of its queries [B, Nq, C]
    embed_dim: int | None


class ExampleRun(NamedTuple):
    """The modules that attended in one run of the example."""

    calling: dict[nn.Module, CallSizes]
    # modules that call another function that computes attention, with the name of the function
    others: dict[nn.Module, str]


class ModuleCall:
    """One call of a module while the example runs."""

    def __init__(self, module: nn.Module, x: Tensor | None):
        self.module = module
        self.x = x  # its first argument, if that is a tensor
        self.attended = 0  # how often it has called scaled_dot_product_attention


def first_parameter(method: Callable[..., Any]) -> str:
    """Return the name of a method's parameter behind `self`; empty if there is none."""
    names = [*inspect.signature(method).parameters]
    return names[1] if len(names) > 1 else ""


def first_argument(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first argument of a call, whose parameter has this name; None for no tensor."""
    first = args[0] if args else kwargs.get(name)
    return first if isinstance(first, Tensor) else None


def run(model: nn.Module, example: Example) -> ExampleRun:
    """Return which modules call scaled_dot_product_attention in one run of the example.

    A call belongs to the innermost module that is running. The model is afterwards as before, also
    when the example raises.

    Args:
        model: any module without lazy parameters
        example: a tuple of arguments, a mapping of keywords, or a function that takes the model

    Raises:
        ValueError: an example of another kind, calls that cannot be mixed, or a model whose lazy
            modules do not know their sizes yet
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"{name}: is lazy; the model must be called once before it is mixed")
    with (
        _as_before(model),
        torch.no_grad(),
        uncompiled(),  # so that modules run as they are written
        without_fast_path(),
        _watched(model) as watch,
    ):
        if isinstance(example, tuple):
            model(*example)
        elif isinstance(example, Mapping):
            model(**example)
        elif callable(example):
            example(model)
        else:
            wanted = (
                "a tuple of arguments such as (x,), a dict of keywords, or a function that takes "
                "the model"
            )
            raise ValueError(wrong_argument("example", example, wanted))
    return ExampleRun(watch.calling, watch.others)


class Watch(TorchFunctionMode):
    """Note each call of scaled_dot_product_attention, and which module makes it."""

    def __init__(self, names: Mapping[nn.Module, str]):
        super().__init__()
        self.names = names
        self.running: list[ModuleCall] = []  # the innermost last
        self.calling: dict[nn.Module, CallSizes] = {}
        self.others: dict[nn.Module, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_sdpa(func):
            self.note(*args, **kwargs)
        elif self.running:
            name = _other_attention(func)
            if name:
                self.others.setdefault(self.running[-1].module, name)
        return func(*args, **kwargs)

    def note(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> None:
        """Keep the sizes of one call, or raise ValueError if it cannot be mixed."""
        if not self.running:
            raise ValueError(
                "example: calls scaled_dot_product_attention outside of the model; each call must "
                "be inside one of its modules"
            )
        call = self.running[-1]
        name = self.names[call.module]
        _refuse_hidden_module(name, call.module)

        call.attended += 1
        if call.attended > 1:
            raise ValueError(called_twice(name))
        check_query(name, query)
        for what, tensor in (("key", key), ("value", value)):
            if tensor.size(-3) > query.size(1):
                raise ValueError(
                    f"{name}: its query has {query.size(1)} heads and its {what} has "
                    f"{tensor.size(-3)}; must have as many, because heads of queries are mixed"
                )
        sizes = CallSizes(query.size(1), query.size(3), value.size(3), _input_size(call.x, query))
        known = self.calling.setdefault(call.module, sizes)
        if known[:3] != sizes[:3]:
            raise ValueError(
                f"{name}: is called with heads and sizes {known[:3]} and {sizes[:3]}; must be the "
                "same in each call"
            )
        if sizes.embed_dim is None:
            self.calling[call.module] = sizes


def _refuse_hidden_module(name: str, module: nn.Module) -> None:
    """Refuse a call by a module that the model holds, but does not know as a part of itself.

    Args:
        name: the name of the innermost running module that the model knows
        module: this module
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:
        frame = frame.f_back
    if frame is None or frame.f_locals["self"] is module:
        return
    inner = type(frame.f_locals["self"]).__name__
    raise ValueError(
        f"{name}: {inner} inside of it calls scaled_dot_product_attention, and is no submodule of "
        "the model; must be one, as in an nn.ModuleList"
    )


def _other_attention(func: Any) -> str:
    """Return the name of a function that computes attention in its own way; empty for others."""
    if func is F.multi_head_attention_forward:
        return "F.multi_head_attention_forward"
    # Operators of flash attention, flex_attention, and those of other libraries tell it by a name.
    name = getattr(func, "__name__", "")
    if "attention" not in name and "attn" not in name:
        return ""
    # An operator's own text begins with its library, as in aten._flash_attention_forward.
    return str(func) if isinstance(func, (OpOverload, OpOverloadPacket)) else name


def _input_size(x: Tensor | None, query: Tensor) -> int | None:
    """Return C if x is certainly the input of the queries, [B, Nq, C].

    Where B equals Nq, x might also be [Nq, B, C].
    """
    batch = query.size(0)
    n_queries = query.size(2)
    if x is None or x.dim() != 3 or batch == n_queries:
        return None
    if x.shape[:2] != (batch, n_queries):
        return None
    return x.size(2)


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[Watch]:
    """Let a `Watch` see the calls of all modules of the model."""
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    watch = Watch(names)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = "" if args else first_parameter(type(module).forward)
        watch.running.append(ModuleCall(module, first_argument(name, args, kwargs)))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        watch.running.pop()

    with contextlib.ExitStack() as stack:
        for module in names:
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks, and its code is not Python
            for handle in (
                module.register_forward_pre_hook(enter, with_kwargs=True),
                # The model may catch an exception of a module inside, and go on.
                module.register_forward_hook(leave, always_call=True),
            ):
                stack.callback(handle.remove)
        with watch:
            yield watch


@contextlib.contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Restore all that a run can change in a model, and the random numbers, bit for bit."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    # A forward pass may write to parameters, too: some models keep a moving average of others.
    values = [(tensor, tensor.detach().clone()) for tensor in tensors.values()]
    attributes = [(module, _shallow(vars(module))) for module in model.modules()]
    try:
        with same_random_numbers(tensors.values()):
            yield
    finally:
        for module, saved in attributes:
            _restore(vars(module), saved)
        for tensor, value in values:
            # `data`, because the change must not count as one for autograd.
            tensor.data.copy_(value)


# Modules keep their children, tensors and hooks in such containers.
_CONTAINERS = (dict, OrderedDict, list, set)


def _shallow(attributes: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute with a copy of what it contains, None if it is no container."""
    saved = {}
    for name, value in attributes.items():
        content = value.copy() if type(value) in _CONTAINERS else None
        saved[name] = (value, content)
    return saved


def _restore(attributes: dict[str, Any], saved: dict[str, tuple[Any, Any]]) -> None:
    """Bring attributes back. A container stays the same object: handles of hooks know it."""
    attributes.clear()
    for name, (value, content) in saved.items():
        if content is not None:
            value.clear()
            if isinstance(value, list):
                value.extend(content)
            else:
                value.update(content)
        attributes[name] = value


@contextlib.contextmanager
def same_random_numbers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Restore the states of the generators of torch, Python and NumPy at the end.

    Args:
        tensors: the tensors of a model; the generators of their devices are restored, too
    """
    devices: dict[str, set[int]] = {}
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "meta"):
            devices.setdefault(tensor.device.type, set()).add(tensor.device.index or 0)
    state = random.getstate()
    numpy = sys.modules.get("numpy")  # if nobody has imported it, nobody draws from it
    state_of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            for device_type, numbers in devices.items():
                stack.enter_context(
                    torch.random.fork_rng(devices=sorted(numbers), device_type=device_type)
                )
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(state_of_numpy)
