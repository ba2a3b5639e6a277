"""Replace functions of fairseq."""

import functools
from collections.abc import Callable
from typing import Any


def replaces(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Mark a function to take the place of `owner.name`. It gets the original as its first argument."""

    def mark(function: Callable) -> Callable:
        function.replaces = owner, name
        return function

    return mark


def install(function: Callable) -> None:
    """Put a marked function in its place."""
    owner, name = function.replaces
    original = getattr(owner, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    is_static = isinstance(vars(owner).get(name), staticmethod)
    setattr(owner, name, staticmethod(replacement) if is_static else replacement)
