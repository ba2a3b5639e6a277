"""All flags of a run's fairseq-train, and whether its recipe has others by now.

A digest is of the grid's words alone; the rest stands in the recipe's train.sh, whose dry run prints it.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import sweep
from sweep import Run

Flags = Mapping[str, Sequence[str]]

FOLDERS = {"--user-dir", "--save-dir"}  # of one machine
# The machine's, or of what is printed and saved: a result does not depend on them. The seed is in every digest.
WITHOUT_EFFECT = FOLDERS | {
    "--amp", "--bf16", "--cpu", "--ddp-backend", "--device-id", "--fp16", "--keep-last-epochs", "--log-file",
    "--log-format", "--log-interval", "--memory-efficient-bf16", "--memory-efficient-fp16", "--no-epoch-checkpoints",
    "--no-progress-bar", "--num-workers", "--seed", "--tensorboard-logdir", "--wandb-project",
}  # fmt: skip
OF_THE_DATA = {"--cased"}  # train.sh finds it there
PATH = re.compile(r"(?<![\w.}])/(?:[^\s'\",:/]*/)*")  # what is before a path's last part


def flags_of(run: Run, place: Mapping[str, str]) -> dict[str, list[str]]:
    """As train.sh gives them with the variables of `place`; none where it prints no command."""
    command, variables = sweep.command_of(run.example, "train", run.train)
    environment = {**os.environ, **place, **variables, "DRY_RUN": "1"}
    try:
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
    except OSError:
        return {}
    lines = [line for line in printed.splitlines() if line.startswith("fairseq-train ")]
    if not lines:
        return {}
    flags = sweep.canonical(shlex.split(lines[-1])[2:])  # without program and data
    data = variables.get("DATA") or os.path.abspath(os.environ.get("DATA") or sweep.ROOT / "data" / run.example)
    known = {data: "{data}", str(sweep.ROOT): "{root}"}
    return {
        name: [without_paths(value, known) for value in values] for name, values in flags.items() if name not in FOLDERS
    }


def without_paths(text: str, known: Mapping[str, str] = {}) -> str:
    """Without what is one machine's: of other paths than the `known` the last part is left."""
    for folder, name in known.items():
        text = re.sub(rf"(?<!\w){re.escape(folder)}(?![\w.-])", name, text)
    return PurePath(text).name if text.startswith("/") else PATH.sub("", text)


def changed(flags: Any, run: Run) -> list[str]:
    """The flags that the run's recipe has otherwise than in `flags`; none where either is not known."""
    if not flags:
        return []
    gpus = "0" if "--cpu" in flags else flags.get("--distributed-world-size", ["1"])[0]
    now = of_recipe(run.example, without_seed(run.train), gpus, stamp(run.example))
    names = {name for name in flags.keys() | now.keys() if not name.startswith("--distributed-")}
    names -= WITHOUT_EFFECT | OF_THE_DATA
    return sorted(name for name in names if now and flags.get(name) != now.get(name))


def without_seed(words: Sequence[str]) -> tuple[str, ...]:
    """Runs that differ in the seed are of one recipe, which need not be asked for each."""
    return tuple(word for before, word in zip(["", *words], words) if "--seed" not in (before, word))


def stamp(example: str) -> tuple[int, ...]:
    """Of the scripts: a recipe may change while runs are going on."""
    paths = (sweep.EXAMPLES / example / "train.sh", sweep.EXAMPLES / "common" / "recipe.sh")
    return tuple(path.stat().st_mtime_ns for path in paths if path.exists())


@cache
def of_recipe(example: str, train: tuple[str, ...], gpus: str, stamp: tuple[int, ...]) -> Flags:
    return flags_of(Run(example, {}, train, {}), {"GPUS": gpus})


def script(run: Run) -> str:
    return str(Path("examples") / run.example / "train.sh")
