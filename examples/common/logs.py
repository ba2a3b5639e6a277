"""Read the lines that fairseq's commands log with --log-format json.

2026-01-31 12:00:00 | INFO | valid | {"epoch": 1, "valid_loss": "3.5"}
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator


def numbers_in(line: str, name: str) -> dict[str, str]:
    """Return the numbers of a line, by their names; {} if the line has another name, or none.

    Args:
        line: a line of the log
        name: the name of a set, such as "valid"; or "train_inner", for the numbers between
            validations
    """
    match = re.search(rf"\| {re.escape(name)} \| (\{{.*\}})", line)
    if match is None:
        return {}
    return json.loads(match[1])


def last_numbers(lines: Iterable[str], name: str) -> dict[str, str]:
    """Return the numbers of the last line of that name; {} if there is none. See `numbers_in`."""
    last: dict[str, str] = {}
    for line in lines:
        numbers = numbers_in(line, name)
        if numbers:
            last = numbers
    return last


def pass_on(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a log, and print each to stderr, where a user follows the program."""
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        yield line
