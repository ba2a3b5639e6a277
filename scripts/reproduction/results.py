"""The committed JSON of a table: what is in it, how it is written, how it is read."""

import contextlib
import fcntl
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Optional

import sweep
from sweep import Grid, Run, Runner

from reproduction import estimates, logs, tables
from reproduction.errors import fail
from reproduction.tables import Measure, Table

PART_KEYS = {"title", "example", "measure", "better", "metrics", "axes", "runs"}
RUN_KEYS = {"labels", "seed", "digest", "evaluate", "values"}
WITHOUT = ("DATA", "SAVE", "CHECKPOINT")  # variables that are paths of one machine


# ---- writing ---------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A run as the environment makes it, in which it is trained, and as the grid alone does, by which it is known."""

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
    outer = sweep.from_environment()
    base = sweep.Point(f"{outer.train} {grid.base.train}", f"{outer.evaluate} {grid.base.evaluate}")
    with_seeds = tables.seeded(grid, seeds)
    found = map(Pair, sweep.runs(with_seeds._replace(base=base)), sweep.runs(with_seeds))
    rows = set(tables.chosen(grid, only))
    return [pair for pair in found if pair.labels in rows]


@contextlib.contextmanager
def changed(folder: Path, table: Table) -> Iterator[dict[str, Any]]:
    """The content of a table's file, written again after the block; one process at a time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        fail(f"{folder}: cannot be a folder of results: {error.strerror}")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = read(folder, table.name) or {"table": table.name, "scales": {}}
        yield content
        full = table.grid("full")
        content.update(title=full.title, published=dict(full.published), published_metrics=list(full.metrics))
        sweep.write(folder / f"{table.name}.json", content)
    finally:
        os.close(lock)


def scale_of(content: dict[str, Any], table: Table, scale: str, grid: Grid) -> dict[str, Any]:
    """The part of a scale, whose description is made anew; what was run with other flags than the grid's goes."""
    part = content["scales"].setdefault(scale, {"runs": []})
    seeds = max((entry["seed"] for entry in part["runs"]), default=1)
    digests = {pair.bare.digest for pair in pairs(grid, seeds)}
    known = [entry for entry in part["runs"] if entry["digest"] in digests]
    if len(known) < len(part["runs"]):
        left = f"{len(part['runs']) - len(known)} runs of other flags than {table.path(scale).name} has now"
        print(f"reproduce: {table.name}, {scale}: {left} leave the results", file=sys.stderr)
    if any(row["digest"] not in digests for row in part.get("cost", {"rows": []})["rows"]):
        print(f"reproduce: {table.name}, {scale}: costs of other flags leave the results", file=sys.stderr)
        del part["cost"]
    measure = tables.MEASURES[grid.example]
    axes = {axis: list(points) for axis, points in grid.axes.items()}
    part.update(
        grid=f"examples/grids/{'' if scale == 'full' else 'small/'}{table.file}",
        title=grid.title,
        about=tables.comment(table.path(scale)),
        example=grid.example,
        measure=measure.name,
        better="higher" if measure.sign > 0 else "lower",
        metrics=list(grid.metrics),
        axes=axes,
        recipe=recipe(grid),
        runs=known,
    )
    if scale != "full":
        part["paper"] = recipe(table.grid("full"))
    return part


def recipe(grid: Grid) -> Optional[dict[str, Any]]:
    """What can be said of the first row's training before it is run; None where the recipe does not tell."""
    first = sweep.runs(grid)[0]
    found = estimates.training(first)
    return None if found is None else {"example": grid.example, **found}


def entry(pair: Pair, runner: Runner) -> dict[str, Any]:
    """All that is kept of a finished run."""
    folder = runner.folder(pair.run)
    taken = sweep.training(folder)
    log = logs.read(folder / "train.log")
    about = json.loads((folder / "about.json").read_text()) if (folder / "about.json").exists() else {}
    flags = sweep.canonical(pair.run.train)
    words = [word for evaluation in pair.run.evaluate.values() for word in evaluation]
    return {
        "labels": list(pair.labels),
        "seed": pair.seed,
        "digest": pair.bare.digest,
        "values": runner.values(pair.run),
        "train": {name: values for name, values in flags.items() if name not in WITHOUT},
        "evaluate": evaluations(pair.bare),
        "average": next((word.partition("=")[2] for word in words if word.startswith("AVERAGE=")), None),
        "updates": log.updates,
        "parameters": log.parameters,
        "train_loss": log.train_loss,
        "valid_loss": log.valid_loss,
        "wall_seconds": taken.seconds if taken.starts else None,
        "seconds_per_update": log.seconds_per_update and round(log.seconds_per_update, 4),
        "peak_memory_mib": log.gpu_peak_mib if log.gpu else taken.peak_rss_mib or None,
        "device": log.gpu or about.get("cpu"),
        **{key: about.get(key) for key in ("load", "versions", "commit", "date")},
    }


def evaluations(run: Run) -> dict[str, dict[str, list[str]]]:
    return {metric: sweep.canonical(words) for metric, words in run.evaluate.items()}


def is_of(known: Mapping[str, Any], bare: Run) -> bool:
    """Whether an entry is of this very run, with all its numbers."""
    return known["digest"] == bare.digest and known["evaluate"] == evaluations(bare)


def of_other_tables(folder: Path, table: Table, scale: str, wanted: Sequence[Pair]) -> list[dict[str, Any]]:
    """The entries that another table of this scale has of the very runs that are `wanted`, with this one's labels."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = (read(folder, path.stem) if path.stem != table.name else None) or {"scales": {}}
        for pair in wanted:
            for known in content["scales"].get(scale, {"runs": []})["runs"]:
                if is_of(known, pair.bare):
                    found[pair.bare.digest] = {**known, "labels": list(pair.labels)}
    return list(found.values())


def keep(part: dict[str, Any], new: dict[str, Any]) -> None:
    """In place of the entry of the same row and seed, in the order of rows and seeds."""
    runs = [e for e in part["runs"] if (e["labels"], e["seed"]) != (new["labels"], new["seed"])]
    old = next((e for e in part["runs"] if e["digest"] == new["digest"] and e["values"] == new["values"]), {})
    if "spectrum" in old:  # of the same model
        new = {**new, "spectrum": old["spectrum"]}
    order = {row: i for i, row in enumerate(itertools.product(*part["axes"].values()))}
    part["runs"] = sorted([*runs, new], key=lambda e: (order[tuple(e["labels"])], e["seed"]))


# ---- where it was measured -------------------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    """Of this machine and this checkout, now."""
    return {
        "cpu": f"{processor()}, {sweep.CORES} cores",
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def load() -> float:
    """How many processes of the last quarter of an hour wanted a core, for each core; 1 is what one run makes."""
    return round(os.getloadavg()[2] / sweep.CORES, 2)


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def python_of_the_recipes() -> str:
    """As examples/common/recipe.sh finds it."""
    own = sweep.ROOT / ".venv" / "bin"
    if (own / "fairseq-train").exists():
        return str(own / "python")
    from shutil import which

    return str(Path(found).with_name("python")) if (found := which("fairseq-train")) else "python3"


VERSIONS = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
found = {"python": platform.python_version()}
for name in ("torch", "fairseq", "fairseq-fixed"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions() -> dict[str, str]:
    command = [python_of_the_recipes(), "-c", VERSIONS]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    source = (sweep.ROOT / "mixhead_plugin" / "__init__.py").read_text()
    own = source.partition('__version__ = "')[2].partition('"')[0]
    return {**(json.loads(printed) if printed else {}), "mixhead_plugin": own}


def commit() -> Optional[str]:
    """With + behind it where the plugin or a recipe is not as committed; None outside of git."""

    def git(*words: str) -> Optional[str]:
        try:
            done = subprocess.run(["git", "-C", str(sweep.ROOT), *words], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    name = git("rev-parse", "--short=12", "HEAD")
    if name is None:
        return None
    return f"{name}+" if git("status", "--porcelain", "--", "mixhead_plugin", "examples") else name


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(folder: Path, name: str) -> Optional[dict[str, Any]]:
    """A table's file; None if there is none. Ends with one line if it is not of this program."""
    path = folder / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        fail(f"{path}: cannot be read: {error}")
    if problem := wrong(content, name):
        fail(f"{path}: {problem}; `scripts/reproduce.py run {name}` makes it")
    return content


def wrong(content: Any, name: str) -> str:
    """What makes a file none of this program; empty if nothing does."""
    if not isinstance(content, dict) or content.get("table") != name or not isinstance(content.get("scales"), dict):
        return f"must hold table {name!r} and its scales"
    for scale, part in content["scales"].items():
        if scale not in tables.SCALES or not isinstance(part, dict) or not isinstance(part.get("runs"), list):
            return f"scales.{scale}: must be one of {', '.join(tables.SCALES)}, with runs"
        if not part.keys() >= PART_KEYS:
            return f"scales.{scale}: must have {', '.join(sorted(PART_KEYS))}"
        for i, run in enumerate(part["runs"]):
            if not isinstance(run, dict) or not run.keys() >= RUN_KEYS:
                return f"scales.{scale}.runs[{i}]: must have {', '.join(sorted(RUN_KEYS))}"
            if not all(isinstance(value, (int, float)) for value in run["values"].values()):
                return f"scales.{scale}.runs[{i}].values: must be numbers"
    return ""


class Study(NamedTuple):
    """The results of a table at one scale."""

    table: str
    title: str
    scale: str
    part: Mapping[str, Any]
    published: Mapping[str, str]
    published_metrics: Sequence[str]

    @property
    def name(self) -> str:
        return f"{self.table} at `{self.scale}`"

    @property
    def measure(self) -> Measure:
        return Measure(self.part["measure"], 1 if self.part["better"] == "higher" else -1)

    @property
    def axes(self) -> Mapping[str, Sequence[str]]:
        return self.part["axes"]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        return list(itertools.product(*self.axes.values()))

    @property
    def metric(self) -> str:
        """What rows are compared by: the test set, which nothing was chosen by, if it was evaluated."""
        metrics = self.part["metrics"]
        return "test" if "test" in metrics else metrics[0]

    def values(self, row: Sequence[str], metric: str) -> dict[int, float]:
        """By seed"""
        runs = (run for run in self.part["runs"] if run["labels"] == list(row))
        return {run["seed"]: run["values"][metric] for run in runs if metric in run["values"]}

    def field(self, row: Sequence[str], name: str) -> dict[int, float]:
        """Of every run of a row that has it, by seed."""
        runs = (run for run in self.part["runs"] if run["labels"] == list(row))
        return {run["seed"]: run[name] for run in runs if run.get(name) is not None}

    def ranks(self, row: Sequence[str]) -> dict[int, float]:
        """Mean effective rank over the places of self-attention, by seed; elsewhere not every grid mixes."""
        found = {}
        for seed, spectrum in self.field(row, "spectrum").items():
            ranks = [values["mean_effective_rank"] for place, values in spectrum["places"].items() if place != "cross"]
            found[seed] = sum(ranks) / len(ranks)
        return found

    def other(self, row: Sequence[str], label: str) -> Optional[tuple[str, ...]]:
        """The row that has `label` of the same axis as softmax, and is like `row` otherwise; None without one."""
        for i, labels in enumerate(self.axes.values()):
            if "softmax" in labels:
                return (*row[:i], label, *row[i + 1 :]) if label in labels else None
        return None

    def attention(self, row: Sequence[str]) -> Optional[str]:
        """The label of the axis that has softmax."""
        return next((label for label, labels in zip(row, self.axes.values()) if "softmax" in labels), None)

    def cost(self, row: Sequence[str]) -> Mapping[str, Any]:
        rows = self.part.get("cost", {}).get("rows", [])
        return next((cost for cost in rows if cost["labels"] == list(row)), {})


def studies(folder: Path) -> list[Study]:
    """All results, in the order of the tables; those that were only tried are left out where others are there."""
    found = []
    known = list(tables.tables())
    files = sorted(folder.glob("*.json"), key=lambda p: known.index(p.stem) if p.stem in known else len(known))
    for path in files:
        content = read(folder, path.stem)
        for scale in tables.SCALES:
            if part := content["scales"].get(scale):
                found.append(
                    Study(
                        path.stem,
                        content.get("title", path.stem),
                        scale,
                        part,
                        content.get("published", {}),
                        content.get("published_metrics", []),
                    )
                )
    return found
