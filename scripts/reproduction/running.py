"""Trains what is missing of a table, and keeps its JSON up to date."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import sweep
from sweep import Busy, Grid, Run, Runner

from reproduction import results, tables
from reproduction.errors import fail
from reproduction.results import Pair
from reproduction.tables import Table


def duration(seconds: float) -> str:
    """In words of two units at most."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def folder_of(out: Path, table: Table, scale: str) -> Path:
    return out.resolve() / f"{table.name}-{scale}"


def make(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {folder}: cannot be made a folder: {error.strerror}")
    return folder


class RecordingRunner(Runner):
    """Writes down what code and machine a training is of, when it begins."""

    def train_and_evaluate(self, run: Run, folder: Path, place: Mapping[str, str], held: int) -> None:
        if not (folder / "trained").exists():
            sweep.write(folder / "about.json", results.about())
        super().train_and_evaluate(run, folder, place, held)


class Keeper:
    """Writes a run into the table's file as soon as it has all its numbers."""

    def __init__(self, folder: Path, table: Table, scale: str, grid: Grid, runner: Runner):
        self.folder, self.table, self.scale, self.grid, self.runner = folder, table, scale, grid, runner
        self.started, self.finished = time.monotonic(), 0

    def keep(self, pairs: Sequence[Pair]) -> None:
        with results.changed(self.folder, self.table) as content:
            part = results.scale_of(content, self.table, self.scale, self.grid)
            for pair in pairs:
                results.keep(part, results.entry(pair, self.runner))

    def and_says(self, pair: Pair, left: int) -> str:
        """Keep a run that was done now; how long the others will take if they take as long."""
        path = self.runner.folder(pair.run) / "about.json"
        if path.exists():
            sweep.write(path, {"load": results.load(), **json.loads(path.read_text())})
        self.keep([pair])
        self.finished += 1
        passed = time.monotonic() - self.started
        return f"; about {duration(passed * left / self.finished)} left" if left else ""


def run(
    table: Table, scale: str, seeds: int, only: Sequence[str], jobs: int, out: Path, folder: Path, again: bool
) -> int:
    """Returns the exit status: 0, 1 if a run failed, 128 + the signal that ended it."""
    grid = table.grid(scale)
    pairs = results.pairs(grid, seeds, only)
    if os.environ.get("DRY_RUN"):
        sweep.dry_run([pair.run for pair in pairs])
        return 0
    part = (results.read(folder, table.name) or {"scales": {}})["scales"].get(scale, {"runs": []})
    kept = {entry["digest"] for entry in part["runs"] for pair in pairs if results.is_of(entry, pair.bare)}
    runner = RecordingRunner(make(folder_of(out, table, scale)), jobs)
    done = [pair for pair in pairs if runner.values(pair.run).keys() == pair.run.evaluate.keys()]
    missing = [pair for pair in pairs if not again and pair.bare.digest not in kept and pair not in done]
    if others := results.of_other_tables(folder, table, scale, missing):
        print(f"{len(others)} runs are of the same flags as some of other tables, whose results they are")
        with results.changed(folder, table) as content:
            for entry in others:
                results.keep(results.scale_of(content, table, scale, grid), entry)
        kept |= {entry["digest"] for entry in others}
    todo = [pair for pair in pairs if again or pair.bare.digest not in kept or pair in done]
    if len(todo) < len(pairs):
        print(f"{len(pairs) - len(todo)} runs are in {folder / table.name}.json and not repeated; --again does")

    keeper = Keeper(folder, table, scale, grid, runner)
    if done or part["runs"]:
        keeper.keep(done)  # of a command that was ended between a result and its writing, too
    by_digest = {pair.run.digest: pair for pair in todo}

    def finished(run: Run, left: int) -> str:
        return keeper.and_says(by_digest[run.digest], left)

    with runner.stoppable():
        failures = sweep.sweep([pair.run for pair in todo], runner, finished)
    if runner.stopped_by:
        with contextlib.suppress(OSError):  # after SIGHUP the terminal may be gone
            print("reproduce: interrupted; the same command goes on from here", file=sys.stderr, flush=True)
        return 128 + runner.stopped_by
    for failed, failure in failures:
        what = "left out" if isinstance(failure, Busy) else "failed"
        print(f"reproduce: {what}: {failed.title}: {failure}", file=sys.stderr)
    print(f"{folder / table.name}.json")
    return 1 if failures else 0


def states(table: Table, scale: str, seeds: int, out: Path, folder: Path) -> dict[tuple[str, ...], int]:
    """By row how many of the wanted seeds are done, in the results or in `out`."""
    grid = table.grid(scale)
    content = results.read(folder, table.name)
    entries = content["scales"].get(scale, {"runs": []})["runs"] if content else []
    runner = Runner(folder_of(out, table, scale), 1)
    counts = dict.fromkeys(tables.rows(grid), 0)
    for pair in results.pairs(grid, seeds):
        kept = any(results.is_of(entry, pair.bare) for entry in entries)
        counts[pair.labels] += kept or runner.values(pair.run).keys() == pair.run.evaluate.keys()
    return counts
