"""The flag --seeds of scripts/sweep.py and of the examples that train with mixing and without."""

from argparse import ArgumentTypeError

LIMIT = 2**32  # of numpy's generators
HELP = "N stands for 1 to N; or FIRST-LAST (default: 1)"


def seeds(words: str) -> range:
    """Return 1 to 8 for '8', and 3 to 8 for '3-8'. Raises ArgumentTypeError for other words."""
    first, dash, last = words.partition("-")
    if not dash:
        first, last = "1", words
    if not first.isdecimal() or not last.isdecimal():
        raise ArgumentTypeError(f"{words}: must be a number or a range, such as 1-8")
    if not dash and int(last) < 1:
        raise ArgumentTypeError(f"{words}: must be at least 1")
    if int(last) >= LIMIT:
        raise ArgumentTypeError(f"{words}: must be less than {LIMIT}")
    if int(last) < int(first):
        raise ArgumentTypeError(f"{words}: must be a range that begins with its smaller number")
    return range(int(first), int(last) + 1)
