"""The median over seeds of a sweep, and the best point by it: `python -m glue.median TABLE.JSON ...`

Of every table.json of examples/sweep.py, the runs that differ in the axis `seed` alone are taken together.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import failing

fail = failing("median")


class Group(NamedTuple):
    """Runs that differ in their seed."""

    labels: tuple[str, ...]  # of the other axes
    values: list[float]
    missing: int  # runs without a result

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def read(path: Path) -> tuple[str, list[Mapping[str, Any]]]:
    """The title of a table and its rows."""
    try:
        content = json.loads(path.read_text())
        title, rows = content["title"], content["rows"]
        if not rows:
            fail(f"{path}: has no runs")
        return title, rows
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except (ValueError, LookupError, TypeError):
        fail(f"{path}: is no table.json of examples/sweep.py")


def groups(rows: Sequence[Mapping[str, Any]], axes: Sequence[str], metric: str) -> list[Group]:
    """In the order of the rows."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for row in rows:
        found.setdefault(tuple(row[axis] for axis in axes), []).append(row[metric])
    return [
        Group(labels, [value for value in values if value is not None], values.count(None))
        for labels, values in found.items()
    ]


def markdown(title: str, axes: Sequence[str], found: Sequence[Group]) -> str:
    """A line for every point; of each value of the first axis the best in bold, among points that lack no run."""
    best = {}
    for group in found:
        if group.values and not group.missing:
            key = group.labels[:1]
            best[key] = max(best.get(key, group), group, key=lambda g: g.median)
    lines = [f"# {title}", "", "| " + " | ".join([*axes, "median", "lowest", "highest", "seeds"]) + " |"]
    lines.append("|" + " --- |" * (len(axes) + 4))
    for group in found:
        seeds = f"{len(group.values)}" + (f", {group.missing} missing" if group.missing else "")
        if not group.values:
            lines.append("| " + " | ".join([*group.labels, "-", "-", "-", seeds]) + " |")
            continue
        median = f"{group.median:.2f}"
        if best.get(group.labels[:1]) is group:
            median = f"**{median}**"
        cells = [*group.labels, median, f"{min(group.values):.2f}", f"{max(group.values):.2f}", seeds]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="median", description=__doc__)
    parser.add_argument("tables", type=Path, nargs="+", metavar="table.json")
    parser.add_argument("--metric", default="valid", help="column of the tables (default: %(default)s)")
    parser.add_argument(
        "--over", default="seed", metavar="AXIS", help="of the runs that are one (default: %(default)s)"
    )
    args = parser.parse_args()
    for path in args.tables:
        title, rows = read(path)
        for option, name in (("over", args.over), ("metric", args.metric)):
            if any(name not in row for row in rows):
                fail(f"--{option} {name}: {path} has the columns {', '.join(rows[0])}")
        # the axes come first, then the metrics, of which there is one or more, then these two
        columns = list(rows[0])[: list(rows[0]).index(args.metric)]
        axes = [column for column in columns if column != args.over and isinstance(rows[0][column], str)]
        print(markdown(f"{title}, {path.parent.name}", axes, groups(rows, axes, args.metric)))


if __name__ == "__main__":
    main()
