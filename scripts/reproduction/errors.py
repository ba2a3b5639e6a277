"""How scripts/reproduce.py ends when something is wrong."""

import sys
from typing import NoReturn


def fail(message: str) -> NoReturn:
    print(f"reproduce: error: {message}", file=sys.stderr)
    sys.exit(2)
