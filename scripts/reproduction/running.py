"""Trains what is missing of a table, and keeps its JSON up to date."""

import contextlib
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import sweep
from sweep import Busy, Failure, Grid, Run, Runner

from reproduction import conditions, estimates, identity, keeping, provenance, recipes, results, tables
from reproduction.errors import Problem, fail, warn
from reproduction.identity import Pair, is_of
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


def threads(place: Mapping[str, str]) -> Optional[int]:
    """Of a run's own, that torch is told to use; None where it is not told."""
    found = {**os.environ, **place}.get("OMP_NUM_THREADS", "")
    return int(found) if found.isdecimal() else None


class RecordingRunner(Runner):
    """Writes down of what code, flags and machine a run is, and knows which runs are of other flags than now."""

    def train_and_evaluate(self, run: Run, folder: Path, place: Mapping[str, str], held: int) -> None:
        if not (folder / "trained").exists():
            here = {**place, "SAVE": str(folder / "checkpoints")}
            provenance.started(folder, recipes.flags_of(run, here), recipes.data_of(run, here), threads(place))
        super().train_and_evaluate(run, folder, place, held)

    def record(self, run: Run, metric: str, value: float) -> None:
        super().record(run, metric, value)
        provenance.evaluated(self.folder(run), metric, recipes.evaluation_flags(run, metric))

    def values(self, run: Run) -> dict[str, float]:
        """Without those of other flags than evaluate.sh has now, which are evaluated again."""
        known = provenance.read(self.folder(run)).evaluation_flags
        return {
            metric: value
            for metric, value in super().values(run).items()
            if not recipes.changed(None, run, {metric: known.get(metric)})
        }

    def outdated(self, pair: Pair) -> list[str]:
        """The flags that the recipe has otherwise now than at any start of the run's training."""
        starts = provenance.read(self.folder(pair.run)).starts
        return sorted({name for start in starts for name in recipes.changed(start.get("flags"), pair.bare)})

    def is_done(self, pair: Pair) -> bool:
        return self.values(pair.run).keys() == pair.run.evaluate.keys() and not self.outdated(pair)

    def set_aside(self, pair: Pair) -> None:
        """Leave the run's folder to what it was begun with, if that is not how it would begin now.

        Busy says that another sweep goes on with it: the run is that one's, of those flags.
        """
        if not (names := self.outdated(pair)):
            return
        folder = self.folder(pair.run)
        others = f"of other flags than examples/{pair.run.example}/train.sh has now ({', '.join(names)})"
        try:
            with self.hold(folder):
                free = (folder.with_name(f"{folder.name}.{i}") for i in itertools.count(1))
                aside = next(path for path in free if not path.exists())
                folder.rename(aside)
        except Busy as busy:
            raise Busy(f"{others}, {busy}") from None
        except OSError as error:
            raise Problem(f"{folder}: {others}, and cannot be set aside: {error.strerror}") from error
        warn(f"{folder.name}: {others}; is {aside.name} from now")


class Keeper:
    """Writes a run into the table's file as soon as it has all its numbers."""

    def __init__(self, folder: Path, table: Table, scale: str, grid: Grid, runner: Runner):
        self.folder, self.table, self.scale, self.grid, self.runner = folder, table, scale, grid, runner
        self.started, self.finished = time.monotonic(), 0
        self.unwritten: list[Pair] = []
        self.said: set[str] = set()

    def keep(self, pairs: Sequence[Pair]) -> None:
        with keeping.changed(self.folder, self.table) as content:
            part = keeping.scale_of(content, self.table, self.scale, self.grid)
            for pair in pairs:
                keeping.keep(part, keeping.entry(pair, self.runner))

    def publish(self) -> None:
        """What follows from the table's file: other tables that have its runs, and the report."""
        keeping.share(self.folder, self.table, self.scale)
        if self.scale != "tiny":
            keeping.write_report(self.folder)

    def and_says(self, pair: Pair, left: int) -> str:
        """Keep a run that was done now; how long the others will take if they take as long."""
        self.unwritten.append(pair)
        with contextlib.suppress(OSError):  # a full disk; the load is no result
            provenance.ended(self.runner.folder(pair.run))
        self.keep_unwritten()
        self.finished += 1
        passed = time.monotonic() - self.started
        return f"; about {duration(passed * left / self.finished)} left" if left else ""

    def keep_unwritten(self) -> bool:
        """Whether all is written now. The runs' folders have what is not, so that others may go on."""
        try:
            if self.unwritten:
                self.keep(self.unwritten)
                self.unwritten = []
                self.publish()
        except (Problem, OSError) as problem:
            if str(problem) not in self.said:  # at once, and once
                warn(f"error: {problem}; the runs go on, and their results are written once this is mended")
            self.said.add(str(problem))
        except SystemExit:  # a grid that is broken by now, as sweep.py has said
            pass
        return not self.unwritten


class Plan(NamedTuple):
    """What is to be done of the runs that were asked for."""

    pairs: list[Pair]  # all but those that another command is at
    busy: list[tuple[Run, Failure]]
    done: list[Pair]  # finished in the runner's folder
    todo: list[Pair]  # not in the results, or finished here; what is finished is kept again, and not repeated
    entries: list[dict[str, Any]]  # of the table's results
    others: list[dict[str, Any]]  # of other tables' results, which have the same runs

    @property
    def new(self) -> list[Pair]:
        return [pair for pair in self.todo if pair not in self.done]


def plan(asked: Sequence[Pair], table: Table, scale: str, runner: RecordingRunner, folder: Path, again: bool) -> Plan:
    """`again`: what the results have is trained, too."""
    entries = keeping.comparable(folder, table, scale)
    busy: list[tuple[Run, Failure]] = []
    for pair in asked:
        try:
            runner.set_aside(pair)
        except Busy as failure:
            busy.append((pair.run, failure))
    pairs = [pair for pair in asked if all(pair.run is not run for run, _ in busy)]
    done = [pair for pair in pairs if runner.is_done(pair)]
    if again:
        return Plan(pairs, busy, done, pairs, entries, [])
    kept = {entry["digest"] for entry in entries for pair in asked if is_of(entry, pair.bare)}
    missing = [pair for pair in pairs if pair.bare.digest not in kept and pair not in done]
    others = keeping.of_other_tables(folder, table, scale, missing)
    kept |= {entry["digest"] for entry in others}
    todo = [pair for pair in pairs if pair.bare.digest not in kept or pair in done]
    return Plan(pairs, busy, done, todo, entries, others)


def run(
    table: Table, scale: str, seeds: int, only: Sequence[str], jobs: int, out: Path, folder: Path, again: bool
) -> int:
    """Returns the exit status: 0, 1 if a run failed or is not in the results, 128 + the signal that ended it."""
    grid = table.grid(scale)
    asked = identity.pairs(grid, seeds, only)
    if os.environ.get("DRY_RUN"):
        sweep.dry_run([pair.run for pair in asked], Runner(folder_of(out, table, scale), 1))
        return 0
    path = folder / f"{table.name}.json"
    runner = RecordingRunner(make(folder_of(out, table, scale)), jobs)
    own = plan(asked, table, scale, runner, folder, again)
    conditions.check(own.new, own.done, [*own.entries, *own.others], grid, runner)
    if own.others:
        print(f"{len(own.others)} runs are of the same flags as some of other tables, whose results they are")
        with keeping.changed(folder, table) as content:
            part = keeping.scale_of(content, table, scale, grid)
            for entry in own.others:
                keeping.keep(part, entry)
    if kept := len(own.pairs) - len(own.todo):
        print(f"{kept} runs are in {path} and not repeated; --again trains them here too")

    keeper = Keeper(folder, table, scale, grid, runner)
    if own.done or own.entries or own.others:
        keeper.keep(own.done)  # of a command that was ended between a result and its writing, too
        keeper.publish()
    warnings(table, scale, own.new)
    by_digest = {pair.run.digest: pair for pair in own.todo}

    def finished(run: Run, left: int) -> str:
        return keeper.and_says(by_digest[run.digest], left)

    with runner.stoppable():
        failures = sweep.sweep([pair.run for pair in own.todo], runner, finished)
    written = keeper.keep_unwritten()
    if not written:
        names = ", ".join(pair.run.title for pair in keeper.unwritten)
        warn(f"not in {path}: {names}; the same command writes them from {runner.out}")
    if runner.stopped_by:
        warn("interrupted; the same command goes on from here")
        return 128 + runner.stopped_by
    failures = [*own.busy, *failures]
    for failed, failure in failures:
        what = "left out" if isinstance(failure, Busy) else "failed"
        warn(f"{what}: {failed.title}: {failure}")
    if path.exists():
        print(path)
    return 1 if failures or not written else 0


def warnings(table: Table, scale: str, todo: Sequence[Pair]) -> None:
    """What is better known before the hours that these runs take."""
    if not todo or scale == "tiny":
        return
    commit = provenance.commit() or ""
    if commit.endswith("+"):
        warn(f"the code is not as in commit {commit[:-1]}: the results will be of {commit}, which no one else has")
    if scale == "full" and not (os.environ.get("GPUS") != "0" and sweep.visible_gpus()):
        found = [estimates.estimate(pair.run) for pair in todo]
        hours = sum(estimate.gpu_hours for estimate in found if estimate)
        small = "; --scale small is for such machines" if "small" in table.scales() else ""
        print(f"no GPU here: {len(todo)} runs that take about {hours:,.0f} hours on an H100{small}", flush=True)


def states(table: Table, scale: str, seeds: int, out: Path, folder: Path) -> dict[tuple[str, ...], int]:
    """By row how many of the wanted seeds are done, in the results of any table or in `out`."""
    grid = table.grid(scale)
    runner = RecordingRunner(folder_of(out, table, scale), 1)
    pairs = identity.pairs(grid, seeds)
    entries = [*results.runs(folder, table.name, scale), *keeping.of_other_tables(folder, table, scale, pairs)]
    counts = dict.fromkeys(tables.rows(grid), 0)
    for pair in pairs:
        counts[pair.labels] += any(is_of(entry, pair.bare) for entry in entries) or runner.is_done(pair)
    return counts
