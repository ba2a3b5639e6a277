"""Find the methods of a class that call scaled_dot_product_attention, by their code."""

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from mixhead_plugin.nn.example import SDPA


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

    # A method that calls a calling method is one, too: repeat until none joins.
    names: set[str] = set()
    while True:
        found = {name for name, method in methods if _names_any(method, names)}
        if found <= names:
            break
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
    # `super().step()` runs the method of the plain class, which does not listen.
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
