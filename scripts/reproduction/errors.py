"""How scripts/reproduce.py ends when something is wrong."""

import contextlib
import sys
from typing import NoReturn


class Problem(Exception):
    """With the results' files, in one line. It ends a command, but not the runs that are going on."""


def fail(message: str) -> NoReturn:
    print(f"reproduce: error: {message}", file=sys.stderr)
    sys.exit(2)


def warn(message: str) -> None:
    with contextlib.suppress(OSError):  # after SIGHUP the terminal may be gone
        print(f"reproduce: {message}", file=sys.stderr, flush=True)
