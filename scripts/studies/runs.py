"""The runs of a grid, and how each is identified."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies.faults import fail
from studies.grids import Grid, Row, labels_of

# ---- the words of a command --------------------------------------------------------------------


def is_variable(word: str) -> bool:
    """Return True for a word like MODEL=vanilla."""
    return re.match(r"[A-Z][A-Z0-9_]*=", word) is not None


def canonical(words: Sequence[str]) -> dict[str, list[str]]:
    """Return flag -> values; the last of several equal flags counts, as in fairseq."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags[name] = [value] if equals else []
        elif is_variable(word) and not name:
            variable, _, value = word.partition("=")
            flags[variable] = [value]
        else:
            flags.setdefault(name, []).append(word)
    return dict(sorted(flags.items()))


def in_order(words: Iterable[str]) -> tuple[str, ...]:
    """Return the variables first, and DATA as an absolute path."""
    absolute = []
    for word in words:
        name, _, value = word.partition("=")
        if name == "SAVE" or (name == "CHECKPOINT" and "{save}" not in value):
            fail(f"{word}: must not be set; sweep.py gives each run its own")
        if name == "DATA" and value:
            word = f"DATA={os.path.abspath(value)}"
        absolute.append(word)
    return tuple(sorted(absolute, key=lambda word: not is_variable(word)))


def as_name(words: str) -> str:
    """Return the words as a part of a file's name."""
    return re.sub(r"[^\w.=+-]+", "_", words)


# ---- a run -------------------------------------------------------------------------------------


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
    def row(self) -> Row:
        """Return the labels in the order of the axes."""
        return tuple(self.labels.values())

    @property
    def starts(self) -> "tuple[Run, ...]":
        """Return the runs that come before this one."""
        return (*self.start.starts, self.start) if self.start else ()

    @property
    def title(self) -> str:
        return f"{', '.join(self.row)}, seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Return the folder of the run; a grid with other labels may have named it."""
        for existing in out.glob(f"*-{self.digest}"):
            return existing
        name = as_name(self.title)[:60]  # a file's name has at most 255 bytes
        return out / f"{name}-{self.digest}"


# ---- all runs of a grid ------------------------------------------------------------------------


def runs(grid: Grid, seeds: Iterable[int] = (1,), only: Sequence[str] = ()) -> list[Run]:
    """Return every run of the grid, the last axis moving fastest.

    The seeds of a point follow one another.

    `only` chooses points: each word is labels with commas between them, all of which a point has.
    """
    refuse_unknown(grid, only)
    seeds = list(seeds)
    by_row_and_seed: dict[tuple[Row, int], Run] = {}
    for row in grid.points:
        start = grid.start_of(row)
        for seed in seeds:
            # The point to start from stands earlier in the grid, so its run is known.
            start_run = None if start is None else by_row_and_seed[start, seed]
            by_row_and_seed[row, seed] = run_of(grid, row, seed, start_run)
    all_runs = list(by_row_and_seed.values())
    refuse_twins(all_runs)
    return [run for run in all_runs if is_chosen(run, only)]


def refuse_unknown(grid: Grid, only: Sequence[str]) -> None:
    """End the command if a word of --only chooses nothing."""
    points = grid.points
    for words in only:
        labels = labels_of(words)
        for label in sorted(labels - grid.labels):
            known = ", ".join(label for axis in grid.axes.values() for label in axis)
            fail(f"--only {words}: {label!r} must be among the grid's labels: {known}")
        if not any(labels <= set(row) for row in points):
            fail(f"--only {words}: no point of the grid has all these labels")


def run_of(grid: Grid, row: Row, seed: int, start: Run | None) -> Run:
    """Return the run of a point; what stands later counts, so cells come last."""
    points = [axis[label] for axis, label in zip(grid.axes.values(), row)]
    train = list(grid.train)
    shared = list(grid.evaluate)
    for point in points:
        train += point.train
        shared += point.evaluate
    for cell in grid.cells_of(row):
        train += grid.cells[cell]

    evaluate = {}
    others_start_from_it = not set(row).isdisjoint(grid.starts.values())
    if not others_start_from_it:
        # evaluate.sh gets the variables of train.sh, too
        variables = [word for word in train if is_variable(word)]
        for name, metric in grid.metrics.items():
            if grid.measures(row, name):
                evaluate[name] = in_order([*variables, *shared, *metric.evaluate])

    words = in_order([*train, "--seed", str(seed)])
    return Run(grid.example, dict(zip(grid.axes, row)), seed, words, evaluate, start)


def refuse_twins(all_runs: Sequence[Run]) -> None:
    """End the command if two points train the same model."""
    known: dict[str, Run] = {}
    for run in all_runs:
        twin = known.setdefault(run.digest, run)
        if twin is not run:
            fail(f"two points of the grid are the same run: {twin.title}; {run.title}")


def is_chosen(run: Run, only: Sequence[str]) -> bool:
    labels = set(run.row)
    return not only or any(labels_of(words) <= labels for words in only)
