"""Marks that a model of the plugin leaves on its task, so that a repair can act on them.

A task of fairseq knows nothing of its model. A model leaves a mark on its task when it is built,
and the repairs of the task's methods look for it. Both import this file, so that no model imports a
repair.
"""

from typing import Any

# The attributes of a task that are the marks.
_WANTS_NUMBERS = "mixhead_wants_window_numbers"
_LONGEST_INPUT = "mixhead_longest_input"


def ask_for_window_numbers(task: Any) -> None:
    """Ask a task to give each window its number; a model with a memory calls this."""
    setattr(task, _WANTS_NUMBERS, True)


def wants_window_numbers(task: Any) -> bool:
    """Return whether the model of a task has asked for the numbers of windows."""
    return getattr(task, _WANTS_NUMBERS, False)


def set_longest_input(task: Any, length: int) -> None:
    """Ask a task to refuse longer inputs; a model that cannot read longer ones calls this.

    Args:
        task: the task that the model is built for
        length: the largest number of tokens in an input. The token that --add-bos-token puts at
            the beginning is one of them; the positions of fairseq's models do not count it.
    """
    setattr(task, _LONGEST_INPUT, length)


def longest_input(task: Any) -> int | None:
    """Return the length that the model of a task has set, or None."""
    return getattr(task, _LONGEST_INPUT, None)
