"""Replace functions of fairseq by functions that get the original."""

import functools
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def replaces(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Mark a function as the replacement of `owner.name`; it gets the original as its first
    argument.
    """

    def mark(function: Callable) -> Callable:
        function.replaces = owner, name
        return function

    return mark


def install(function: Callable) -> None:
    """Replace the function of fairseq that a marked function names."""
    owner, name = function.replaces
    found = inspect.getattr_static(owner, name)
    kind = (
        type(found) if isinstance(found, (staticmethod, classmethod)) else lambda function: function
    )
    original = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(owner, name, kind(replacement))


def is_command() -> bool:
    """Return True in a command of fairseq and its workers; other programs may call its functions
    with missing files.
    """
    main = sys.modules["__main__"]
    # submitit starts fairseq-hydra-train's jobs
    return hasattr(main, "cli_main") or hasattr(main, "submitit_main")


def train_command() -> Any:
    """Return the module of fairseq-train; an empty one if another program trains."""
    # `python -m` has only the first
    modules = (sys.modules.get(name) for name in ("__main__", "fairseq_cli.train"))
    return next(
        (module for module in modules if hasattr(module, "validate_and_save")), SimpleNamespace()
    )
