"""The commands of a run: the scripts of its recipe, with the words of the grid."""

import itertools
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.faults import fail
from studies.grids import Grid, read_grid
from studies.provenance import ROOT
from studies.runs import Run, is_variable

EXAMPLES = ROOT / "examples"
# Variables that a result depends on. GPUS is not one: an update has the same tokens on any number
# of GPUs.
TRAINING = ("DATA", "BREAKS", "VARIANT", "MODEL", "SELECT", "PRECISION")
EVALUATION = ("AVERAGE", "METRIC")


def grid_of(path: Path, extra: Sequence[str] = ()) -> Grid:
    """Return the grid of a file, with the environment's variables and the command's flags."""
    grid = read_grid(path)
    if not (EXAMPLES / grid.example / "train.sh").exists():
        fail(f"{path}: example {grid.example!r}: examples/ has no such recipe")

    # The environment comes first, so that the grid's own words win. SAVE and CHECKPOINT are here
    # because they are refused as in a grid.
    train = [*from_environment([*TRAINING, "SAVE", "CHECKPOINT"]), *grid.train, *extra]
    evaluate = [*from_environment(EVALUATION), *grid.evaluate]
    return grid.model_copy(update={"train": tuple(train), "evaluate": tuple(evaluate)})


def from_environment(names: Iterable[str]) -> list[str]:
    """Return the variables that are set, as words of a grid."""
    return [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]


def command_of(
    run: Run, name: str, words: Sequence[str], save: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command of a script, and the variables that stand before it.

    Args:
        run: a run of the grid
        name: 'train' or 'evaluate'
        words: the words of the grid; {root}, {save} and {start} are filled in
        save: the folder of the run's checkpoints
    """
    start = ""
    if run.start:
        out = Path(save).parents[1]
        start = str(run.start.folder(out) / "checkpoints")
    for mark, path in (("{root}", str(ROOT)), ("{save}", save), ("{start}", start)):
        words = [word.replace(mark, path) for word in words]
    variables = dict(word.split("=", 1) for word in itertools.takewhile(is_variable, words))
    script = EXAMPLES / run.example / f"{name}.sh"
    return [str(script), *words[len(variables) :]], variables


def dry_run(
    run: Run, name: str, words: Sequence[str], variables: Mapping[str, str], **options: Any
) -> subprocess.CompletedProcess[str]:
    """Let a script print fairseq's command.

    Args:
        run: a run of the grid
        name: 'train' or 'evaluate'
        words: the words of the grid
        variables: SAVE, and the run's share of the machine if it has one
        options: those of subprocess.run
    """
    command, of_words = command_of(run, name, words, variables["SAVE"])
    environment = {**os.environ, **variables, **of_words, "DRY_RUN": "1"}
    return subprocess.run(command, env=environment, text=True, check=False, **options)
