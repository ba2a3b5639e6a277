"""The comparisons of results/comparisons.csv, and the losses that they compare."""

import csv
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from studies.faults import fail
from studies.inference import Pair, shared
from studies.provenance import ROOT
from studies.records import is_perplexity
from studies.study import Row, Study, from_results

RESULTS = ROOT / "results"


@dataclass(frozen=True)
class Comparison:
    """One line of comparisons.csv: B, softmax with the same heads, and the best softmax.

    All three have the same task and the same number of updates.
    """

    task: str
    corpus: str  # empty for the tasks that are no text
    updates: int
    heads: str  # '4 of 32': four heads of size 32
    study: str  # the JSON file
    mixed: Row
    softmax: Row
    best: Row
    heads_of_best: str
    loss: str  # the metric
    is_ratio: bool  # compare by the ratio of the losses, where their difference is bimodal

    @property
    def head_size(self) -> int:
        return int(self.heads.split(" of ")[1])


COLUMNS = "task corpus updates heads study mixed softmax best heads-of-best loss scale".split()
SCALES = ("difference", "ratio")


def read_comparisons(path: Path) -> list[Comparison]:
    comparisons = []
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        if lines.fieldnames != COLUMNS:
            fail(f"{path}: its first line must be {','.join(COLUMNS)}")
        for line in lines:
            try:
                comparisons.append(comparison_of(line))
            except ValueError as error:
                fail(f"{path}, line {lines.line_num}: {error}")
    return comparisons


def comparison_of(line: Mapping[str, str]) -> Comparison:
    """Return the comparison of a line of DictReader. Raises ValueError for a wrong one."""
    # DictReader gives None to columns that a line lacks, and collects below None what is too many
    if None in line or None in line.values():
        raise ValueError(f"must have {len(COLUMNS)} columns")
    if not line["updates"].isdecimal():
        raise ValueError(f"updates: must be a number, not {line['updates']!r}")
    if not re.fullmatch(r"\d+ of \d+", line["heads"]):
        raise ValueError(f"heads: must be like '4 of 32', not {line['heads']!r}")
    if line["scale"] not in SCALES:
        raise ValueError(f"scale: must be {' or '.join(SCALES)}, not {line['scale']!r}")
    return Comparison(
        task=line["task"],
        corpus=line["corpus"],
        updates=int(line["updates"]),
        heads=line["heads"],
        study=line["study"],
        mixed=tuple(line["mixed"].split("/")),
        softmax=tuple(line["softmax"].split("/")),
        best=tuple(line["best"].split("/")),
        heads_of_best=line["heads-of-best"],
        loss=line["loss"],
        is_ratio=line["scale"] == "ratio",
    )


# ---- losses ------------------------------------------------------------------------------------


def losses(study: Study, row: Row, metric: str) -> dict[int, float]:
    """Return the loss by seed: nats a token, word, byte or answer, or the mean squared error."""
    values = study.values(row, metric)
    if not values:
        return {}
    measure = study.measure(metric)
    if is_perplexity(measure):
        return {seed: math.log(value) for seed, value in values.items()}
    if measure.startswith("bits"):
        return {seed: value * math.log(2) for seed, value in values.items()}
    return values


def loss_pairs(study: Study, row: Row, base: Row, metric: str) -> dict[int, Pair]:
    """Return the loss of the row and that of the base, for each seed that both have."""
    return shared(losses(study, row, metric), losses(study, base, metric))


def gains(
    study: Study, row: Row, base: Row, metric: str, is_ratio: bool = False
) -> dict[int, float]:
    """Return how much lower the loss of the row is by seed, or the logarithm of the ratio."""
    pairs = loss_pairs(study, row, base, metric)
    if is_ratio:
        return {seed: math.log(theirs / ours) for seed, (ours, theirs) in pairs.items()}
    return {seed: theirs - ours for seed, (ours, theirs) in pairs.items()}


@functools.cache
def study_of(name: str, folder: Path) -> Study:
    return from_results(folder / f"{name}.json")
