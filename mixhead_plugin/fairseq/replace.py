"""Replace functions of fairseq by functions that get the original."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

# Where a function keeps what it replaces: (owner, name).
_MARK = "replaces"


def replaces(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Mark a function as the replacement of `owner.name`.

    `install` installs it. It is called with the original before the arguments of the call:

        @replaces(Trainer, "lr_step")
        def _lr_step(original, trainer, epoch): ...

    Args:
        owner: the module or the class that has the function
        name: the name of the function, static method or class method in `owner`
    """

    def mark(function: Callable) -> Callable:
        setattr(function, _MARK, (owner, name))
        return function

    return mark


def install(function: Callable) -> None:
    """Put a marked function in the place of the function of fairseq that it replaces."""
    owner, name = getattr(function, _MARK)
    # Not getattr: it would bind a class method, and hide that a method is static.
    attribute = inspect.getattr_static(owner, name)
    is_wrapped = isinstance(attribute, (staticmethod, classmethod))
    original = attribute.__func__ if is_wrapped else attribute

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, type(attribute)(replacement) if is_wrapped else replacement)


def install_all(module: ModuleType) -> None:
    """Install every function of a module that `replaces` marks."""
    for function in replacements(module):
        install(function)


def replacements(module: ModuleType) -> list[Callable]:
    """Return the functions of a module that `replaces` marks."""
    found: list[Callable] = []
    for value in vars(module).values():
        if inspect.isfunction(value) and hasattr(value, _MARK):
            found.append(value)
    return found


def is_command() -> bool:
    """Return True in a command of fairseq and in its workers.

    Other programs may call fairseq's functions for other purposes, with files that are missing.
    """
    main = sys.modules["__main__"]
    # submitit starts fairseq-hydra-train's jobs
    return hasattr(main, "cli_main") or hasattr(main, "submitit_main")


def train_command() -> Any:
    """Return the module of fairseq-train; an empty one if another program trains."""
    # Under `python -m fairseq_cli.train` the module is only known as __main__.
    for name in ("__main__", "fairseq_cli.train"):
        module = sys.modules.get(name)
        if hasattr(module, "validate_and_save"):
            return module
    return SimpleNamespace()
