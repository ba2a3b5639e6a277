"""The committed results, as they are read: the JSON of a table, and what it says of each row."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Optional

from reproduction import schema, tables
from reproduction.errors import Problem
from reproduction.tables import Measure


def read(folder: Path, name: str) -> Optional[dict[str, Any]]:
    """A table's file; None if there is none. A Problem if it is not of this program."""
    path = folder / f"{name}.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise Problem(f"{path}: cannot be read: {error}") from error
    if problem := schema.wrong(content, name):
        raise Problem(f"{path}: {problem}; `scripts/reproduce.py run {name}` makes it")
    return content


def part(folder: Path, name: str, scale: str) -> dict[str, Any]:
    """All that is kept of a table at a scale."""
    content = read(folder, name)
    return content["scales"].get(scale, {"runs": []}) if content else {"runs": []}


def runs(folder: Path, name: str, scale: str) -> list[dict[str, Any]]:
    return part(folder, name, scale)["runs"]


UNMIXED = "test unmixed"  # decoded as the published code does, which mixes in training alone


def training_minutes(run: Mapping[str, Any]) -> Optional[float]:
    """Of its updates alone: the wall time has every pause and every other program."""
    if run.get("updates") and run.get("seconds_per_update"):
        return run["updates"] * run["seconds_per_update"] / 60
    return None


class Study(NamedTuple):
    """The results of a table at one scale."""

    table: str
    title: str
    scale: str
    part: Mapping[str, Any]
    published: Mapping[str, str]
    published_metrics: Sequence[str]

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

    @property
    def unmixed(self) -> bool:
        """Whether the models were decoded as the paper's are, too."""
        return UNMIXED in self.part["metrics"]

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
            places = spectrum["places"]
            found[seed] = fmean(places[place]["mean_effective_rank"] for place in places if place != schema.CROSS)
        return found

    def other(self, row: Sequence[str], label: str) -> Optional[tuple[str, ...]]:
        """The row that has `label` of the same axis as softmax, and is like `row` otherwise; None without one."""
        return tables.with_label(self.axes, row, label)

    def attention(self, row: Sequence[str]) -> Optional[str]:
        """The label of the axis that has softmax."""
        return next((label for label, labels in zip(row, self.axes.values()) if "softmax" in labels), None)

    def cost(self, row: Sequence[str]) -> Mapping[str, Any]:
        rows = self.part.get("cost", {}).get("rows", [])
        return next((cost for cost in rows if cost["labels"] == list(row)), {})


def mark(studies: Sequence[Study]) -> str:
    """Of which results a table's figures are; those of other results have another."""
    text = json.dumps([study._asdict() for study in studies], sort_keys=True)
    return f"of results {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def are_drawn(studies: Sequence[Study], folder: Path) -> bool:
    """Whether the figures of a table are of its results as they are now."""
    paths = (folder / f"{studies[0].table}{kind}.svg" for kind in ("", "_spectrum"))
    found = [path.read_text(encoding="utf-8", errors="replace") for path in paths if path.exists()]
    return bool(found) and all(mark(studies) in text for text in found)


def studies(folder: Path) -> list[Study]:
    """All results, in the order of the tables; other files may lie beside theirs."""
    found = []
    for name in tables.tables():
        content = read(folder, name) or {"scales": {}}
        for scale in tables.SCALES:
            if part := content["scales"].get(scale):
                published = content.get("published", {}), content.get("published_metrics", [])
                found.append(Study(name, content.get("title", name), scale, part, *published))
    return found
