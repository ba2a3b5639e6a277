"""Give a module a subclass of its class, whose methods mix the heads of each call.

Neither torch nor the class of the module is changed, because others use them, too.
"""

import copy
import copyreg
import functools
import pickle
from collections.abc import Callable
from types import new_class
from typing import Any

import torch.fx
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from mixhead_plugin.nn.calling_methods import methods_to_wrap
from mixhead_plugin.nn.example import first_parameter
from mixhead_plugin.nn.sdpa import ATTRIBUTE, MixedCall, MixedSdpa, is_mixed, run
from mixhead_plugin.parts import PARTS, record, remove_parts


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
        """Let a checkpoint of the plain module start the mixing anew; refuse another variant's.

        By `strict=False` the mixing stays. An instance that a program makes by type(mixed)() is of
        this class, but not mixed. It refuses a checkpoint of a mixed module, also by that.
        """
        errors: list[str] = settings[-1]
        if is_mixed(self):
            own = [name for name in self.state_dict() if name.partition(".")[0] not in PARTS]
            is_whole = all(f"{prefix}{name}" in state_dict for name in own)
            if not own:
                # No tensor tells that the module was saved, but torch gives each one an entry.
                is_whole = "version" in local_metadata
            entry = self.__dict__[ATTRIBUTE].entry()
            record.compare(self, entry, prefix, local_metadata, errors)
            if is_whole:
                record.add_missing_parts(self, state_dict, prefix)
        elif record.METADATA_KEY in local_metadata:
            name = prefix[:-1] or type(self).__name__
            errors.append(f"{name} is mixed in the state dict, must be mixed here, too.")
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
        function, arguments, state, *rest = how
        is_ours = function is copyreg.__newobj__  # type: ignore[attr-defined]
        # A `__getstate__` of its own may not know of a mixing.
        if not is_ours or (is_mixed(self) and not _has_mixing(state)):
            raise pickle.PicklingError(_in_its_own_way(self))
        return _new, (self._mixhead_class, *arguments[1:]), state, *rest

    def __setstate__(self, state: Any) -> None:
        """Refuse a `__setstate__` of its own that leaves the mixing out."""
        super().__setstate__(state)
        if _has_mixing(state) and not is_mixed(self):
            raise pickle.PicklingError(_in_its_own_way(self))


def _has_mixing(state: Any) -> bool:
    """Return whether pickle or a copy gets the mixing of a module with its attributes."""
    return isinstance(state, dict) and ATTRIBUTE in state


def _in_its_own_way(module: Any) -> str:
    return f"{type(module).__name__}: is copied or pickled in its own way; must be unmixed before"


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
        return run(unmixed, first, self, args, kwargs)

    def fill(namespace: dict[str, Any]) -> None:
        for name in ("__module__", "__qualname__", "__doc__"):
            namespace[name] = getattr(plain, name)
        for name, method in methods_to_wrap(plain).items():
            namespace[name] = _listening(method)
        for name in ("__copy__", "__deepcopy__"):
            if hasattr(plain, name):
                namespace[name] = _copying(getattr(plain, name))
        if issubclass(plain, torch.fx.GraphModule):
            namespace["recompile"] = _refuse_to_recompile
        namespace["forward"] = forward
        namespace["_mixhead_class"] = plain

    return new_class(plain.__name__, (CallsSdpa, plain), {}, fill)


def _listening(unmixed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that mixes heads, also where the model calls it, and not the module."""
    first = first_parameter(unmixed)

    @functools.wraps(unmixed)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, MixedCall) and mode.module is self:
                return unmixed(self, *args, **kwargs)  # in a call that listens already
        return run(unmixed, first, self, args, kwargs, must_attend=False)

    return method


def _copying(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method by which a class copies its modules, and which may not know of a mixing."""

    @functools.wraps(method)
    def copied(self: Any, *memo: dict[int, Any]) -> Any:
        result = method(self, *memo)
        if is_mixed(self) and not is_mixed(result):
            raise copy.Error(_in_its_own_way(self))
        return result

    return copied


def _refuse_to_recompile(self: Any) -> Any:
    """Stand where torch.fx writes the code of a graph that was changed over the class's forward."""
    raise RuntimeError(
        f"{type(self).__name__}: is a mixed graph, whose new code would not mix; must be "
        "recompiled before it is mixed"
    )


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
