"""Mix the heads of one module that calls F.scaled_dot_product_attention.

    class CausalSelfAttention(nn.Module):         after `mix`, this one instance is of a subclass
        def forward(self, x):                     whose forward
            q, k, v = ...                           listens to the calls of torch,
            y = F.scaled_dot_product_attention(     runs the forward on the left,
                q, k, v, is_causal=True)            computes this one call with mixed heads,
            ...                                     and raises if there was none

        def step(self, x, cache):                 so does each other method that calls the function,
            ...                                     as one that a model calls to generate

Neither torch nor the class of the module is changed, because others use them, too. The parts become
children of the module, so their parameters have the names of the other doors. A mixing reads the
query that the function gets, so behind norms and rotary positions.
"""

import copy
import copyreg
import dataclasses
import functools
import inspect
import pickle
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, new_class
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from mixhead_plugin.nn.example import ATEN_SDPA, SDPA, Sizes, first_argument, first_parameter
from mixhead_plugin.parts import PARTS, HostedAttention, Variant, record, remove_parts

ATTRIBUTE = "mixhead"  # the attribute of a mixed module that holds its `MixedSdpa`
# What calls the forward pass of every `torch.autograd.Function`, whichever its signature is.
_APPLY = torch.autograd.Function.apply.__code__


class MixedSdpa(HostedAttention):
    """What a mixed module has beside its parts.

    Args:
        name: of the module in the model, for messages
        variant: what is asked for
        seen: the sizes of the module's calls
    """

    def __init__(self, name: str, variant: Variant, seen: Sizes):
        variant = dataclasses.replace(variant, head_dim=seen.head_dim)
        # Where nothing reads the input, its size has no effect.
        embed_dim = seen.heads * seen.head_dim if seen.embed_dim is None else seen.embed_dim
        sizes = variant.sizes(seen.heads, embed_dim)
        super().__init__(variant, sizes)
        # The values may have another size than the queries.
        self.sizes = sizes._replace(value_dim=seen.value_dim * self.heads_per_mixed)
        self.name = name
        self.seen = seen
        self.reads_input = reads_input(variant)

    def entry(self) -> dict[str, Any]:
        """Return what the metadata of a state dict tell of the module."""
        return record.describe(self.variant, calls=record.CALLS_SDPA, **self.seen._asdict())


def reads_input(variant: Variant) -> str:
    """Return the first field whose part reads the input of the queries; empty if none does.

    Others read the queries alone.
    """
    for name, row in variant.part_kinds().items():
        if row.reads == "input" or (name == "attention_gate" and row.build is not None):
            return name
    return ""


class MixedCall(TorchFunctionMode):
    """One call of a mixed module, in which it replaces the call of scaled_dot_product_attention.

    Args:
        module: what is called
        x: its first argument, if that is a tensor
        is_forward: whether its forward runs, and not another method
    """

    def __init__(
        self,
        module: nn.Module,
        x: Tensor | None,
        is_forward: bool,
    ):
        super().__init__()
        self.module = module
        self.is_forward = is_forward
        self.attention: MixedSdpa = module.__dict__[ATTRIBUTE]
        self.x = x
        self.attended = 0
        self.has_gradients = torch.is_grad_enabled()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is SDPA or func is ATEN_SDPA or func is ATEN_SDPA.default:
            return self.attend(*args, **kwargs)

        if (
            isinstance(func, FunctionType)
            and func.__module__ == "torch._tensor"
            and torch.compiler.is_compiling()
        ):
            # Some methods of tensors are Python functions, such as `Tensor.split`. The compiler
            # cannot follow these functions, but knows the methods by their names.
            return getattr(args[0], func.__name__)(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Take the arguments of F.scaled_dot_product_attention, and return the mixed outputs.

        Args:
            query: [B, H, Nq, D]
            key: [B, H, Nk, D], or with fewer heads, by `enable_gqa` or one for all
            value: [B, H, Nk, Dv], likewise
            attn_mask: broadcastable to [B, H, Nq, Nk]; bool, True is visible, or floats to add
            dropout_p: probability of dropping a mixed weight
            is_causal: query t sees the keys up to t, also where there are more keys than queries
            scale: factor on query . key; None for D ** -0.5
            enable_gqa: whether neighbouring heads of queries share a head of keys and of values

        Returns:
            [B, H, Nq, Dv]; where heads mix in groups, neighbours are parts of one mixed head
        """
        self._count()
        self._refuse_to_learn_nothing()
        self._check(query, key, value, attn_mask, is_causal, enable_gqa)
        # One of them may have a single sentence for all, as learned queries have.
        batch = query.size(0) if key.size(0) == 1 else key.size(0)
        query = query.expand(batch, -1, -1, -1)
        key = key.expand(batch, -1, -1, -1)
        value = value.expand(batch, -1, -1, -1)
        x = self.x
        if self.attention.reads_input and x is not None:
            x = x.expand(batch, -1, -1)

        mask, causal = _masks(attn_mask, is_causal, query, key)
        if mask is not None and self.attention.variant.normalizer != "softmax":
            # Some models hide keys by the least number of the type. That is far enough for softmax,
            # but other normalizers count the visible keys.
            mask = mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf)

        out, _ = self.attention.attend_in(
            self.module,
            query,
            key,
            value,
            projected=query,
            x=x,
            attn_mask=mask,
            causal=causal,
            dropout_p=dropout_p,
            scale=self.attention.sizes.head_dim**-0.5 if scale is None else scale,
        )  # [B, Nq, H', ...]

        several = self.attention.heads_per_mixed
        if several > 1:  # the module wants the outputs of as many heads as it has
            out = out.unflatten(3, (several, -1)).flatten(2, 3)  # [B, Nq, H, Dv]
        # In memory as torch has them, in the order of the queries, because some modules put the
        # heads side by side by `view`, which needs it.
        if query.stride(1) < query.stride(2):  # as projections give them, [B, Nq, H, D] in memory
            return out.contiguous().transpose(1, 2)
        return out.transpose(1, 2).contiguous()

    def _count(self) -> None:
        """Refuse a second call, and one that is computed again when the module does not listen."""
        name = self.attention.name
        self.attended += 1
        if self.attended > 1 and not self.is_forward:
            raise RuntimeError(
                f"{name}: called scaled_dot_product_attention twice in one call of a method; must "
                "call it once, or the module, as self(x), each time"
            )
        if self.attended > 1:
            raise RuntimeError(
                f"{name}: called scaled_dot_product_attention twice in one call; must call it once,"
                " because each mixing needs a module of its own"
            )
        if torch.compiler.is_compiling():
            return  # a compiled graph has the mixing, whoever computes it again
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not _run.__code__:
            if frame.f_code is nn.Module._call_impl.__code__:
                inner = type(frame.f_locals["self"]).__name__
                raise RuntimeError(
                    f"{name}: {inner} inside of it calls scaled_dot_product_attention, and was not "
                    "mixed; must be reached by the example"
                )
            if frame.f_code.co_filename == torch.utils.checkpoint.__file__ or (
                self.has_gradients and frame.f_code is _APPLY
            ):
                raise RuntimeError(
                    f"{name}: calls scaled_dot_product_attention inside a checkpoint or an "
                    "autograd.Function of its own, whose backward pass would not mix; must be "
                    "checkpointed whole"
                )
            frame = frame.f_back  # type: ignore[assignment]

    def _refuse_to_learn_nothing(self) -> None:
        """Refuse to train a mixing if the module computes its attention without gradients.

        Whoever generates or evaluates needs none. Then the whole model is called without them, or
        is in eval mode, or another method than forward is called.
        """
        trains = self.has_gradients and self.is_forward and self.module.training
        if not trains or torch.is_grad_enabled():
            return
        for option in PARTS:
            part = getattr(self.module, option)
            if part is not None and any(weight.requires_grad for weight in part.parameters()):
                raise RuntimeError(
                    f"{self.attention.name}: calls scaled_dot_product_attention without gradients, "
                    f"as under no_grad, so its {option} cannot learn; must call it with them, or "
                    f"{option} must be frozen, by requires_grad_(False)"
                )

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        enable_gqa: bool,
    ) -> None:
        """Refuse inputs that the parts were not built for, and what torch refuses."""
        name = self.attention.name
        seen = self.attention.seen
        reader = self.attention.reads_input
        if query.dim() != 4:
            raise ValueError(
                f"{name}: its query is {list(query.shape)}, must be [batch, heads, positions, head "
                "size]"
            )
        sizes = {"heads": query.size(1), "head_dim": query.size(3), "value_dim": value.size(3)}
        for what, size in sizes.items():
            wanted = getattr(seen, what)
            if size != wanted:
                raise ValueError(
                    f"{name}: its {what} is {size}, must be {wanted}, as when it was mixed"
                )
        for what, tensor in (("key", key), ("value", value)):
            heads = tensor.size(1)
            if heads in (1, seen.heads) or (enable_gqa and seen.heads % heads == 0):
                continue
            raise ValueError(
                f"{name}: its {what} has {heads} heads, must have {seen.heads}, or a divisor of it "
                "with enable_gqa"
            )
        if attn_mask is not None and is_causal:
            raise RuntimeError(f"{name}: attn_mask must not be given with is_causal")
        if not reader:
            return
        shape = None if self.x is None else list(self.x.shape)
        shape_of_queries = [query.size(0), query.size(2), self.attention.sizes.embed_dim]
        if shape != shape_of_queries:
            raise ValueError(
                f"{name}: the first tensor that it gets is {shape}, must be {shape_of_queries}, "
                f"which {reader} reads"
            )


def _masks(
    attn_mask: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Tensor | None, bool]:
    """Return what to add to the scores, and whether attention is causal.

    It is causal as `ops.attention` has it: the last query sees all keys. With `is_causal` of torch,
    the first query sees one.
    """
    if isinstance(attn_mask, CausalBias):
        if attn_mask.variant == CausalVariant.LOWER_RIGHT:
            return None, True
        attn_mask = None
        is_causal = True

    if is_causal:
        n_queries = query.size(2)
        n_keys = key.size(2)
        if n_queries == n_keys:
            return None, True
        attn_mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        nothing = torch.zeros_like(attn_mask, dtype=query.dtype)
        return nothing.masked_fill(~attn_mask, -torch.inf), False
    return attn_mask, False


class CallsSdpa(nn.Module):
    """The methods of a mixed module that its own class does not have; see `mixed_class`."""

    _mixhead_class: Any  # its class without mixing

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if is_mixed(self):
            record.write(destination, prefix, self.__dict__[ATTRIBUTE].entry())

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *settings: Any
    ) -> None:
        """Let a checkpoint of the plain module start the mixing anew; refuse another variant's."""
        if is_mixed(self):
            own = [name for name in self.state_dict() if name.partition(".")[0] not in PARTS]
            is_whole = all(f"{prefix}{name}" in state_dict for name in own)
            if not own:
                # No tensor tells that the module was saved, but torch gives each one an entry.
                is_whole = "version" in local_metadata
            entry = self.__dict__[ATTRIBUTE].entry()
            record.compare(self, entry, prefix, local_metadata, errors=settings[-1])
            if is_whole:
                record.add_missing_parts(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *settings)

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script, which reads the code of the plain class."""
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.script would leave out the mixing; must be traced "
            "or exported"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let pickle and deepcopy find the class of the module, which is made at run time."""
        if type(self) is not mixed_class(self._mixhead_class):
            return super().__reduce_ex__(protocol)  # another tool has put its class in front
        how: tuple[Any, ...] = super().__reduce_ex__(max(2, protocol))  # type: ignore[assignment]
        function, arguments, *rest = how
        if function is not copyreg.__newobj__:  # type: ignore[attr-defined]
            raise pickle.PicklingError(
                f"{type(self).__name__}: is pickled in its own way; must be unmixed before"
            )
        return _new, (self._mixhead_class, *arguments[1:]), *rest


def _new(plain: Any, *arguments: Any) -> nn.Module:
    """Return an instance without attributes, which pickle adds."""
    cls = mixed_class(plain)
    return cls.__new__(cls, *arguments)


@functools.cache
def mixed_class(plain: Any) -> type[nn.Module]:
    """Return the subclass that mixed modules of a class are of; it has the name of the class."""

    # torch.compile does not look into classes that a library puts into graphs whole, as diffusers
    # does with its Attention. So the compiled code sees the functions, and not the class.
    unmixed = plain.forward
    first = first_parameter(unmixed)

    @functools.wraps(unmixed)  # torch.export reads its signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(unmixed, first, self, args, kwargs)

    def fill(namespace: dict[str, Any]) -> None:
        for name in ("__module__", "__qualname__", "__doc__"):
            namespace[name] = getattr(plain, name)
        for name, method in methods_to_wrap(plain).items():
            namespace[name] = _listening(method)
        if hasattr(plain, "__deepcopy__"):
            namespace["__deepcopy__"] = _deepcopy
        namespace["forward"] = forward
        namespace["_mixhead_class"] = plain

    return new_class(plain.__name__, (CallsSdpa, plain), {}, fill)


def calling_methods(cls: type) -> dict[str, Any]:
    """Return the methods of a class, by name, that call scaled_dot_product_attention.

    Their code tells: it names the function, or another one of these methods. None is of torch.
    Some may be a `staticmethod` or a `classmethod`, or `__init__`, which may keep the function.
    """
    methods = []
    for base in cls.__mro__:
        if not f"{base.__module__}.".startswith(("torch.", "builtins.")):
            for name, value in vars(base).items():
                if isinstance(_function_of(value), FunctionType):
                    methods.append((name, _function_of(value)))

    names: set[str] = set()
    more = True
    while more:
        found = {name for name, method in methods if _names_any(method, names)}
        more = not found <= names
        names |= found
    # Another attribute, as a property, may hide a method of the same name.
    nearest = {name: inspect.getattr_static(cls, name) for name in names}
    return {
        name: value
        for name, value in nearest.items()
        if isinstance(_function_of(value), FunctionType)
    }


def _function_of(value: Any) -> Any:
    """Return the function of a `staticmethod` or a `classmethod`; others as they are."""
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def methods_to_wrap(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the methods of a class, by name, that mix when a model calls them.

    A static one does not know the module; the methods that call it mix.
    """
    return {
        name: method
        for name, method in calling_methods(cls).items()
        if isinstance(method, FunctionType) and not name.startswith("__")
    }


def suspended_method(cls: type) -> str:
    """Return the name of a method whose call of the function would not mix; empty for none.

    The body of a generator, or of an async method, runs when the call of the method has ended, and
    so has the mixing. But the body may call other methods that mix by themselves.
    """
    methods = methods_to_wrap(cls)
    # What `super()` finds is not of the mixed class.
    plain = {"super", *calling_methods(cls)} - {*methods}
    for name, method in methods.items():
        function = inspect.unwrap(method)
        is_suspended = (
            inspect.isgeneratorfunction(function)
            or inspect.iscoroutinefunction(function)
            or inspect.isasyncgenfunction(function)
        )
        if is_suspended and _names_any(function, plain):
            return name
    return ""


def _names_any(method: Callable[..., Any], methods: set[str]) -> bool:
    """Return whether a function names scaled_dot_product_attention or one of some methods."""
    function = inspect.unwrap(method)
    if not isinstance(function, FunctionType):
        return False
    for name in _names_in(function.__code__):
        if name == SDPA.__name__ or name in methods or function.__globals__.get(name) is SDPA:
            return True
    return False


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function, and in functions inside of it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _listening(unmixed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that mixes heads, also where the model calls it, and not the module."""
    first = first_parameter(unmixed)

    @functools.wraps(unmixed)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, MixedCall) and mode.module is self:
                return unmixed(self, *args, **kwargs)  # in a call that listens already
        return _run(unmixed, first, self, args, kwargs, must_attend=False)

    return method


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """Copy a module in the way of its own class, which may not know of a mixing."""
    copied = self._mixhead_class.__deepcopy__(self, memo)
    if is_mixed(self) and not is_mixed(copied):
        raise copy.Error(f"{type(self).__name__}: is copied in its own way; must be unmixed before")
    return copied


def _run(
    method: Callable[..., Any],
    first: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    must_attend: bool = True,
) -> Any:
    """Run the forward of a module, or another method, with mixed heads.

    Args:
        method: of the class of the module
        first: the name of its first parameter behind `self`
        module: is mixed
        args, kwargs: of the call
        must_attend: whether it loses the mixing if it does not call the function
    """
    if ATTRIBUTE not in module.__dict__:  # a new instance that the model has made by type(module)
        return method(module, *args, **kwargs)
    call = MixedCall(module, first_argument(first, args, kwargs), is_forward=must_attend)
    with call:
        output = method(module, *args, **kwargs)
    if must_attend and call.attended == 0:
        mode = "training" if module.training else "evaluation"
        raise RuntimeError(
            f"{call.attention.name}: lost the mixing, it did not call "
            f"scaled_dot_product_attention in this call ({mode} mode); must call it each time"
        )
    return output


def is_mixed(module: nn.Module) -> bool:
    """Return whether `give_mixed_class` has changed a module.

    `hf.mix` notes something else under the same name.
    """
    return isinstance(vars(module).get(ATTRIBUTE), MixedSdpa)


def plain_class(module: nn.Module) -> Any:
    """Return the class of a module without mixing.

    Also a plain module may be of a `mixed_class`: a model has made it by type(other)() of a mixed
    one.
    """
    cls = type(module)
    return vars(cls).get("_mixhead_class", cls)


def give_mixed_class(host: nn.Module, attention: MixedSdpa) -> None:
    """Let a module that has got its parts compute its attention with mixed heads.

    Args:
        host: calls scaled_dot_product_attention; `mix` has seen it
        attention: what it gets beside its parts
    """
    setattr(host, ATTRIBUTE, attention)
    host.__class__ = mixed_class(plain_class(host))


def give_plain_class(host: Any) -> None:
    """Give a module its own class back, in place, without parts."""
    delattr(host, ATTRIBUTE)
    remove_parts(host)
    host.__class__ = host._mixhead_class


def has_own_class(module: nn.Module) -> bool:
    """Return whether a mixed module is of the class that `give_mixed_class` gave it.

    Parametrizations and FSDP put theirs in front.
    """
    cls: Any = type(module)
    return cls is mixed_class(cls._mixhead_class)
