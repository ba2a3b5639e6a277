"""Seconds per update and peak memory of every row, measured in turn.

The logs of trainings that ran beside others, at different times, say little about either. Here every round trains each
row for some updates, one after the other, the next round from another row on, so that a change in the machine's speed
meets all of them; ratios are of a round.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, Optional

import sweep
from sweep import Failure, Run, Runner

from reproduction import keeping, logs, provenance, recipes, results, tables
from reproduction.errors import warn
from reproduction.identity import pairs
from reproduction.running import RecordingRunner, folder_of, make
from reproduction.tables import Table, with_flags

Row = tuple[str, ...]
INTERVALS = 6  # of the log, in a run; the first is not counted


def measured_runs(table: Table, scale: str, updates: int, rounds: int) -> dict[tuple[Row, int], Run]:
    """By row and round; nothing is evaluated or saved. Rounds differ in the seed."""
    grid = table.grid(scale)
    flags = f"--max-update {updates} --log-interval {max(1, updates // INTERVALS)} --disable-validation --no-save"
    grid = grid._replace(axes=with_flags(grid.axes, flags), metrics={})
    return {(pair.labels, pair.seed): pair.run for pair in pairs(grid, rounds)}


class Measured(NamedTuple):
    """Of one run."""

    seconds: float  # of an update
    peak_mib: float
    device: dict[str, Any]  # for the table's file: what it is called, and how much of it was used


def measured(runner: Runner, run: Run) -> Measured:
    runner(run)
    folder = runner.folder(run)
    log = logs.read(folder / "train.log")
    if log.seconds_per_update is None:
        raise Failure(f"the log has no speed; more --updates may help; log: {folder / 'train.log'}")
    start = provenance.read(folder).last
    if log.gpu:
        used = {"device": log.gpu, "gpus": int(recipes.gpus(start.get("flags") or {}))}
    else:
        used = {"device": start.get("cpu", "a CPU"), "threads": start.get("threads") or sweep.CORES}
    peak = log.gpu_peak_mib if log.gpu else sweep.training(folder).peak_rss_mib
    if not peak:
        raise Failure(f"its peak memory was not measured; log: {folder / 'train.log'}")
    return Measured(log.seconds_per_update, peak, used)


def in_turn(rows: Sequence[Row], i: int) -> list[Row]:
    """The order of round i, each beginning one row later: what speeds up or slows down meets no row alone."""
    first = (i - 1) % len(rows)
    return [*rows[first:], *rows[:first]]


def completed(
    runner: Runner, runs: Mapping[tuple[Row, int], Run], rows: Sequence[Row], rounds: int
) -> tuple[list[dict[Row, Measured]], str]:
    """The rounds that have every row, and what went wrong in the one after them; '' if there was none."""
    found = []
    for i in range(1, rounds + 1):
        of_round = {}
        for row in in_turn(rows, i):
            try:
                of_round[row] = measured(runner, runs[row, i])
            except Failure as failure:
                return found, f"round {i}, {'/'.join(row)}: {failure}"
            took, peak, _ = of_round[row]
            print(f"[{i}/{rounds}] {'/'.join(row)}: {took:.3f} s/update, {peak:.0f} MiB", flush=True)
        found.append(of_round)
    return found, ""


def summary(
    seconds: Mapping[Row, Sequence[float]], memory: Mapping[Row, Sequence[float]], bases: Mapping[Row, Optional[Row]]
) -> list[dict[str, Any]]:
    """The rows of the table's file: medians over the rounds, and the ratios to the softmax row of the same round."""
    found = []
    for row in seconds:
        cost: dict[str, Any] = {
            "labels": list(row),
            "seconds_per_update": round(statistics.median(seconds[row]), 4),
            "rounds": [round(t, 4) for t in seconds[row]],
            "peak_memory_mib": round(statistics.median(memory[row]), 1),
        }
        if (base := bases[row]) is not None:
            cost["time_ratios"] = [round(a / b, 3) for a, b in zip(seconds[row], seconds[base])]
            cost["memory_ratios"] = [round(a / b, 3) for a, b in zip(memory[row], memory[base])]
        found.append(cost)
    return found


def measure(table: Table, scale: str, rounds: int, updates: int, out: Path, folder: Path) -> int:
    """Returns the exit status: 0, 1 if a round failed, 128 + the signal that ended it; complete rounds are kept."""
    grid = table.grid(scale)
    runs = measured_runs(table, scale, updates, rounds)
    rows = list(dict.fromkeys(row for row, _ in runs))
    known = {
        pair.labels: {"digest": pair.bare.digest, "flags": recipes.flags_of(pair.run, {}) or None}
        for pair in pairs(grid, 1)
    }
    before = os.getloadavg()[0]
    if before > 0.5:
        print(f"this machine is not idle: {before:.1f} processes of the last minute wanted a core", flush=True)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # of this measurement alone
    runner = RecordingRunner(make(folder_of(out, table, scale) / "cost" / stamp), 1)
    with runner.stoppable():
        found, failure = completed(runner, runs, rows, rounds)
    status = 128 + runner.stopped_by if runner.stopped_by else int(bool(failure))
    if failure:
        what = "interrupted" if runner.stopped_by else failure
        warn(f"{what}; {len(found)} of {rounds} rounds are complete")
    if not found:
        return status
    before_this = results.part(folder, table.name, scale).get("cost", {"rounds": 0})["rounds"]
    if failure and before_this > len(found):
        warn(f"{folder / table.name}.json keeps the costs of {before_this} rounds that it has")
        return status
    seconds = {row: [of_round[row].seconds for of_round in found] for row in rows}
    memory = {row: [of_round[row].peak_mib for of_round in found] for row in rows}
    bases = {row: tables.with_label(grid.axes, row, "softmax") for row in rows}
    about = {name: value for name, value in provenance.about().items() if name != "cpu"}
    with keeping.changed(folder, table) as content:
        part = keeping.scale_of(content, table, scale, grid)
        part["cost"] = {
            **about,
            **found[0][rows[0]].device,
            "load_before": round(before, 2),
            "load_after": round(os.getloadavg()[0], 2),  # with what the last run itself wanted
            "rounds": len(found),
            "updates": updates,
            "rows": [{**cost, **known[tuple(cost["labels"])]} for cost in summary(seconds, memory, bases)],
        }
        for cost in part["cost"]["rows"]:
            ratios = cost.get("time_ratios")
            beside = f" ({statistics.median(ratios):.2f} of softmax)" if ratios else ""
            print(
                f"{'/'.join(cost['labels'])}: {cost['seconds_per_update']:.3f} s/update{beside}, "
                f"{cost['peak_memory_mib']:.0f} MiB"
            )
    return status
