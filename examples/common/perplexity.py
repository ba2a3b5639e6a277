"""Read perplexity from the log of fairseq-eval-lm.

`fairseq-eval-lm ... | python -m common.perplexity DATA [FLAG OF fairseq-eval-lm ...]`
"""

import argparse
import math
import re
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy
from common.logs import pass_on

EVALUATED = re.compile(r"Evaluated ([\d,]+) tokens")
LOSS = re.compile(r"Loss \(base 2\): (\S+), Perplexity: (\S+)")
# the head of fairseq's MMapIndexedDataset: magic, version, type of the tokens, lines
INDEX = struct.Struct("<9sQBQ")


class Counts(NamedTuple):
    """The numbers of tokens and words of a set, ends of line included."""

    tokens: int  # words or subwords, whichever the model predicts
    words: int


class Cut(NamedTuple):
    """The windows that fairseq-eval-lm cuts a set into."""

    task: str = "language_modeling"
    tokens: int = 1024  # of a window

    def without_target(self, counts: Counts) -> int:
        """Return how many tokens are never predicted.

        In fairseq's truncated_bptt_lm the first token of a window is only read.
        """
        if self.task != "truncated_bptt_lm":
            return 0
        return math.ceil(counts.tokens / self.tokens)


class Perplexity(NamedTuple):
    """The perplexity of one likelihood, per token and per word."""

    token: float  # as fairseq prints it
    word: float


class Unknown(Exception):
    """There is no perplexity; the message says why."""


def perplexity(lines: Iterable[str], counts: Counts, only_read: int = 0) -> Perplexity:
    """Return the perplexity of the whole set, from the output of fairseq-eval-lm.

    Args:
        lines: the output
        counts: the numbers of the set
        only_read: how many of its tokens are never predicted (`Cut.without_target`); they get the
            mean loss of the others

    Raises:
        Unknown: a number is missing, or fairseq left out sentences that are too long for the model
    """
    tokens = None
    loss = None
    per_token = None
    for line in lines:
        if match := EVALUATED.search(line):
            tokens = int(match[1].replace(",", ""))
        if match := LOSS.search(line):
            loss = float(match[1])
            per_token = float(match[2])
    if tokens is None or loss is None:
        raise Unknown("fairseq-eval-lm has printed no loss")
    predicted = counts.tokens - only_read
    if tokens != predicted:
        raise Unknown(
            f"{tokens:,} of {predicted:,} tokens were evaluated; a part is not comparable"
        )
    if not (math.isfinite(loss) and math.isfinite(per_token)):
        raise Unknown(f"the loss is {loss}, the perplexity {per_token}")
    return Perplexity(per_token, 2 ** (loss * counts.tokens / counts.words))


def counts_of_index(data: Path, subset: str) -> Counts:
    """Count a set of words as fairseq-preprocess wrote it."""
    path = data / f"{subset}.idx"
    try:
        with path.open("rb") as file:
            head = file.read(INDEX.size)
            if len(head) < INDEX.size or not head.startswith(b"MMIDIDX\x00\x00"):
                raise Unknown(f"{path}: is not of prepare.sh")
            lines = INDEX.unpack(head)[-1]
            if path.stat().st_size != INDEX.size + 12 * lines:
                raise Unknown(f"{path}: is truncated or damaged")
            tokens = int(numpy.fromfile(file, dtype="<i4", count=lines).sum(dtype=numpy.int64))
    except OSError as error:
        raise Unknown(f"{path}: {error.strerror}") from error
    return Counts(tokens, tokens)


def report_of_tokens(data: Path, subset: str, counts: Counts, result: Perplexity) -> list[str]:
    """Return the line of evaluate.sh where the tokens are words or bytes.

    Args:
        data: the folder of the set; one named bytes has a token for each byte
        subset: the set, which this line does not name
        counts: the numbers of the set, which it does not name either
        result: the perplexity of the set
    """
    if data.name == "bytes":  # prepare.sh --breaks bytes
        return [f"bits per byte = {math.log2(result.word):.4f}"]
    return [f"perplexity = {result.token:.2f}"]


def _cut(args: argparse.Namespace) -> Cut:
    if not re.fullmatch("[1-9][0-9]*", args.tokens_per_sample):
        raise Unknown(f"--tokens-per-sample {args.tokens_per_sample}: must be a number such as 64")
    if args.task == "truncated_bptt_lm" and args.context_window != "0":
        raise Unknown(
            f"--context-window {args.context_window}: must be 0 with --task {args.task}; what a "
            "word sees before its window is in --model-overrides, such as \"{'mem_len': 640}\""
        )
    return Cut(args.task, int(args.tokens_per_sample))


def main(
    count: Callable[[Path, str], Counts] = counts_of_index,
    report: Callable[[Path, str, Counts, Perplexity], list[str]] = report_of_tokens,
) -> int:
    """Pass the log on to stderr, then print the lines of `report`.

    `count` reads the numbers of the set.
    """
    arguments = argparse.ArgumentParser(prog="evaluate.sh", allow_abbrev=False)
    arguments.add_argument("data", type=Path)
    arguments.add_argument("--gen-subset", default="test")
    arguments.add_argument("--task", default=Cut().task)
    arguments.add_argument("--tokens-per-sample", default=str(Cut().tokens))
    arguments.add_argument("--context-window", default="0")
    args, _ = arguments.parse_known_args()
    try:  # an error here ends fairseq-eval-lm too, before hours of evaluation
        cut = _cut(args)
        counts = count(args.data, args.gen_subset)
        only_read = cut.without_target(counts)
        sys.stdin.reconfigure(newline="")  # the lines of a progress bar end in \r
        result = perplexity(list(pass_on(sys.stdin)), counts, only_read)
    except Unknown as reason:
        print(f"evaluate: error: {reason}", file=sys.stderr)
        return 1
    if only_read > 0:
        print(
            f"{args.gen_subset}: {counts.tokens - only_read:,} of {counts.tokens:,} tokens are "
            f"predicted, all but the first of every {cut.tokens}"
        )
    for line in report(args.data, args.gen_subset, counts, result):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
