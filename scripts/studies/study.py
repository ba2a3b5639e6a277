"""A study: the runs of one grid, compared row by row and seed by seed."""

import functools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from studies import records
from studies.commands import grid_of
from studies.faults import fail
from studies.grids import Grid, Row, read_grid
from studies.inference import Estimate, paired, shared
from studies.provenance import ROOT
from studies.runs import Run, canonical, runs

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
    runs: Sequence[Mapping[str, Any]]  # each is a records.RunRecord
    cost: Mapping[str, Any]  # a records.Cost; only some files have it

    # ---- metrics and their units

    @property
    def metrics(self) -> list[str]:
        """Return the metrics that some run has, in the grid's order."""
        known = {metric for run in self.runs for metric in run["metrics"]}
        return [metric for metric in self.grid.metrics if metric in known]

    @property
    def metric(self) -> str:
        """Return the metric that rows are compared by."""
        return "test" if "test" in self.metrics else self.metrics[0]

    def measure(self, metric: str) -> str:
        """Return what evaluate.sh calls the metric, such as 'BLEU'."""
        if metric == LOSS:
            return "bits"
        run = next(run for run in self.runs if metric in run["metrics"])
        return records.measure_of(run, metric)

    def decimals(self, metric: str) -> int:
        """Return how many decimals of a metric are shown."""
        if metric == LOSS:
            return 3  # as fairseq logs it
        return 4 if self.measure(metric).startswith(("bits", "nats", "mean")) else 2

    def unit(self, metric: str) -> str:
        """Return the unit of gains by a metric."""
        measure = self.measure(metric)
        return "%" if records.is_perplexity(measure) else measure

    @property
    def loss_unit(self) -> str:
        """Return the unit of the validation losses in the points of the runs.

        fairseq logs bits. Recipes that train without fairseq, whose runs have none of its flags,
        log the unit of their endpoint.
        """
        if any(run.get("flags") for run in self.runs):
            return "bits"
        return self.measure(self.metric)

    def difference(self, value: float, base: float, metric: str) -> float:
        """Return how much better a value is than another; above 0 is better.

        For perplexities this is the difference of the logarithms in percent.
        """
        measure = self.measure(metric)
        if records.is_perplexity(measure):
            return 100 * (math.log(base) - math.log(value))
        if measure.startswith(LOWER_IS_BETTER):
            return base - value
        return value - base

    # ---- rows

    @property
    def rows(self) -> list[Row]:
        """Return the rows that have a run or a cost, in the grid's order."""
        known = {row_of(run) for run in self.runs}
        known |= {row_of(cost) for cost in self.cost.get("rows", [])}
        return [row for row in self.grid.rows if row in known]

    def baseline(self, row: Row) -> Row | None:
        """Return the row that differs from this one by the baseline's label; None without one."""
        axis = self._compared_axis
        if axis is None:
            return None
        return (*row[:axis], self.grid.baseline, *row[axis + 1 :])

    def variant(self, row: Row) -> str:
        """Return the label that the row is coloured by."""
        return row[self._variant_axis]

    def group(self, row: Row) -> str:
        """Return the labels of a row other than its variant."""
        axis = self._variant_axis
        return ", ".join([*row[:axis], *row[axis + 1 :]])

    @property
    def groups(self) -> str:
        """Return the names of the axes that a group has labels of."""
        return self.group(tuple(self.grid.axes))

    @property
    def _variant_axis(self) -> int:
        """Return the number of the axis whose labels are the variants."""
        axis = self._compared_axis
        return len(self.grid.axes) - 1 if axis is None else axis

    @property
    def _compared_axis(self) -> int | None:
        """Return the number of the axis that has the baseline; None if none has it."""
        for number, labels in enumerate(self.grid.axes.values()):
            if self.grid.baseline in labels:
                return number
        return None

    # ---- values

    def runs_of(self, row: Row) -> list[Mapping[str, Any]]:
        """Return the runs of a row."""
        return [run for run in self.runs if row_of(run) == row]

    def values(self, row: Row, metric: str) -> dict[int, float]:
        """Return a metric by seed."""
        values = {}
        for run in self.runs_of(row):
            value = validation_loss(run) if metric == LOSS else run["metrics"].get(metric)
            if value is not None:
                values[run["seed"]] = value
        return values

    def differences(self, row: Row, base: Row, metric: str) -> dict[int, float]:
        """Return how much better a row is than another, by each seed that both have."""
        pairs = shared(self.values(row, metric), self.values(base, metric))
        differences = {}
        for seed, (ours, theirs) in pairs.items():
            differences[seed] = self.difference(ours, theirs, metric)
        return differences

    def time_ratios(self, row: Row, base: Row) -> list[float]:
        """Return the CPU time of the updates of a row divided by that of another.

        There is one ratio for each seed that both have from the same kind of machine.
        """
        pairs = shared(self._times(row), self._times(base))
        return [ours / theirs for ours, theirs in pairs.values()]

    def _times(self, row: Row) -> dict[tuple[int, str], float]:
        """Return the CPU seconds of the updates by seed and machine."""
        times = {}
        for run in self.runs_of(row):
            points = run.get("points") or [{}]
            seconds = points[-1].get("cpu_seconds")
            if seconds:
                times[run["seed"], run.get("device", "")] = seconds
        return times

    # ---- planned seeds

    @functools.cached_property  # to plan the grid takes a SHA-256 for each run
    def whole_seeds(self) -> set[int]:
        """Return the seeds that every point of the grid has."""
        # A run without metrics is one from which others start.
        planned = [run for run in runs(self.grid) if run.evaluate]
        return set.intersection(*(set(self.values(run.row, self.metric)) for run in planned))

    @property
    def waits(self) -> bool:
        """Return True while a point of the grid lacks one of the planned seeds.

        Nobody looks at results before.
        """
        return self.grid.seeds > 0 and len(self.whole_seeds) < self.grid.seeds

    # ---- the paper's numbers

    def published(self, row: Row) -> str:
        """Return the paper's numbers of a row, one for each metric; empty without any."""
        return self.grid.published.get("/".join(row), "")

    def published_gain(self, row: Row) -> float | None:
        """Return the paper's gain by the same metric.

        None if a cell lacks a number for some metric.
        """
        base = self.baseline(row)
        if base is None or base == row:
            return None
        ours = self._published_value(row)
        theirs = self._published_value(base)
        if ours is None or theirs is None:
            return None
        return self.difference(ours, theirs, self.metric)

    def _published_value(self, row: Row) -> float | None:
        """Return the paper's number of a row for the metric that rows are compared by."""
        numbers = self.published(row).split("/")
        metrics = [name for name in self.grid.published_metrics if self.grid.measures(row, name)]
        if len(numbers) != len(metrics) or "" in numbers or self.metric not in metrics:
            return None
        # '85±0.1' is a mean with its spread
        return float(numbers[metrics.index(self.metric)].partition("±")[0])


def row_of(record: Mapping[str, Any]) -> Row:
    """Return the row of a run, or of a cost."""
    return tuple(record["labels"].values())


def validation_loss(run: Mapping[str, Any]) -> float | None:
    """Return the loss of the last validation in bits, without label smoothing.

    None if the run has not validated.
    """
    if "valid_loss" in run:
        return run["valid_loss"]
    for point in reversed(run.get("points", [])):
        if "valid_loss" in point:
            return point["valid_loss"]
    return None


def gain(study: Study, row: Row, base: Row | None = None, metric: str = "") -> Estimate | None:
    """Return how much better a row is than another by a metric; None without a pair.

    Args:
        study: the runs of both
        row: the one whose gain it is
        base: the one that it is compared with; None for the baseline of the row
        metric: its name; empty for the one that rows of the study are compared by
    """
    base = base or study.baseline(row)
    metric = metric or study.metric
    if base is None or base == row:
        return None
    differences = study.differences(row, base, metric)
    return paired(differences) if differences else None


# ---- reading and writing -----------------------------------------------------------------------


def from_results(path: Path) -> Study:
    """Read a file that --save wrote; refuse one whose runs do not fit its grid."""
    study = saved_study(path)
    refuse_strange_runs(study, path)
    return study


def saved_study(path: Path) -> Study:
    """Read a file that --save wrote. Its runs may be of an older form of the grid."""
    try:
        content = records.read_results(path)
        source = grid_file(content["grid"], path)
    except (OSError, ValueError) as error:
        fail(f"{path}: is no file of report.py --save: {error}")
    grid = read_grid(source)
    if not any(run["metrics"].keys() & grid.metrics.keys() for run in content["runs"]):
        fail(
            f"{path}: its runs have none of the metrics of {content['grid']}: "
            f"{', '.join(grid.metrics)}"
        )
    return Study(path.stem, grid, content["grid"], content["runs"], content.get("cost", {}))


def refuse_strange_runs(study: Study, path: Path) -> None:
    """End the command if a table of the study would leave out or replace a run of the file."""
    points = set(study.grid.rows)
    known = set()
    for run in study.runs:
        row = row_of(run)
        title = f"{', '.join(row)}, seed {run['seed']}"
        if row not in points:
            fail(f"{path}: {title}: is no point of {study.source}")
        if (row, run["seed"]) in known:
            fail(f"{path}: {title}: has two runs, of other flags or another text; must have one")
        known.add((row, run["seed"]))


def grid_file(name: str, results: Path) -> Path:
    """Return the grid's file that results name.

    Raises ValueError for a file of somewhere else, because results may come from other people.
    """
    source = ROOT / name
    allowed = (ROOT, results.resolve().parent)
    if source.suffix != ".toml" or not any(map(source.resolve().is_relative_to, allowed)):
        raise ValueError(
            f"grid: must be a .toml of this checkout, or below the file's folder, not {name!r}"
        )
    return source


def from_runs(path: Path, folder: Path) -> Study:
    """Collect the finished runs of a grid.

    The environment must have the same variables as in the sweep.
    """
    grid = grid_of(path)
    by_digest = {}
    for file in sorted(folder.glob("*/run.json")):
        run = read_run(file)
        if run["metrics"].keys() & grid.metrics.keys():  # pilots have other metrics
            by_digest[run["digest"]] = run

    seeds = sorted({run["seed"] for run in by_digest.values()})
    of_grid = []
    for planned in runs(grid, seeds):
        if planned.digest not in by_digest:
            continue
        run = by_digest[planned.digest]
        metrics = metrics_of_grid(run, planned)
        if metrics.keys() & grid.metrics.keys():
            # another grid may have given the run other labels
            of_grid.append({**run, "metrics": metrics, "labels": dict(planned.labels)})
    if not of_grid:
        fail(
            f"{folder}: has no finished run of {path}; run scripts/sweep.py, or set DATA and the "
            "like as it had"
        )
    absolute = path.resolve()
    source = absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else absolute
    return Study(path.stem, grid, str(source), of_grid, {})


def metrics_of_grid(record: Mapping[str, Any], planned: Run) -> dict[str, float]:
    """Return the metrics of a run; say which are left out, because the grid has other flags now.

    scripts/sweep.py evaluates those again.

    Args:
        record: of the run. Older ones do not know the flags of their metrics, which then count
        planned: the run in the grid
    """
    metrics = dict(record["metrics"])
    if "evaluate" not in record:
        return metrics
    for metric, words in planned.evaluate.items():
        if metric in metrics and record["evaluate"].get(metric) != canonical(words):
            del metrics[metric]
            print(
                f"{planned.title}: {metric} is left out, because it was evaluated with other flags "
                "than the grid has now; scripts/sweep.py evaluates it again",
                file=sys.stderr,
            )
    return metrics


def read_run(path: Path) -> Mapping[str, Any]:
    try:
        return records.read_run(path)
    except (OSError, json.JSONDecodeError) as error:
        fail(f"{path}: {error}")
    except ValueError as error:
        fail(f"{path}: is no run of sweep.py, or is damaged: {error}; remove its folder")


def with_kept(study: Study, path: Path) -> Study:
    """Add the runs that are only in the file that --save replaces.

    Also its times, which the sweep does not measure. A file of another grid, or with other runs of
    the same points and seeds, ends the command.
    """
    old = saved_study(path)
    if old.source != study.source:
        fail(f"--save {path}: has runs of {old.source}; must be a new file, or of {study.source}")
    known = {run["digest"] for run in study.runs}
    kept = [run for run in old.runs if run["digest"] not in known]
    merged = replace(study, runs=[*study.runs, *kept], cost=old.cost)
    refuse_strange_runs(merged, path)
    return merged


def save(study: Study, path: Path) -> None:
    """Write all runs to one file."""
    records.write_results(path, study.source, study.runs, study.cost)
