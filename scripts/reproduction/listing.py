"""Every row of the papers: its numbers, its state, what it would cost, and the command that makes it."""

import fcntl
import itertools
import os
import shlex
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import sweep

from reproduction import estimates, results, tables
from reproduction.identity import pairs
from reproduction.others import OTHERS
from reproduction.running import RecordingRunner, folder_of, states
from reproduction.tables import SEEDS, Table

WIDTH = 120
RUNNING, BEGUN = "running", "begun"
MARKS = {RUNNING: "r", BEGUN: "b"}

ABOUT = """\
Hours and memory (GiB) of a training on one H100-class GPU are estimates: there was none to measure on. Hours with * \
({arithmetic} of {rows} rows) are of arithmetic, at {utilisation:.0%} of the GPU's peak. The others are of starting \
kernels, which takes longer there: {launches:.0f} ms for each layer of a batch, an assumption. What mixing itself \
takes is in neither; README.md has ratios, measured on a CPU. --help has the formulas.
full and small: runs done of the {seeds} seeds that are wanted; r: one is running, b: one was begun and has no result. \
small is another size of model and text (--scale small); min: minutes that one took on a CPU here, the median.
"""


def of_table(table: Table, out: Path, folder: Path) -> dict[str, Any]:
    """All that is known of a table, for JSON."""
    grid = table.grid("full")
    scales = [scale for scale in table.scales() if scale != "tiny"]
    done = {scale: states(table, scale, SEEDS, out, folder) for scale in scales}
    unfinished = {scale: under_way(table, scale, out) for scale in scales}
    took = minutes(table, folder)
    found = []
    for run, row in zip(sweep.runs(grid), tables.rows(grid)):
        estimate = estimates.estimate(run)
        before = estimates.pretraining(run)
        found.append(
            {
                "labels": list(row),
                "published": tables.cell(grid.published, row),
                "command": command(table, row),
                "estimate": estimate and estimate._asdict(),
                "pretraining": before and before._asdict(),
                "done": {scale: counts[row] for scale, counts in done.items() if row in counts},
                "unfinished": {scale: of_row[row] for scale, of_row in unfinished.items() if row in of_row},
                "small_minutes": took.get(row),
            }
        )
    return {
        "table": table.name,
        "title": grid.title,
        "example": grid.example,
        "small_example": table.grid("small").example if "small" in scales else None,
        "metrics": list(grid.metrics),
        "published_metrics": list(table.published_metrics()),
        "note": tables.NOTES.get(table.name, ""),
        "scales": table.scales(),
        "seeds": SEEDS,
        "rows": found,
    }


def others() -> list[dict[str, Any]]:
    """What is no grid, for JSON."""
    return [
        {
            "what": other.what,
            "published": other.published,
            "commands": list(other.commands),
            "state": other.state,
            "cost": other.cost,
            "gpu_hours": other.gpu_hours,
        }
        for other in OTHERS
    ]


def command(table: Table, row: Sequence[str]) -> str:
    return f"scripts/reproduce.py run {table.name} --only {shlex.quote(','.join(row))}"


def minutes(table: Table, folder: Path) -> dict[tuple[str, ...], float]:
    """By row of the small grid what the updates of a training took, the median over its seeds."""
    taken: dict[tuple[str, ...], list[float]] = {}
    for run in results.runs(folder, table.name, "small"):
        if (found := results.training_minutes(run)) is not None:
            taken.setdefault(tuple(run["labels"]), []).append(found)
    return {row: round(statistics.median(times), 1) for row, times in taken.items()}


def under_way(table: Table, scale: str, out: Path) -> dict[tuple[str, ...], str]:
    """By row whether a run without a result is RUNNING, or was BEGUN and interrupted or failed."""
    runner = RecordingRunner(folder_of(out, table, scale), 1)
    found: dict[tuple[str, ...], str] = {}
    if not runner.out.is_dir():
        return found
    for pair in pairs(table.grid(scale), SEEDS):
        folder = runner.folder(pair.run)
        if (folder / "train.log").exists() and not runner.is_done(pair) and found.get(pair.labels) != RUNNING:
            found[pair.labels] = RUNNING if is_held(folder / "lock") else BEGUN
    return found


def is_held(path: Path) -> bool:
    """Whether a sweep has the run, or what it started."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(file)
    return False


def text(content: Sequence[Mapping[str, Any]]) -> str:
    """For people: columns, in 120 characters."""
    known = [row["estimate"] for table in content for row in table["rows"] if row["estimate"]]
    about = ABOUT.format(
        arithmetic=sum(estimate["bound"] == estimates.ARITHMETIC for estimate in known),
        rows=len(known),
        utilisation=estimates.UTILISATION,
        launches=estimates.LAUNCHES * 1000,
        seeds=SEEDS,
    )
    lines = [line for paragraph in about.splitlines() for line in textwrap.wrap(paragraph, WIDTH)]
    for table in content:
        title = f"{table['table']}: {table['title']}; paper: {'/'.join(table['published_metrics'])}"
        first = f"First: examples/{table['example']}/prepare.sh"
        if "small" in table["scales"] and (own := table["small_example"]) != table["example"]:
            first += f"; for small examples/{own}/prepare.sh"
        note = table["note"] if "prepare.sh" in table["note"] else f"{first}. {table['note']}".strip()
        lines += ["", title, *wrapped(note), *columns(cells_of(table))]
    lines += ["", *pretrainings(content), "", "What is no grid:"]
    for commands, others in itertools.groupby(OTHERS, key=lambda other: other.commands):
        for other in others:
            said = f"{other.what}{': ' if other.published else ''}{other.published}"
            lines += wrapped(f"{said} ({other.state}; {other.cost})")
        lines += [line for command in commands for line in wrapped(command, "    ", "        ", " \\")]
    return "\n".join(lines)


def wrapped(words: str, first: str = "  ", then: str = "  ", end: str = "") -> list[str]:
    """`end` is behind every line but the last."""
    whole = {"break_on_hyphens": False, "break_long_words": False}
    found = textwrap.wrap(words, WIDTH - len(end), initial_indent=first, subsequent_indent=then, **whole)
    return [line + end for line in found[:-1]] + found[-1:]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(rows[0]))]
    return ["  " + " ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in rows]


def cells_of(table: Mapping[str, Any]) -> list[list[str]]:
    scales = [scale for scale in table["scales"] if scale != "tiny"]
    small = ["min"] if "small" in scales else []
    found = [["", "paper", *scales, *small, "hours", "GiB", "scripts/reproduce.py ..."]]
    for row in table["rows"]:
        short = row["command"].removeprefix("scripts/reproduce.py ")
        done = [state(row, scale, table["seeds"]) for scale in scales]
        took = ["-" if row["small_minutes"] is None else f"{row['small_minutes']:.0f}"] * len(small)
        cells = ["/".join(row["labels"]), row["published"] or "-", *done, *took, *costs(row["estimate"]), short]
        found.append(cells)
    return found


def state(row: Mapping[str, Any], scale: str, seeds: int) -> str:
    if scale not in row["done"]:
        return "-"
    return f"{row['done'][scale]}/{seeds} {MARKS.get(row['unfinished'].get(scale), '')}".rstrip()


def costs(estimate: Optional[Mapping[str, Any]]) -> tuple[str, str]:
    if estimate is None:
        return "-", "-"
    mark = "*" if estimate["bound"] == estimates.ARITHMETIC else ""
    return f"{estimate['gpu_hours']:.3g}{mark}", f"{estimate['memory_gib']:.0f}"


def pretrainings(content: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each model that rows begin with."""
    rows = [row for table in content for row in table["rows"] if row["pretraining"]]
    models = {row["pretraining"]["arch"]: row for row in rows}
    if not models:
        return []
    names = ", ".join(table["table"] for table in content if any(row["pretraining"] for row in table["rows"]))
    said = f"Pre-training of the models of {names}, once for all of them: hours of both phases, the second of which is"
    found = textwrap.wrap(f"{said} the same command after VARIANT=512", WIDTH)
    lines = [["", "hours", "examples/bert/pretraining/train.sh ..."]]
    for arch, row in models.items():
        lines.append(["/".join(row["labels"]), f"{row['pretraining']['gpu_hours']:.0f}", f"--arch {arch}"])
    return found + columns(lines)
