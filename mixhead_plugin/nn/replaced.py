"""Let an attention that another one has replaced refuse to run."""

from typing import Any

from torch import nn


class ReplacedError(RuntimeError, AttributeError):
    """Say that something still uses an attention that was replaced.

    It is an AttributeError, too, because copying asks any object for methods that it may lack.
    """


class Replaced(nn.Module):
    """What an attention becomes when another one takes its place.

    A model may keep an attention in places that nobody can list: an object, a closure, the
    arguments of a hook, a bound method. There it would go on as it was, without a sign. So it loses
    all that it had, and whoever asks it for something gets an error.
    """

    def __getattr__(self, name: str) -> Any:
        raise ReplacedError(vars(self)["problem"])


def retire(old: nn.Module, name: str, new: nn.Module) -> None:
    """Let an attention that is replaced refuse to run.

    Args:
        old: the attention; the tensors and hooks that the new one has from it stay
        name: its name in the model
        new: what has taken its place
    """
    vars(old).clear()
    vars(old)["problem"] = (
        f"{name}: was replaced by a {type(new).__name__}, but the former attention is kept as "
        "something else, too, as in a list or a closure; must be taken from the model in each call"
    )
    old.__class__ = Replaced
