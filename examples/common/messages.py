"""What a preparation prints on stderr: an error that ends it, or a note."""

import sys

from common.errors import failing

fail = failing("prepare")


def note(message: str) -> None:
    print(f"prepare: {message}", file=sys.stderr)
