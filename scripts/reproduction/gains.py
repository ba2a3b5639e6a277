"""By how much one row of a table is better than another, in what models of different quality can be compared by.

Above 0 is better: of perplexities the difference of their logarithms in percent, of BLEU, scores and F1 their points.
"""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Optional

from reproduction.results import Study
from reproduction.tables import cell


def unit(study: Study) -> str:
    return "% of perplexity" if study.measure.name == "perplexity" else study.measure.name


def short_unit(study: Study) -> str:
    return "%" if study.measure.name == "perplexity" else study.measure.name


def gain(study: Study, value: float, base: float) -> float:
    if study.measure.name == "perplexity":
        return 100 * (math.log(base) - math.log(value))
    return study.measure.gain(value, base)


def by_seed(study: Study, row: Sequence[str], base: Sequence[str], metric: Optional[str] = None) -> dict[int, float]:
    """Of the seeds that both rows have; by the metric that rows are compared by, if no other is given."""
    ours, theirs = (study.values(r, metric or study.metric) for r in (row, base))
    return {seed: gain(study, ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())}


def published(study: Study, row: Sequence[str], base: Sequence[str]) -> Optional[float]:
    """The paper's, of the set that ours is of; None where it has no number of that set for each."""
    numbers = [published_value(study, r) for r in (row, base)]
    return None if None in numbers else gain(study, *numbers)


def published_value(study: Study, row: Sequence[str]) -> Optional[float]:
    metrics = list(study.published_metrics)
    values = [value for value in cell(study.published, row).split("/") if value]
    if study.metric not in metrics or len(values) != len(metrics):
        return None
    return float(values[metrics.index(study.metric)])


class Trained(NamedTuple):
    """A row's gain over softmax after so many updates."""

    study: Study
    row: Sequence[str]
    updates: int
    by_seed: dict[int, float]


OF_LENGTH = {"--max-update", "--warmup-updates", "--seed"}


def by_updates(studies: Sequence[Study]) -> list[list[Trained]]:
    """Rows that differ in the length of the training alone, the shortest first."""
    found: dict[str, dict[int, Trained]] = defaultdict(dict)
    for study in studies:
        for row in study.rows:
            base = study.other(row, "softmax")
            recipes, updates = (list(study.field(row, name).values()) for name in ("train", "updates"))
            if base is None or row == base or not recipes or not updates:
                continue
            flags = {name: words for name, words in recipes[0].items() if name not in OF_LENGTH}
            evaluation = next(iter(study.field(row, "evaluate").values()))
            same = json.dumps([study.scale, study.part["example"], flags, evaluation], sort_keys=True)
            found[same].setdefault(updates[0], Trained(study, row, updates[0], by_seed(study, row, base)))
    return [[of_row[updates] for updates in sorted(of_row)] for of_row in found.values() if len(of_row) > 1]
