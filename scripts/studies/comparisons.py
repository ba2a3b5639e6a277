"""The comparisons of results/comparisons.csv, and the losses that they compare."""

import csv
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from studies.faults import fail
from studies.provenance import ROOT
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


def read_comparisons(path: Path) -> list[Comparison]:
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file)
        if lines.fieldnames != COLUMNS:
            fail(f"{path}: its first line must be {','.join(COLUMNS)}")
        try:
            return [comparison(line) for line in lines]
        except (AttributeError, ValueError) as error:  # too few columns; a number that is none
            fail(f"{path}, line {lines.line_num}: {error}")


def comparison(line: Mapping[str, str]) -> Comparison:
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
    """Return the loss by seed: nats a token, a byte or an answer, or the mean squared error."""
    values = study.values(row, metric)
    measure = study.measure(metric)
    if measure == "perplexity":
        return {seed: math.log(value) for seed, value in values.items()}
    if measure.startswith("bits"):
        return {seed: value * math.log(2) for seed, value in values.items()}
    return values


def paired_losses(study: Study, row: Row, base: Row, metric: str) -> list[tuple[float, float]]:
    """Return the loss of the row and that of the base, for each seed that both have."""
    ours = losses(study, row, metric)
    theirs = losses(study, base, metric)
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


def gains(study: Study, row: Row, base: Row, metric: str, is_ratio: bool = False) -> list[float]:
    """Return how much lower the loss of the row is by seed, or the logarithm of the ratio."""
    pairs = paired_losses(study, row, base, metric)
    if is_ratio:
        return [math.log(theirs / ours) for ours, theirs in pairs]
    return [theirs - ours for ours, theirs in pairs]


@functools.cache
def study_of(name: str, folder: Path) -> Study:
    return from_results(folder / f"{name}.json")
