"""End a program of the recipes with an error in one line."""

import sys
from collections.abc import Callable
from typing import NoReturn


def failing(program: str) -> Callable[[str], NoReturn]:
    """Return a function that ends `program` with one line and status 1.

    The line is `<program>: error: <message>`.
    """

    def fail(message: str) -> NoReturn:
        close_bars()
        # Texts of other libraries may have several lines.
        line = " ".join(message.splitlines())
        print(f"{program}: error: {line}", file=sys.stderr)
        sys.exit(1)

    return fail


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind if it has none."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def close_bars() -> None:
    """Close the bars of tqdm, so that the error begins a new line."""
    if "tqdm" in sys.modules:
        for bar in list(getattr(sys.modules["tqdm"].tqdm, "_instances", ())):
            bar.close()
