"""Read the runs of grids, compare rows seed by seed, and save them."""

import itertools
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweep import grid_of

from studies.grids import Grid, fail, read_grid, runs
from studies.inference import Estimate, paired
from studies.provenance import ROOT

Row = tuple[str, ...]
# of the last validation, in bits a token; a metric that needs no evaluation
LOSS = "validation loss"
# beginnings of measures
LOWER_IS_BETTER = ("perplexity", "loss", "bits", "nats", "mean squared error")


@dataclass(frozen=True)
class Study:
    """The runs of one grid."""

    name: str
    grid: Grid
    source: str  # the grid's file
    runs: Sequence[Mapping[str, Any]]
    # speed and memory of small trainings, measured in turn; only some files have it
    cost: Mapping[str, Any]

    @property
    def metrics(self) -> list[str]:
        return [
            metric
            for metric in self.grid.metrics
            if any(metric in run["metrics"] for run in self.runs)
        ]

    @property
    def metric(self) -> str:
        """Return the metric that rows are compared by."""
        return "test" if "test" in self.metrics else self.metrics[0]

    def measure(self, metric: str) -> str:
        """Return what evaluate.sh calls the metric, such as 'BLEU'. Older files have one name for
        all metrics.
        """
        if metric == LOSS:
            return "bits"
        found = (run for run in self.runs if metric in run["metrics"])
        return next(run.get("measures", {}).get(metric) or run["measure"] for run in found)

    @property
    def rows(self) -> list[Row]:
        """Return the rows that have a run or a cost, in the grid's order."""
        known = {tuple(run["labels"].values()) for run in self.runs}
        known |= {tuple(row["labels"].values()) for row in self.cost.get("rows", [])}
        return [row for row in itertools.product(*self.grid.axes.values()) if row in known]

    def baseline(self, row: Row) -> Row | None:
        """Return the row that differs from this one by having the baseline's label; None without
        one.
        """
        for i, labels in enumerate(self.grid.axes.values()):
            if self.grid.baseline in labels:
                return (*row[:i], self.grid.baseline, *row[i + 1 :])
        return None

    @property
    def groups(self) -> str:
        """Return the names of the axes other than the baseline's."""
        return ", ".join(
            axis for axis, labels in self.grid.axes.items() if self.grid.baseline not in labels
        )

    def variant(self, row: Row) -> str:
        """Return the label that the row is coloured by."""
        axes = list(self.grid.axes.values())
        return row[next((i for i, labels in enumerate(axes) if self.grid.baseline in labels), -1)]

    @property
    def whole_seeds(self) -> int:
        """Return how many seeds the point of the grid with the fewest has."""
        planned = [run for run in runs(self.grid) if run.evaluate]  # others only start from a trunk
        return min(len(self.values(tuple(run.labels.values()), self.metric)) for run in planned)

    @property
    def waits(self) -> bool:
        """Return True while a point of the grid lacks one of the planned seeds: nobody looks at
        results before.
        """
        return self.grid.seeds > 0 and self.whole_seeds < self.grid.seeds

    @property
    def loss_unit(self) -> str:
        """Return the unit of the validation losses in the points of the runs.

        fairseq logs bits. Recipes that train without fairseq, whose runs have none of its flags,
        log the unit of their endpoint.
        """
        if any(run.get("flags") for run in self.runs):
            return "bits"
        return self.measure(self.metric)

    def of(self, row: Row) -> list[Mapping[str, Any]]:
        return [run for run in self.runs if tuple(run["labels"].values()) == row]

    def values(self, row: Row, metric: str) -> dict[int, float]:
        """Return a metric by seed."""
        if metric == LOSS:
            return {
                run["seed"]: loss
                for run in self.of(row)
                if (loss := validation_loss(run)) is not None
            }
        return {
            run["seed"]: run["metrics"][metric] for run in self.of(row) if metric in run["metrics"]
        }

    def time_ratios(self, row: Row, base: Row) -> list[float]:
        """Return the CPU time of the updates of a row divided by that of another.

        There is one ratio for each seed that both have from the same kind of machine.
        """
        ours = self._times(row)
        theirs = self._times(base)
        return [ours[seed] / theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]

    def _times(self, row: Row) -> dict[tuple[int, str], float]:
        """Return the CPU seconds of the updates by seed and machine."""
        found = {}
        for run in self.of(row):
            seconds = last_point(run).get("cpu_seconds")
            if seconds:
                found[run["seed"], run["device"]] = seconds
        return found

    def published(self, row: Row) -> str:
        return self.grid.published.get("/".join(row), "")

    def difference(self, value: float, base: float, metric: str) -> float:
        measure = self.measure(metric)
        if measure == "perplexity":
            return 100 * (math.log(base) - math.log(value))
        return base - value if measure.startswith(LOWER_IS_BETTER) else value - base

    def decimals(self, metric: str) -> int:
        if metric == LOSS:
            return 3  # as fairseq logs it
        return 4 if self.measure(metric).startswith(("bits", "nats", "mean")) else 2

    def unit(self, metric: str) -> str:
        measure = self.measure(metric)
        return "%" if measure == "perplexity" else measure

    def published_gain(self, row: Row) -> float | None:
        """Return the paper's gain by the same metric; None if a cell lacks a number for some
        metric.
        """
        base = self.baseline(row)
        metrics = [
            metric for metric in self.grid.published_metrics if self.grid.measures(row, metric)
        ]
        cells = [self.published(r).split("/") for r in (row, base) if r]
        if (
            row == base
            or self.metric not in metrics
            or any(len(cell) != len(metrics) or "" in cell for cell in cells)
        ):
            return None
        return self.difference(
            *(float(cell[metrics.index(self.metric)]) for cell in cells), self.metric
        )


def gain(study: Study, row: Row, base: Row | None = None, metric: str = "") -> Estimate | None:
    """Return the gain over a row, by default the baseline, by a metric, by default the study's;
    None without a pair.
    """
    base = base or study.baseline(row)
    metric = metric or study.metric
    if base is None or base == row:
        return None
    ours = study.values(row, metric)
    theirs = study.values(base, metric)
    values = [
        study.difference(ours[seed], theirs[seed], metric)
        for seed in sorted(ours.keys() & theirs.keys())
    ]
    return paired(values) if values else None


def last_point(run: Mapping[str, Any]) -> Mapping[str, float]:
    return (run.get("points") or [{}])[-1]


def validation_loss(run: Mapping[str, Any]) -> float | None:
    """Return the loss of the last validation in bits, without label smoothing; None if the run has
    not validated.
    """
    points = (
        point["valid_loss"] for point in reversed(run.get("points", [])) if "valid_loss" in point
    )
    return run.get("valid_loss", next(points, None))


def from_results(path: Path) -> Study:
    """Read a file that --save wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        source, found, cost = ROOT / content["grid"], content["runs"], content.get("cost", {})
        if source.suffix != ".toml" or not any(
            map(source.resolve().is_relative_to, (ROOT, path.resolve().parent))
        ):
            raise ValueError(
                f"grid {content['grid']!r}: must be a .toml of this checkout, or below the file's "
                "folder"
            )
        if (
            not isinstance(found, list)
            or not all(map(is_run, found))
            or not any(run["metrics"] for run in found)
        ):
            raise ValueError("has runs that sweep.py has not written, or none")
        if not all(
            is_texts(row["labels"]) and is_numbers(row.get("time_ratios", []))
            for row in cost.get("rows", [])
        ):
            raise ValueError("its cost is damaged")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        fail(f"{path}: is no file of report.py --save: {error}")
    grid = read_grid(source)
    if not any(run["metrics"].keys() & grid.metrics.keys() for run in found):
        fail(
            f"{path}: its runs have none of the metrics of {content['grid']}: "
            f"{', '.join(grid.metrics)}"
        )
    return Study(path.stem, grid, content["grid"], found, cost)


def is_run(run: Any) -> bool:
    """Return True if a record has what sweep.py writes into each."""
    try:
        texts = [
            *(run.get(name) or "" for name in ("device", "commit", "data", "measure")),
            run["digest"],
        ]
        return (
            is_texts(
                dict(enumerate(texts)) | run["labels"] | run["versions"] | run.get("measures", {})
            )
            and type(run["seed"]) is int
            and is_numbers(
                [run["seed"], run["seconds"], *run["metrics"].values(), run.get("valid_loss", 0)]
            )
            and all(
                is_numbers([point["update"], *point.values()]) for point in run.get("points", [])
            )
            and (
                "perplexity" not in run.get("measure", "")
                or all(value > 0 for value in run["metrics"].values())
            )
        )
    except (LookupError, TypeError, AttributeError):
        return False


def is_texts(values: Mapping[Any, Any]) -> bool:
    return all(isinstance(value, str) for value in values.values())


def is_numbers(values: Iterable[Any]) -> bool:
    largest = sys.float_info.max  # an int can be larger; NaN is in no order
    return all(isinstance(value, int | float) and -largest <= value <= largest for value in values)


def from_runs(path: Path, folder: Path) -> Study:
    """Collect the finished runs of a grid. The environment must have the same variables as in the
    sweep.
    """
    found = [read_run(run) for run in sorted(folder.glob("*/run.json"))]
    grid = grid_of(path)
    # pilots have other metrics
    by_digest = {run["digest"]: run for run in found if run["metrics"].keys() & grid.metrics.keys()}
    chosen = runs(grid, sorted({run["seed"] for run in by_digest.values()}))
    # another grid may have given the run other labels
    mine = [
        {**by_digest[run.digest], "labels": dict(run.labels)}
        for run in chosen
        if run.digest in by_digest
    ]
    if not mine:
        fail(
            f"{folder}: has no finished run of {path}; run scripts/sweep.py, or set DATA and the "
            "like as it had"
        )
    absolute = path.resolve()
    source = absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute
    return Study(path.stem, grid, str(source), mine, {})


def read_run(path: Path) -> Mapping[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        fail(f"{path}: {error}")
    if not is_run(run):
        fail(f"{path}: is no run of sweep.py, or is damaged; remove its folder")
    return run


def with_kept(study: Study, path: Path) -> Study:
    """Add the runs that are only in the file that --save replaces, and its times, which the sweep
    does not measure.
    """
    old, known = from_results(path), {run["digest"] for run in study.runs}
    return replace(
        study,
        runs=[*study.runs, *(run for run in old.runs if run["digest"] not in known)],
        cost=old.cost,
    )


def save(study: Study, path: Path) -> None:
    """Write all runs to one file, a line for each."""
    lines = ",\n  ".join(json.dumps(run) for run in study.runs)
    cost = f'"cost": {json.dumps(study.cost)},\n "' if study.cost else '"'
    path.write_text(
        f'{{"grid": {json.dumps(study.source)},\n {cost}runs": [\n  {lines}\n ]}}\n',
        encoding="utf-8",
    )
