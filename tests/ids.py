"""Words for the values of parametrised tests, where pytest would write 'flags7'."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

LONGEST = 60  # of one value, so that a line of a failure still has its message


def id_of(value: Any, name: str) -> str | None:
    """Return the words for a value of the argument `name`; None leaves it to pytest."""
    if isinstance(value, str):
        return None
    if value is None or isinstance(value, bool | int | float):
        return f"{name}={value}"
    words = " ".join(words_of(value).split())  # an id is one line
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}..."


def words_of(value: Any) -> str:
    """Return what a value is in words: 'bfloat16', '3 4 5', 'kdim=12 vdim=9', a name or a type."""
    if isinstance(value, str | int | float | None):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return joined(f"{key}={words_of(each)}" for key, each in value.items())
    if isinstance(value, set | frozenset):
        return joined(sorted(map(words_of, value)))  # equal in every worker
    if isinstance(value, list | tuple | range):
        return joined(map(words_of, value))
    if isinstance(value, torch.Tensor):
        return f"tensor of {joined(value.shape)}"
    return getattr(value, "__name__", type(value).__name__)


def joined(words: Iterable[str | int]) -> str:
    return " ".join(map(str, words)) or "nothing"
