"""How did several trainings go?

Reads what fairseq-train --log-format json logs: the file of --log-file, or what was printed, with whatever stands
around it. The figure has a panel for each of --metrics, over the updates, and a colour for each run: the training's
running values thin, each validation a point. Perplexity is on a logarithmic axis.

Where a run was interrupted and went on from a checkpoint, updates repeat: the last wins, and what came after them
the first time is dropped.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from mixhead_plugin.analysis import figures
from mixhead_plugin.errors import OptionError

UPDATES = "num_updates"
INNER = "train_inner"  # what fairseq logs every --log-interval updates, without a prefix
NO_METRICS = {UPDATES, "epoch", "update"}
# Metrics that grow by factors
LOGARITHMIC = {"ppl"}
NAMES = {"loss": "loss, bits", "nll_loss": "negative log-likelihood, bits", "ppl": "perplexity"}


class Entry(NamedTuple):
    """One line of a log."""

    series: str  # train_inner, train (mean of an epoch), valid or another subset
    updates: int
    values: Dict[str, float]


# By series and metric, the values by update, rising.
Run = Dict[str, Dict[str, Dict[int, float]]]


def parse(line: str) -> Optional[Entry]:
    """What a line of a log says; None for one that fairseq's progress bar did not write."""
    start = line.find("{")
    if start < 0:
        return None
    try:
        stats = json.loads(line[start:])
    except (ValueError, RecursionError):  # other text, or cut off
        return None
    if not isinstance(stats, dict):
        return None
    series, prefix = INNER, ""
    if UPDATES not in stats:
        keys = [key for key in stats if key.endswith(f"_{UPDATES}")]
        if len(keys) != 1:
            return None
        series = keys[0][: -len(f"_{UPDATES}")]
        prefix = f"{series}_"
    values = {}
    for key, value in stats.items():
        name = key[len(prefix) :]
        if key.startswith(prefix) and name not in NO_METRICS:
            try:
                values[name] = float(value)  # fairseq writes most numbers as strings
            except (TypeError, ValueError):
                continue
    try:
        return Entry(series, int(float(stats[prefix + UPDATES])), values)
    except (TypeError, ValueError, OverflowError):
        return None


def collect(entries: Iterator[Entry]) -> Run:
    """The series of one run from its lines in the order that they were written."""
    run: Run = {}
    last = 0
    for entry in entries:
        if entry.updates < last:  # gone on from a checkpoint
            for metrics in run.values():
                for points in metrics.values():
                    for update in [update for update in points if update >= entry.updates]:
                        del points[update]
        last = entry.updates
        for name, value in entry.values.items():
            run.setdefault(entry.series, {}).setdefault(name, {})[entry.updates] = value
    return run


def read(path: str) -> Run:
    """The log of one training.

    Raises:
        OptionError: it cannot be read or has no line of fairseq's JSON
    """
    file = Path(path)
    if not file.is_file():
        raise OptionError(f"{path}: {'is a folder; give the log in it' if file.is_dir() else 'no such file'}")
    with file.open(encoding="utf-8", errors="replace") as lines:
        run = collect(entry for entry in map(parse, lines) if entry is not None)
    if not run:
        raise OptionError(f"{path}: has no JSON of fairseq-train; train with --log-format json (and --log-file)")
    return run


def training_points(run: Run, metric: str) -> Dict[int, float]:
    """A metric over the training: as often as it was logged, else the means of the epochs."""
    return run.get(INNER, {}).get(metric) or run.get("train", {}).get(metric, {})


def finite(points: Dict[int, float]) -> Tuple[List[int], List[float]]:
    """As matplotlib wants them; infinite values, of a training that failed, leave a gap."""
    return list(points), [value if math.isfinite(value) else math.nan for value in points.values()]


def draw(runs: Dict[str, Run], metrics: List[str], subset: str) -> figures.Figure:
    figure, axes = figures.subplots(1, len(metrics), (4.6, 3.6))
    for panel, metric in zip(axes[0], metrics):
        for i, (label, run) in enumerate(runs.items()):
            look = figures.line(i)
            training = training_points(run, metric)
            validation = run.get(subset, {}).get(metric, {})
            if training:
                panel.plot(*finite(training), **look, linewidth=0.7, alpha=0.6, label=f"{label}: training")
            if validation:
                marks = dict(linewidth=1.8, marker="o", markersize=3, label=f"{label}: {subset}")
                panel.plot(*finite(validation), **look, **marks)
        panel.set(xlabel="updates", ylabel=NAMES.get(metric, metric))
        if metric in LOGARITHMIC:
            figures.logarithmic(panel.yaxis)
        panel.grid(True, which="both")
    figures.legend_below(figure, axes)
    return figure


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("logs", nargs="+", metavar="LOG", help="logs of fairseq-train --log-format json, one for a run")
    figures.add_labels(parser)
    figures.add_arguments(parser)
    parser.add_argument(
        "--metrics",
        default="loss,ppl",
        metavar="A,B,...",
        help="panels: loss, nll_loss, ppl, bleu, accuracy, orthogonal_loss, ... (default: %(default)s)",
    )
    parser.add_argument("--subset", default="valid", help="which set's validations (default: %(default)s)")


def run(args: Namespace) -> None:
    labels = [given or default_label(path) for given, path in zip(figures.labels(args, len(args.logs)), args.logs)]
    figures.check_distinct(labels)
    runs = {label: read(path) for label, path in zip(labels, args.logs)}
    metrics = [name for name in args.metrics.split(",") if name]
    if not metrics:
        raise OptionError(f"--metrics {args.metrics}: must be one name or several, with commas between them")
    for metric in metrics:
        if not any(training_points(run, metric) or run.get(args.subset, {}).get(metric) for run in runs.values()):
            logged = sorted({m for run in runs.values() for s in (INNER, "train", args.subset) for m in run.get(s, {})})
            raise OptionError(f"--metrics {metric}: not in these logs; must be of {', '.join(logged)}")
    for label, entries in runs.items():
        print(f"{label}: {summary(entries, metrics[-1], args.subset)}")
    with figures.style():
        files = figures.save(draw(runs, metrics, args.subset), args.output, "curves")
    files.append(figures.save_json(args.output, "curves", args, {"runs": {k: as_lists(v) for k, v in runs.items()}}))
    figures.report(files)


def default_label(path: str) -> str:
    """The name of the log, or of its folder if logs are usually called so."""
    file = Path(path)
    folder = file.resolve().parent.name
    return folder if file.stem in ("log", "train", "training") and folder else file.stem


def summary(run: Run, metric: str, subset: str) -> str:
    """The end of a run in words."""
    points = run.get(subset, {}).get(metric) or training_points(run, metric)
    updates = max(update for metrics in run.values() for values in metrics.values() for update in values)
    if not points:
        return f"{updates} updates, no {metric}"
    last = max(points)
    what = subset if run.get(subset, {}).get(metric) else "training"
    return f"{updates} updates, {what} {metric} {points[last]:g} at {last}"


def as_lists(run: Run) -> Dict[str, Any]:
    """Series -> metric -> updates and values, for JSON."""
    return {
        series: {name: {"updates": list(points), "values": list(points.values())} for name, points in metrics.items()}
        for series, metrics in run.items()
    }
