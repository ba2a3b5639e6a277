"""Flags whose default depends on --quick, and the least that each may be."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, NoReturn


def fill_defaults(
    options: Namespace,
    defaults: Mapping[str, Any],
    least: Mapping[str, int],
    fail: Callable[[str], NoReturn],
) -> None:
    """Set the flags that were not given, and refuse numbers that are too small.

    Args:
        options: the flags from the parser, None where one was not given; changed in place
        defaults: the default of each flag, by its name without dashes
        least: the smallest number of each flag, by its name without dashes
        fail: ends the program with a message
    """
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name, smallest in least.items():
        if getattr(options, name) < smallest:
            fail(f"--{name} {getattr(options, name)}: must be at least {smallest}")
