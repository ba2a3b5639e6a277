"""How the programs of the recipes end when something is wrong."""

import sys
from collections.abc import Callable
from typing import NoReturn


def failing(program: str) -> Callable[[str], NoReturn]:
    """Return a function that ends `program` with one line, `<program>: error: <message>`, and status 1."""

    def fail(message: str) -> NoReturn:
        close_bars()
        print(f"{program}: error: {message}", file=sys.stderr)
        sys.exit(1)

    return fail


def close_bars() -> None:
    """Those of tqdm, if the program has any: its last line is to stand alone."""
    if "tqdm" in sys.modules:
        for bar in list(getattr(sys.modules["tqdm"].tqdm, "_instances", ())):
            bar.close()
