"""Seconds per update and peak memory of every row, measured in turn.

The logs of trainings that ran beside others say little about speed. Here every round trains each row for some updates,
one after the other, so that a change in the machine's speed meets all of them; ratios are of a round.
"""

import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Optional

import sweep
from sweep import Failure, Run, Runner

from reproduction import logs, results
from reproduction.errors import fail
from reproduction.running import folder_of, make
from reproduction.tables import Table, behind

INTERVALS = 6  # of the log, in a run; the first is not counted


def measured_runs(table: Table, scale: str, updates: int, rounds: int) -> dict[tuple[tuple[str, ...], int], Run]:
    """By row and round; nothing is evaluated or saved. Rounds differ in the seed."""
    grid = table.grid(scale)
    flags = f"--max-update {updates} --log-interval {max(1, updates // INTERVALS)} --disable-validation --no-save"
    grid = grid._replace(axes=behind(grid.axes, flags), metrics={})
    return {(pair.labels, pair.seed): pair.run for pair in results.pairs(grid, rounds)}


def of_run(runner: Runner, run: Run) -> tuple[float, float, str]:
    """Seconds per update, peak memory in MiB, and the GPU ('' for the CPU)."""
    runner(run)
    folder = runner.folder(run)
    log = logs.read(folder / "train.log")
    if log.seconds_per_update is None:
        raise Failure(f"the log has no speed; more --updates may help; log: {folder / 'train.log'}")
    peak = log.gpu_peak_mib if log.gpu else sweep.training(folder).peak_rss_mib
    return log.seconds_per_update, peak or 0.0, log.gpu or ""


def summary(
    seconds: Mapping[tuple[str, ...], Sequence[float]],
    memory: Mapping[tuple[str, ...], Sequence[float]],
    bases: Mapping[tuple[str, ...], Optional[tuple[str, ...]]],
) -> list[dict[str, Any]]:
    """The rows of the table's file, from the rounds of each; ratios to the softmax row of the same round."""
    found = []
    for row, times in seconds.items():
        cost = {
            "labels": list(row),
            "seconds_per_update": round(statistics.median(times), 4),
            "rounds": [round(t, 4) for t in times],
            "peak_memory_mib": round(max(memory[row]), 1),
        }
        if (base := bases[row]) is not None:
            cost["time_ratio"] = round(statistics.median(a / b for a, b in zip(times, seconds[base])), 3)
            cost["memory_ratio"] = round(max(memory[row]) / max(memory[base]), 3)
        found.append(cost)
    return found


def measure(table: Table, scale: str, rounds: int, updates: int, out: Path, folder: Path) -> int:
    """Returns the exit status."""
    runs = measured_runs(table, scale, updates, rounds)
    rows = list(dict.fromkeys(row for row, _ in runs))
    busy = os.getloadavg()[0]
    if busy > 0.5:
        print(f"this machine is not idle: {busy:.1f} processes of the last minute wanted a core", flush=True)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    runner = Runner(make(folder_of(out, table, scale) / "cost" / stamp), 1)
    seconds: dict[tuple[str, ...], list[float]] = {row: [] for row in rows}
    memory: dict[tuple[str, ...], list[float]] = {row: [] for row in rows}
    device = ""
    with runner.stoppable():
        for i in range(1, rounds + 1):
            for row in rows:
                try:
                    took, peak, device = of_run(runner, runs[row, i])
                except Failure as failure:
                    if runner.stopped_by:
                        return 128 + runner.stopped_by
                    fail(f"{'/'.join(row)}: {failure}")
                seconds[row].append(took)
                memory[row].append(peak)
                print(f"[{i}/{rounds}] {'/'.join(row)}: {took:.3f} s/update, {peak:.0f} MiB", flush=True)
    about = results.about()
    cpu = about.pop("cpu")
    with results.changed(folder, table) as content:
        part = results.scale_of(content, table, scale, table.grid(scale))
        study = results.Study(table.name, "", scale, part, {}, [])
        part["cost"] = {
            **about,
            "device": device or cpu,
            "load_before": round(busy, 2),
            "rounds": rounds,
            "updates": updates,
            "rows": summary(seconds, memory, {row: study.other(row, "softmax") for row in rows}),
        }
        digests = {pair.labels: pair.bare.digest for pair in results.pairs(table.grid(scale), 1)}
        for cost in part["cost"]["rows"]:
            cost["digest"] = digests[tuple(cost["labels"])]
            ratio = f" ({cost['time_ratio']:.2f} of softmax)" if "time_ratio" in cost else ""
            print(
                f"{'/'.join(cost['labels'])}: {cost['seconds_per_update']:.3f} s/update{ratio}, "
                f"{cost['peak_memory_mib']:.0f} MiB"
            )
    return 0
