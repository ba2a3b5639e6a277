#!/usr/bin/env python3
"""Read the flags of scripts/demo.sh.

It needs the standard library alone, because nothing is installed yet.
"""

import argparse
from pathlib import Path

UPDATES = 300


def at_least_1(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def new_folder(text: str) -> Path:
    if Path(text).exists():
        raise argparse.ArgumentTypeError(f"{text}: is there already; must be a new folder")
    return Path(text)


def read_flags(words: "list[str] | None" = None) -> argparse.Namespace:
    """Return the flags of the command line; end the program if one is wrong, or after --help."""
    description = "Train fairseq's model and the Mixhead one with the same flags, and score both."
    parser = argparse.ArgumentParser(
        prog="scripts/demo.sh", description=description, allow_abbrev=False
    )
    text = "updates of each model (default: %(default)s)"
    parser.add_argument("--updates", type=at_least_1, default=UPDATES, metavar="N", help=text)
    text = "sentencepiece pieces (default: %(default)s)"
    parser.add_argument("--vocabulary", type=at_least_1, default=2000, metavar="N", help=text)
    text = "a new folder for all output (default: runs/demo/..., emptied)"
    parser.add_argument("--folder", type=new_folder, metavar="DIR", help=text)
    text = "of all random choices (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=1, metavar="N", help=text)
    return parser.parse_args(words)


if __name__ == "__main__":
    read_flags()
