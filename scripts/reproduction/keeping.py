"""The committed results, as they are written: what of a run goes into the JSON of its table, and the report."""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import sweep
from sweep import Grid, Runner

from reproduction import estimates, logs, provenance, recipes, report, results, tables
from reproduction.errors import Problem, warn
from reproduction.identity import Pair, evaluations, is_of, own_words, pairs, refuse_other_precision
from reproduction.tables import Table

# ---- the file --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within, no other process writes results there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise Problem(f"{folder}: cannot be a folder of results: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # of a network's file system, which locks nothing that is open for reading alone
            raise Problem(f"{folder}: cannot be locked: {error.strerror}") from error
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def changed(folder: Path, table: Table) -> Iterator[dict[str, Any]]:
    """The content of a table's file, written again after the block; one process at a time."""
    with locked(folder):
        content = results.read(folder, table.name) or {"table": table.name, "scales": {}}
        yield content
        full = table.grid("full")
        metrics = list(table.published_metrics())
        content.update(title=full.title, published=dict(full.published), published_metrics=metrics)
        write(folder, table.name, content)


def write(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    path = folder / f"{name}.json"
    try:
        sweep.write_text(path, as_text(content))
    except OSError as error:
        raise Problem(f"{path}: cannot be written: {error.strerror}") from error


def as_text(content: Mapping[str, Any]) -> str:
    """JSON with one line for each run and each row of costs."""
    lines: list[str] = []

    def shortened(value: Any, listed: bool = False) -> Any:
        if isinstance(value, dict) and listed:
            lines.append(json.dumps(value))
            return f"\0{len(lines) - 1}"  # no text of a grid has a NUL
        if isinstance(value, dict):
            return {name: shortened(inner) for name, inner in value.items()}
        return [shortened(inner, listed=True) for inner in value] if isinstance(value, list) else value

    text = json.dumps(shortened(content), indent=2)
    return re.sub(r'"\\u0000(\d+)"', lambda found: lines[int(found[1])], text) + "\n"


def comparable(folder: Path, table: Table, scale: str) -> list[dict[str, Any]]:
    """What is kept of a table's runs; a Problem if the runs of now cannot stand beside them."""
    entries = results.runs(folder, table.name, scale)
    refuse_other_precision(entries, table.grid(scale), f"{folder / table.name}.json, {scale}")
    return entries


def write_report(folder: Path) -> Path:
    """README.md, of all tables of the folder as they are now. A Problem if it has one that is none of these."""
    path = folder / "README.md"
    with locked(folder):
        if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(report.TITLE):
            raise Problem(f"{path}: is no report of this program, and is not replaced; --results sets another folder")
        text = report.render(results.studies(folder))
        try:
            sweep.write_text(path, text)
        except OSError as error:
            raise Problem(f"{path}: cannot be written: {error.strerror}") from error
    return path


def scale_of(content: dict[str, Any], table: Table, scale: str, grid: Grid) -> dict[str, Any]:
    """The part of a scale, described anew.

    What was run with other flags than the grid or the recipe has now goes; rows with other labels than before keep what
    is theirs.
    """
    part = content["scales"].setdefault(scale, {"runs": []})
    refuse_other_precision(part["runs"], grid, f"{table.name}, {scale}")
    seeds = max((entry["seed"] for entry in part["runs"]), default=1)
    by_digest = {pair.bare.digest: pair for pair in pairs(grid, seeds)}
    known, outdated = [], {}
    for entry in part["runs"]:
        if (pair := by_digest.get(entry["digest"])) is None:
            continue
        if others := recipes.changed(entry.get("flags"), pair.bare, entry.get("evaluation_flags")):
            outdated[entry["digest"]] = others
            continue
        known.append({**entry, "labels": list(pair.labels)})
    if gone := len(part["runs"]) - len(known) - len(outdated):
        left = f"{gone} runs of other flags than {table.path(scale).name} has now"
        warn(f"{table.name}, {scale}: {left} leave the results")
    if outdated:
        names = ", ".join(sorted({name for others in outdated.values() for name in others}))
        left = f"{len(outdated)} runs of other flags than the scripts of examples/{grid.example} have now"
        warn(f"{table.name}, {scale}: {left} ({names}) leave the results")
    if "cost" in part:
        rows = part["cost"]["rows"]
        if any(is_outdated(row, by_digest) for row in rows):
            warn(f"{table.name}, {scale}: costs of other flags leave the results")
            del part["cost"]
        else:
            for row in rows:
                row["labels"] = list(by_digest[row["digest"]].labels)
    measure = tables.MEASURES[grid.example]
    part.update(
        grid=f"examples/grids/{'' if scale == 'full' else 'small/'}{table.file}",
        title=grid.title,
        about=tables.comment(table.path(scale)),
        example=grid.example,
        measure=measure.name,
        better="higher" if measure.sign > 0 else "lower",
        metrics=list(grid.metrics),
        axes={axis: list(points) for axis, points in grid.axes.items()},
        recipe=recipe(grid),
    )
    part["runs"] = in_order(known, part["axes"])
    if scale != "full":
        part["paper"] = of_the_paper(table.grid("full"))
    return part


def is_outdated(cost: Mapping[str, Any], by_digest: Mapping[str, Pair]) -> bool:
    """Whether a row's cost is of other flags than the grid or the recipe has now."""
    pair = by_digest.get(cost.get("digest", ""))
    return pair is None or bool(recipes.changed(cost.get("flags"), pair.bare))


def recipe(grid: Grid) -> Optional[dict[str, Any]]:
    """What can be said of the first row's training before it is run; None where the recipe does not tell."""
    found = estimates.training(sweep.runs(grid)[0])
    return None if found is None else {"example": grid.example, **found}


def of_the_paper(grid: Grid) -> Optional[dict[str, Any]]:
    """The recipe at `full`, with the size of its first row's model."""
    found = recipe(grid)
    size = estimates.estimate(sweep.runs(grid)[0]) if found else None
    return {**found, "parameters": size.parameters} if size else found


def in_order(runs: Sequence[dict[str, Any]], axes: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """By row and seed."""
    order = {row: i for i, row in enumerate(itertools.product(*axes.values()))}
    return sorted(runs, key=lambda entry: (order[tuple(entry["labels"])], entry["seed"]))


# ---- its entries -----------------------------------------------------------------------------------------------------


def entry(pair: Pair, runner: Runner) -> dict[str, Any]:
    """All that is kept of a finished run."""
    folder = runner.folder(pair.run)
    taken = sweep.training(folder)
    log = logs.read(folder / "train.log")
    history = provenance.read(folder)
    words = [word for evaluation in pair.run.evaluate.values() for word in evaluation]
    return {
        "labels": list(pair.labels),
        "seed": pair.seed,
        "digest": pair.bare.digest,
        "values": runner.values(pair.run),
        "train": own_words(pair.bare.train),
        "evaluate": evaluations(pair.bare),
        "evaluation_flags": {m: flags for m, flags in history.evaluation_flags.items() if m in pair.run.evaluate}
        or None,
        "average": next((word.partition("=")[2] for word in words if word.startswith("AVERAGE=")), None),
        "updates": log.updates,
        "parameters": log.parameters,
        "train_loss": finite(log.train_loss),
        "valid_loss": finite(log.valid_loss),
        "wall_seconds": taken.seconds if taken.starts else None,
        "seconds_per_update": log.seconds_per_update and round(log.seconds_per_update, 4),
        "peak_memory_mib": log.gpu_peak_mib if log.gpu else taken.peak_rss_mib or None,
        "device": log.gpu or history.last.get("cpu"),
        **history.fields(),
    }


def finite(value: Optional[float]) -> Optional[float]:
    """JSON has no number for the loss of a training that diverged."""
    return value if value is not None and math.isfinite(value) else None


def keep(part: dict[str, Any], new: dict[str, Any]) -> None:
    """In place of the entry of the same row and seed, in the order of rows and seeds."""
    runs = [e for e in part["runs"] if (e["labels"], e["seed"]) != (new["labels"], new["seed"])]
    old = next((e for e in part["runs"] if e["digest"] == new["digest"] and e["values"] == new["values"]), {})
    if "spectrum" in old:  # of the same model
        new = {**new, "spectrum": old["spectrum"]}
    part["runs"] = in_order([*runs, new], part["axes"])


# ---- what tables share -----------------------------------------------------------------------------------------------


def of_other_tables(folder: Path, table: Table, scale: str, wanted: Sequence[Pair]) -> list[dict[str, Any]]:
    """The entries that another table of this scale has of the very runs that are `wanted`, with this one's labels."""
    found = {}
    for name in tables.tables():
        for known in results.runs(folder, name, scale) if name != table.name else []:
            for pair in wanted:
                if is_of(known, pair.bare):
                    found[pair.bare.digest] = {**known, "labels": list(pair.labels)}
    return list(found.values())


def share(folder: Path, table: Table, scale: str) -> None:
    """Let the entries that other tables have of a table's very runs say all that is known of these.

    A spectrum may be measured long after a run was taken over.
    """
    with locked(folder):
        contents = {name: content for name in tables.tables() if (content := results.read(folder, name))}
        entries = {name: content["scales"].get(scale, {"runs": []})["runs"] for name, content in contents.items()}
        before = {name: [dict(entry) for entry in found] for name, found in entries.items()}
        others = [entry for name in entries if name != table.name for entry in entries[name]]
        for own in entries.get(table.name, []):
            for other in (other for other in others if same_run(own, other)):
                more = {name: value for name, value in other.items() if own.get(name) is None and value is not None}
                own.update(more)
                other.update({name: value for name, value in own.items() if name != "labels" and value is not None})
        for name in contents:
            if entries[name] != before[name]:
                write(folder, name, contents[name])


def same_run(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Of one training, not of two with the same flags."""
    return all(a.get(name) == b.get(name) for name in ("digest", "evaluate", "values", "wall_seconds", "date"))
