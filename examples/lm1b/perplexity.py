"""Perplexity per token and per word, from what fairseq-eval-lm prints; `examples/lm1b/evaluate.sh`."""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

EVALUATED = re.compile(r"Evaluated ([\d,]+) tokens")
LOSS = re.compile(r"Loss \(base 2\): (\S+), Perplexity")


class Perplexity(NamedTuple):
    """Both are of the same likelihood."""

    token: float  # what the model predicts: words or subwords, and ends of line
    word: float


class Unknown(Exception):
    """Why there is no perplexity."""


def perplexity(lines: Iterable[str], counts: Mapping[str, int]) -> Perplexity:
    """The likelihood of the whole set per token and per word.

    Args:
        lines: the output of fairseq-eval-lm
        counts: of the set, "tokens" and "words", ends of line among both

    Raises:
        Unknown: the output lacks a figure, or is of a part of the set: fairseq leaves out what is too long for a model
    """
    tokens = loss = None
    for line in lines:
        if match := EVALUATED.search(line):
            tokens = int(match[1].replace(",", ""))
        if match := LOSS.search(line):
            loss = float(match[1])
    if tokens is None or loss is None:
        raise Unknown("fairseq-eval-lm has printed no loss")
    if tokens != counts["tokens"]:
        raise Unknown(f"{tokens:,} of {counts['tokens']:,} tokens were evaluated, and a part is not comparable")
    if not math.isfinite(loss):
        raise Unknown(f"the loss is {loss}")
    return Perplexity(2**loss, 2 ** (loss * tokens / counts["words"]))


def statistics(data: Path, subset: str) -> dict[str, int]:
    """What prepare.sh has counted in a set."""
    path = data / "statistics.json"
    try:
        counts = json.loads(path.read_text())
    except FileNotFoundError:
        raise Unknown(f"{path} is missing; run examples/lm1b/prepare.sh") from None
    if "words" not in counts.get(subset, {}):
        sets = [name for name, numbers in counts.items() if "words" in numbers]
        raise Unknown(f"--gen-subset {subset}: must be one of {', '.join(sets)}")
    return counts[subset]


def _echo(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
        yield line


def main() -> int:
    arguments = argparse.ArgumentParser(prog="evaluate.sh", allow_abbrev=False)
    arguments.add_argument("data", type=Path)
    arguments.add_argument("--gen-subset", default="test")
    args, _ = arguments.parse_known_args()
    sys.stdin.reconfigure(newline="")  # a bar's lines end in \r
    lines = list(_echo(sys.stdin))  # all of it, or fairseq would fail for want of a reader
    try:
        counts = statistics(args.data, args.gen_subset)
        result = perplexity(lines, counts)
    except Unknown as reason:
        print(f"evaluate: error: {reason}", file=sys.stderr)
        return 1
    pieces = f"{counts['tokens']:,} subwords, " if args.data.name == "subword" else ""
    print(f"{args.gen_subset}: {pieces}{counts['words']:,} words, ends of line included")
    if pieces:
        print(f"perplexity per subword = {result.token:.2f}")
    print(f"perplexity per word = {result.word:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
