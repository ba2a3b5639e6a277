"""All flags of a run's training and evaluations, and whether its recipe has others by now.

A digest is of the grid's words alone; the rest stands in the recipe's scripts, whose dry runs print it.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import sweep
from sweep import Run

Flags = Mapping[str, Sequence[str]]

FOLDERS = {"--user-dir", "--save-dir", "--path", "--results-path"}  # of one machine
HALF = {"--fp16", "--bf16", "--amp", "--memory-efficient-fp16", "--memory-efficient-bf16"}
# The machine's, or of what is printed and saved. The seed is in every digest; conditions.py sees to the precision.
WITHOUT_EFFECT = FOLDERS | HALF | {
    "--cpu", "--ddp-backend", "--device-id", "--keep-last-epochs", "--log-file", "--log-format", "--log-interval",
    "--no-epoch-checkpoints", "--no-progress-bar", "--num-workers", "--seed", "--tensorboard-logdir", "--wandb-project",
}  # fmt: skip
OF_THE_DATA = {"--cased"}  # train.sh finds it there
PATH = re.compile(r"(?<![\w.}])/(?:[^\s'\",:/]*/)*")  # what is before a path's last part


def dry_run(
    example: str, name: str, arguments: Sequence[str], place: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Of a script, with `place`'s variables. OSError where it cannot be started."""
    command, variables = sweep.command_of(example, name, arguments)
    environment = {**os.environ, **place, **variables, "DRY_RUN": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def command_in(text: str) -> tuple[str, ...]:
    """The words behind fairseq's command, its data first, as a dry run prints them; empty if it prints none."""
    lines = [line for line in text.splitlines() if line.startswith("fairseq-")]
    return tuple(shlex.split(lines[-1])[1:]) if lines else ()


def printed(example: str, name: str, arguments: Sequence[str], place: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return command_in(dry_run(example, name, arguments, place).stdout)
    except OSError:
        return ()


class Answer(NamedTuple):
    """What train.sh says of a run."""

    refusal: str  # why it could not begin; '' if it could, as far as the script can tell
    data: tuple[Path, ...]  # folders of prepared text
    flags: Flags

    @property
    def gpus(self) -> str:
        return gpus(self.flags)


def ask(run: Run, place: Mapping[str, str]) -> Answer:
    """OSError where the script cannot be started."""
    done = dry_run(run.example, "train", run.train, place)
    words = command_in(done.stdout)
    data = folders(words)
    refusal = ""
    if done.returncode:
        said = done.stderr.strip().splitlines()
        refusal = f"examples/{run.example}/train.sh: {said[-1] if said else f'ended with status {done.returncode}'}"
    elif gone := next((folder for folder in data if not folder.is_dir()), None):
        refusal = f"{gone}: no such folder; examples/{run.example}/prepare.sh makes it"
    return Answer(refusal, data, as_flags(words, run.example, run.train))


def folders(words: Sequence[str]) -> tuple[Path, ...]:
    return tuple(Path(folder) for word in words[:1] for folder in word.split(":"))


def gpus(flags: Flags) -> str:
    """As GPUS= says it."""
    return "0" if "--cpu" in flags else flags.get("--distributed-world-size", ["1"])[0]


def precision(flags: Flags) -> str:
    """What a training computes in."""
    return next((name.lstrip("-") for name in sorted(HALF & flags.keys())), "fp32")


def flags_of(run: Run, place: Mapping[str, str]) -> dict[str, list[str]]:
    """As train.sh gives them with the variables of `place`; empty where it prints no command."""
    return flags_printed(run.example, "train", run.train, place)


def data_of(run: Run, place: Mapping[str, str]) -> tuple[Path, ...]:
    """The folders of prepared text that train.sh gives; empty where it prints no command."""
    return folders(printed(run.example, "train", run.train, place))


def flags_printed(example: str, name: str, arguments: Sequence[str], place: Mapping[str, str]) -> dict[str, list[str]]:
    return as_flags(printed(example, name, arguments, place), example, arguments)


def as_flags(words: Sequence[str], example: str, arguments: Sequence[str]) -> dict[str, list[str]]:
    """Of a command that a script was given `arguments` for, without its data and without paths of one machine."""
    flags = sweep.canonical(words[1:])
    _, variables = sweep.command_of(example, "train", arguments)
    data = variables.get("DATA") or os.path.abspath(os.environ.get("DATA") or sweep.ROOT / "data" / example)
    known = {data: "{data}", str(sweep.ROOT): "{root}"}
    return {
        name: [without_paths(value, known) for value in values] for name, values in flags.items() if name not in FOLDERS
    }


def without_paths(text: str, known: Mapping[str, str] = {}) -> str:
    """Without what is one machine's: of other paths than the `known` the last part is left."""
    for folder, name in known.items():
        text = re.sub(rf"(?<!\w){re.escape(folder)}(?![\w.-])", name, text)
    return PurePath(text).name if text.startswith("/") else PATH.sub("", text)


def evaluation_flags(run: Run, metric: str) -> Flags:
    """As evaluate.sh gives them on any machine; empty where it prints no command."""
    return of_evaluation(run.example, run.evaluate[metric], stamp(run.example))


def changed(flags: Any, run: Run, evaluations: Any = None) -> list[str]:
    """The flags that the run's recipe has otherwise than in `flags`, or in what `evaluations` has of each metric.

    Of what is not known none are.
    """
    found = training_changed(flags, run) if flags else []
    for metric, known in (evaluations or {}).items():
        if metric in run.evaluate and known:
            found += different(known, evaluation_flags(run, metric))
    return sorted(set(found))


def training_changed(flags: Flags, run: Run) -> list[str]:
    now = of_recipe(run.example, without_seed(run.train), gpus(flags), stamp(run.example))
    return different(flags, now)


def different(known: Flags, now: Flags) -> list[str]:
    """The names of the flags that a result depends on; empty if there are none now."""
    names = {name for name in known.keys() | now.keys() if not name.startswith("--distributed-")}
    names -= WITHOUT_EFFECT | OF_THE_DATA
    return [name for name in names if now and known.get(name) != now.get(name)]


def without_seed(words: Sequence[str]) -> tuple[str, ...]:
    """Runs that differ in the seed are of one recipe, which need not be asked for each."""
    return tuple(word for before, word in zip(["", *words], words) if "--seed" not in (before, word))


def stamp(example: str) -> tuple[int, ...]:
    """Of the scripts: a recipe may change while runs are going on."""
    own = (sweep.EXAMPLES / example / f"{name}.sh" for name in ("train", "evaluate"))
    paths = (*own, sweep.EXAMPLES / "common" / "recipe.sh")
    return tuple(path.stat().st_mtime_ns for path in paths if path.exists())


@cache
def of_recipe(example: str, train: tuple[str, ...], gpus: str, stamp: tuple[int, ...]) -> Flags:
    return flags_of(Run(example, {}, train, {}), {"GPUS": gpus})


@cache
def of_evaluation(example: str, words: tuple[str, ...], stamp: tuple[int, ...]) -> Flags:
    """Without --cpu, which is of the machine."""
    found = flags_printed(example, "evaluate", words, {"GPUS": "0"})
    return {name: values for name, values in found.items() if name != "--cpu"}
