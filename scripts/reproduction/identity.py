"""What a run is known by: the words of its grid with the seed, PRECISION, its evaluations, and its recipe's flags."""

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sweep
from sweep import Grid, Run

from reproduction import recipes, tables
from reproduction.errors import Problem

WITHOUT = ("DATA", "SAVE", "CHECKPOINT")  # variables that are paths of one machine


class Pair(NamedTuple):
    """A run as it is trained here, and as it is known everywhere: without DATA, which is one machine's."""

    run: Run
    bare: Run

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(label for axis, label in self.run.labels.items() if axis != "seed")

    @property
    def seed(self) -> int:
        return int(self.run.labels["seed"])


def pairs(grid: Grid, seeds: int, only: Sequence[str] = ()) -> list[Pair]:
    """The runs of a grid without seeds, `only` some rows of it."""
    sweep.from_environment()  # refuses what must not be set for any sweep
    for name in (*sweep.TRAINING, *sweep.EVALUATION):
        if name not in ("DATA", "PRECISION") and os.environ.get(name):
            raise Problem(
                f"{name}={os.environ[name]}: set in the environment; the rows of a table set it themselves: unset it"
            )
    with_seeds = tables.seeded(grid, seeds)

    def in_environment(*names: str) -> Grid:
        words = shlex.join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
        return with_seeds._replace(base=grid.base._replace(train=f"{words} {grid.base.train}"))

    found = map(Pair, sweep.runs(in_environment("DATA", "PRECISION")), sweep.runs(in_environment("PRECISION")))
    rows = set(tables.chosen(grid, only))
    return [pair for pair in found if pair.labels in rows]


def is_of(known: Mapping[str, Any], bare: Run) -> bool:
    """Whether an entry is of this very run, with all its numbers, by the recipe as it is now."""
    return (
        known["digest"] == bare.digest
        and known["evaluate"] == evaluations(bare)
        and not recipes.changed(known.get("flags"), bare, known.get("evaluation_flags"))
    )


def own_words(words: Sequence[str]) -> dict[str, list[str]]:
    """Flag -> values of a grid's words, without what is one machine's."""
    return {
        name: [recipes.without_paths(value) for value in values]
        for name, values in sweep.canonical(words).items()
        if name not in WITHOUT
    }


def evaluations(run: Run) -> dict[str, dict[str, list[str]]]:
    return {metric: own_words(words) for metric, words in run.evaluate.items()}


def precision(train: Mapping[str, Sequence[str]]) -> str:
    return f"PRECISION={train['PRECISION'][0]}" if train.get("PRECISION") else "the machine's own precision"


def refuse_other_precision(runs: Sequence[Mapping[str, Any]], grid: Grid, where: str) -> None:
    """What is kept of `runs` would be beside runs that it cannot be compared with, or would have to leave for them."""
    own = {precision(sweep.canonical(pair.bare.train)) for pair in pairs(grid, 1)}
    there = {precision(entry.get("train", {})) for entry in runs}
    if other := sorted(there - own):
        raise Problem(
            f"{where}: has runs of {other[0]}, not of {' or '.join(sorted(own))}; --results FOLDER keeps them apart"
        )
