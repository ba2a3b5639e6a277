"""The losses of pre-training from the log of fairseq-validate: `... | python -m bert_pretraining.evaluate FLAG...`."""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from common.errors import failing

fail = failing("evaluate")
NUMBERS = ("mlm_loss", "nsp_loss", "nsp_accuracy")


def results(lines: Iterable[str], subset: str) -> dict[str, float]:
    """The numbers that fairseq-validate logs of a set."""
    found = None
    for line in lines:
        if match := re.search(rf"\| {re.escape(subset)} \| (\{{.*\}})", line):
            found = json.loads(match[1])
    if found is None:
        fail("fairseq-validate has logged no losses; its own words stand above")
    numbers = {name: float(found.get(f"{subset}_{name}", "nan")) for name in NUMBERS}
    for name, value in numbers.items():
        if not math.isfinite(value):
            fail(f"fairseq-validate: {name} is {value}")
    return numbers


def entropy(counts: np.ndarray) -> float:
    """In bits, of what occurs as often as `counts` says, int64 [V]."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def count_pieces(path: str, dictionary: str) -> np.ndarray:
    """How often each symbol occurs in a binarised set, int64 [V], ends of line left out."""
    from fairseq.data import Dictionary, data_utils

    symbols = Dictionary.load(dictionary)
    lines = data_utils.load_indexed_dataset(path, symbols)
    if lines is None:
        fail(f"{path}: no such set")
    counts = np.zeros(len(symbols), dtype=np.int64)
    for line in lines:
        np.add.at(counts, line.numpy(), 1)
    counts[symbols.eos()] = 0
    return counts


def main() -> None:
    arguments = argparse.ArgumentParser(prog="evaluate.sh", allow_abbrev=False)
    arguments.add_argument("data", type=Path)
    arguments.add_argument("--valid-subset", default="valid")
    args, _ = arguments.parse_known_args()
    if "," in args.valid_subset:
        fail(f"--valid-subset {args.valid_subset}: must be one set")
    if not (args.data / f"{args.valid_subset}.idx").is_file():
        fail(f"--valid-subset {args.valid_subset}: {args.data} has no such set")
    lines = []
    for line in sys.stdin:
        print(line, end="", file=sys.stderr, flush=True)
        lines.append(line)
    found = results(lines, args.valid_subset)
    counts = count_pieces(str(args.data / args.valid_subset), str(args.data / "dict.txt"))
    print(f"pieces by how often they occur in this set = {entropy(counts):.3f} bits")
    print(f"next sentences = {found['nsp_accuracy']:.1f} % right, {found['nsp_loss']:.3f} bits")
    print(f"mlm_loss = {found['mlm_loss']:.3f}")


if __name__ == "__main__":
    main()
