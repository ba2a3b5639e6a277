"""Read the grids of examples/grids/; list and identify their runs."""

import hashlib
import itertools
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

KEYS = {
    "example",
    "title",
    "train",
    "evaluate",
    "metrics",
    "axes",
    "cells",
    "baseline",
    "published",
    "seeds",
    "starts",
}
# Variables that a result depends on. GPUS is not one: an update has the same tokens on any number
# of GPUs.
TRAINING = ("DATA", "BREAKS", "VARIANT", "MODEL", "SELECT", "PRECISION")
EVALUATION = ("AVERAGE", "METRIC")


def fail(message: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).stem}: error: {message}", file=sys.stderr)
    sys.exit(2)


@dataclass(frozen=True)
class Point:
    """The words that one value of an axis adds to both commands; those like MODEL=vanilla set
    variables.
    """

    train: Sequence[str] = ()
    evaluate: Sequence[str] = ()


@dataclass(frozen=True)
class Grid:
    """All runs of a sweep."""

    example: str
    title: str
    base: Point
    metrics: Mapping[str, Sequence[str]]  # name -> flags of evaluate.sh
    # metric -> the label that its points have; other metrics are of every point
    only: Mapping[str, str]
    axes: Mapping[str, Mapping[str, Point]]  # axis -> label -> what it adds
    # "label,label" -> what such points add to train.sh; no others are run
    cells: Mapping[str, Sequence[str]]
    baseline: str  # the label that the others of its axis are compared with; the grid may lack it
    published: Mapping[str, str]  # "label/label" -> the paper's numbers
    published_metrics: Sequence[str]  # the metrics that the numbers of a cell are of
    starts: Mapping[str, str]  # label -> the label of the same axis whose run it starts from
    # report.py shows no result before every point has as many; 0: it shows what there is
    seeds: int

    def measures(self, labels: Iterable[str], metric: str) -> bool:
        """Return True if the point with these labels has the metric."""
        return metric not in self.only or self.only[metric] in labels


def read_grid(path: Path) -> Grid:
    """Read a TOML file; examples/README.md describes it."""
    try:
        return checked(tomllib.loads(path.read_text(encoding="utf-8")), path)
    except (OSError, ValueError, RecursionError) as error:
        fail(f"{path}: {error}")


def checked(content: Mapping[str, Any], path: Path) -> Grid:
    """Return the grid of a file. Raises ValueError for a wrong one."""
    if unknown := sorted(content.keys() - KEYS):
        raise ValueError(f"{', '.join(unknown)}: must be among {', '.join(sorted(KEYS))}")
    if not content.get("example") or not content.get("axes"):
        raise ValueError("needs example and axes")
    axes = {}
    for axis in table(content, "axes"):
        axes[axis] = {
            label: point(value, label) for label, value in table(content["axes"], axis).items()
        }
    labels = {label for axis in axes.values() for label in axis}
    metrics, only = {}, {}
    for metric, value in (
        table(content, "metrics") if "metrics" in content else {"result": ""}
    ).items():
        if isinstance(value, dict):
            metrics[metric], only[metric] = metric_of_some_points(value, metric, labels)
        else:
            metrics[metric] = value
    published, published_metrics = content.get("published", {}), list(metrics)
    if isinstance(published, str):  # the grid that has the paper's rows
        paper = read_grid(path.parent / published)
        published, published_metrics = paper.published, paper.published_metrics
    elif wrong := sorted(
        published.keys() - {"/".join(labels) for labels in itertools.product(*axes.values())}
    ):
        raise ValueError(f"published.{wrong[0]!r}: is no point of the grid")
    starts = table(content, "starts") if "starts" in content else {}
    for label, start in starts.items():
        same_axis = next((list(axis) for axis in axes.values() if label in axis), [])
        if start not in same_axis[: same_axis.index(label) if label in same_axis else 0]:
            raise ValueError(
                f"starts.{label!r} = {start!r}: must be an earlier label of the same axis"
            )
    cells = table(content, "cells") if "cells" in content else {}
    if wrong := [cell for cell in cells if not set(cell.split(",")) <= labels]:
        raise ValueError(f"cells.{wrong[0]!r}: is no point of the grid")
    return Grid(
        text(content, "example"),
        text(content, "title", path.stem),
        Point(flags(content, "train"), flags(content, "evaluate")),
        {metric: flags(metrics, metric) for metric in metrics},
        only,
        axes,
        {cell: flags(cells, cell) for cell in cells},
        text(content, "baseline", "softmax"),
        {label: text(published, label) for label in published},
        published_metrics,
        starts,
        planned_seeds(content),
    )


def metric_of_some_points(
    value: Mapping[str, Any], metric: str, labels: set[str]
) -> tuple[str, str]:
    """Return the flags of a metric that only the points of one label have, and this label."""
    if value.keys() != {"evaluate", "only"}:
        raise ValueError(f"metrics.{metric}: must be flags, or a table of evaluate and only")
    if value["only"] not in labels:
        raise ValueError(f"metrics.{metric}.only = {value['only']!r}: is no label of the grid")
    return text(value, "evaluate"), value["only"]


def planned_seeds(content: Mapping[str, Any]) -> int:
    """Return how many seeds every point must have before report.py shows a result."""
    seeds = content.get("seeds", 0)
    if type(seeds) is not int or seeds < 0:  # True is an int, too
        raise ValueError(f"seeds: must be a whole number of 0 or more, not {seeds!r}")
    return seeds


def table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(content[name], dict) or not content[name]:
        raise ValueError(f"{name}: must be a table that is not empty, not {content[name]!r}")
    return content[name]


def text(content: Mapping[str, Any], name: str, default: str = "") -> str:
    value = content.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name}: must be a text, not {value!r}")
    return value


def flags(content: Mapping[str, Any], name: str) -> Sequence[str]:
    value = text(content, name)
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"{name} = {value!r}: {error}") from error


def point(value: Any, label: str) -> Point:
    value = {"train": value} if isinstance(value, str) else value
    if not isinstance(value, dict) or not value.keys() <= {"train", "evaluate"}:
        raise ValueError(f"{label}: must be flags, or train and evaluate")
    return Point(flags(value, "train"), flags(value, "evaluate"))


# ---- runs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One point of the grid with one seed."""

    example: str
    labels: Mapping[str, str]  # axis -> label
    seed: int
    train: tuple[str, ...]
    # metric -> arguments; a run that others start from has none
    evaluate: Mapping[str, tuple[str, ...]]
    start: "Run | None" = None  # the run that it starts from

    @property
    def digest(self) -> str:
        """Return a digest of the training's flags and variables; their order has no effect."""
        flags = {"example": self.example, "train": canonical(self.train)}
        if self.start:
            flags["start"] = self.start.digest
        return hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def starts(self) -> "tuple[Run, ...]":
        """Return the runs that come before this one."""
        return (*self.start.starts, self.start) if self.start else ()

    @property
    def title(self) -> str:
        return f"{', '.join(self.labels.values())}, seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Return the folder of the run; a grid with other labels may have named it."""
        name = f"{as_name(self.title)[:60]}-{self.digest}"  # a file name has at most 255 bytes
        return next(out.glob(f"*-{self.digest}"), out / name)


def canonical(words: Sequence[str]) -> dict[str, list[str]]:
    """Return flag -> values; the last of several equal flags counts, as in fairseq."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags[name] = [value] if equals else []
        elif is_variable(word) and not name:
            flags[word.partition("=")[0]] = [word.partition("=")[2]]
        else:
            flags.setdefault(name, []).append(word)
    return dict(sorted(flags.items()))


def as_name(words: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", words)


def is_variable(word: str) -> bool:
    return re.match(r"[A-Z][A-Z0-9_]*=", word) is not None


def runs(grid: Grid, seeds: Iterable[int] = (1,), only: Sequence[str] = ()) -> list[Run]:
    """Return every run of the grid, the last axis moving fastest; the seeds of a point follow one
    another.
    """
    found: dict[tuple[str | int, ...], Run] = {}  # by labels and seed
    for labels in itertools.product(*grid.axes.values()):
        cells = [
            Point(own) for cell, own in grid.cells.items() if set(cell.split(",")) <= set(labels)
        ]
        if grid.cells and not cells:
            continue
        points = [
            grid.base,
            *(axis[label] for axis, label in zip(grid.axes.values(), labels)),
            *cells,
        ]
        train = [word for point in points for word in point.train]
        shared = [word for point in points for word in point.evaluate]
        variables = [word for word in train if is_variable(word)]
        evaluate = {
            metric: in_order([*variables, *shared, *flags])
            for metric, flags in grid.metrics.items()
            if grid.measures(labels, metric) and not set(labels) & set(grid.starts.values())
        }
        before = tuple(grid.starts.get(label, label) for label in labels)
        for seed in seeds:
            words = in_order([*train, "--seed", str(seed)])
            start = found[(*before, seed)] if before != labels else None
            found[(*labels, seed)] = Run(
                grid.example, dict(zip(grid.axes, labels)), seed, words, evaluate, start
            )
    digests = [run.digest for run in found.values()]
    if twice := [run for run in found.values() if digests.count(run.digest) > 1]:
        fail(f"two points of the grid are the same run: {twice[0].title}; {twice[1].title}")
    chosen = [set(labels.split(",")) for labels in only] or [set()]
    return [
        run
        for run in found.values()
        if any(labels <= set(run.labels.values()) for labels in chosen)
    ]


def in_order(words: Iterable[str]) -> tuple[str, ...]:
    """Return the variables first, and DATA as an absolute path."""
    found = []
    for word in words:
        name, _, value = word.partition("=")
        if name == "SAVE" or (name == "CHECKPOINT" and "{save}" not in value):
            fail(f"{word}: must not be set; sweep.py gives each run its own")
        found.append(f"DATA={os.path.abspath(value)}" if name == "DATA" and value else word)
    return tuple(sorted(found, key=lambda word: not is_variable(word)))
