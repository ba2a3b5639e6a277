"""Read the logs of fairseq-train --log-format json."""

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mixhead_plugin.errors import OptionError

UPDATES = "num_updates"
INNER = "train_inner"  # the lines of --log-interval, whose keys have no prefix


class Entry(NamedTuple):
    """One line of a log."""

    series: str  # train_inner, train (mean of an epoch), valid or another subset
    updates: int
    values: dict[str, float]


# The values of a metric by update, ascending; by series and metric.
Run = dict[str, dict[str, dict[int, float]]]


def read_line(line: str) -> Entry | None:
    """Return the metrics in a line of a log, or None for a line without fairseq's JSON."""
    _, brace, rest = line.partition("{")
    try:
        stats = json.loads(brace + rest)
        key = next(key for key in stats if key == UPDATES or key.endswith(f"_{UPDATES}"))
        updates = int(float(stats[key]))
    except (ValueError, TypeError, OverflowError, RecursionError, StopIteration):  # other text, or cut off
        return None
    prefix = key.removesuffix(UPDATES)  # empty or, for instance, valid_
    values = {}
    for name, value in stats.items():
        metric = name.removeprefix(prefix)
        if name.startswith(prefix) and metric not in (UPDATES, "epoch", "update"):
            with suppress(TypeError, ValueError):
                values[metric] = float(value)  # fairseq writes most numbers as strings
    return Entry(prefix.removesuffix("_") or INNER, updates, values)


def read_log(path: str | Path) -> Run:
    """Read the log of one training: the file of --log-file, or captured output; refuse one without fairseq's JSON.

    An interrupted training repeats the updates after its last checkpoint. Only the repeated values are returned.
    """
    run: Run = {}
    last = 0
    with open(path, encoding="utf-8", errors="replace") as lines:
        for entry in filter(None, map(read_line, lines)):
            if entry.updates < last:
                for metrics in run.values():
                    for name, points in metrics.items():
                        metrics[name] = {update: value for update, value in points.items() if update < entry.updates}
            last = entry.updates
            for name, value in entry.values.items():
                run.setdefault(entry.series, {}).setdefault(name, {})[last] = value
    if not run:
        raise OptionError(f"{path}: has no JSON of fairseq-train; train with --log-format json (and --log-file)")
    return run
