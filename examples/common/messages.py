"""Print the messages of a preparation to stderr: an error, which ends it, or a note."""

import sys

from common.errors import failing

fail = failing("prepare")


def note(message: str) -> None:
    print(f"prepare: {message}", file=sys.stderr)
