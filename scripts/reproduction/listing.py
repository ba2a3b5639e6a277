"""Every row of the papers: its numbers, its state, what it would cost, and the command that makes it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sweep

from reproduction import estimates, tables
from reproduction.running import states
from reproduction.tables import OTHERS, SEEDS, Table

WIDTH = 120


def of_table(table: Table, out: Path, folder: Path) -> dict[str, Any]:
    """All that is known of a table, for JSON."""
    grid = table.grid("full")
    scales = [scale for scale in table.scales() if scale != "tiny"]
    done = {scale: states(table, scale, SEEDS, out, folder) for scale in scales}
    found = []
    for run, row in zip(sweep.runs(grid), tables.rows(grid)):
        estimate = estimates.estimate(run)
        found.append(
            {
                "labels": list(row),
                "published": tables.cell(grid.published, row),
                "command": command(table, grid.axes, row),
                "estimate": estimate and estimate._asdict(),
                "done": {scale: counts[row] for scale, counts in done.items() if row in counts},
            }
        )
    return {
        "table": table.name,
        "title": grid.title,
        "example": grid.example,
        "metrics": list(grid.metrics),
        "scales": table.scales(),
        "seeds": SEEDS,
        "rows": found,
    }


def command(table: Table, axes: Mapping[str, Mapping[str, Any]], row: Sequence[str]) -> str:
    return f"scripts/reproduce.py run {table.name} --only {shlex.quote(','.join(row))}"


def text(content: Sequence[Mapping[str, Any]]) -> str:
    """For people: columns, in 120 characters."""
    lines = [
        "Hours and memory (GiB) are estimates for one run on one H100-class GPU at "
        f"{estimates.UTILISATION:.0%} of its peak; --help has the formula.",
        f"full and small: runs done of the {SEEDS} seeds that are wanted; small, with --scale small, is another size "
        "of model and text.",
    ]
    for table in content:
        scales = [scale for scale in table["scales"] if scale != "tiny"]
        heads = ["", "paper", *scales, "hours", "GiB", "scripts/reproduce.py ..."]
        rows = []
        for row in table["rows"]:
            estimate = row["estimate"]
            hours, memory = (
                (f"{estimate['gpu_hours']:.3g}", f"{estimate['memory_gib']:.0f}") if estimate else ("-", "-")
            )
            states = [f"{row['done'][s]}/{table['seeds']}" if s in row["done"] else "-" for s in scales]
            short = row["command"].removeprefix("scripts/reproduce.py ")
            rows.append(["/".join(row["labels"]), row["published"] or "-", *states, hours, memory, short])
        widths = [max(len(cells[i]) for cells in [heads, *rows]) for i in range(len(heads))]
        lines += ["", f"{table['table']}: {table['title']}; {'/'.join(table['metrics'])}"]
        for cells in [heads, *rows]:
            lines.append("  " + " ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip())
    lines += ["", "What is no grid:"]
    for other in OTHERS:
        lines.append(f"  {other.what}{': ' if other.published else ''}{other.published}")
        lines += [f"    {command}" for command in other.commands]
    return "\n".join(lines)
