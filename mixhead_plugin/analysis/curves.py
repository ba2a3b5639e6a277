"""Draw learning curves of several trainings from their logs (mixhead figure 2).

A log comes from fairseq-train --log-format json: the file of --log-file, or captured output. The figure has a panel
for each of --metrics, over the updates, and a colour for each run. Thin lines are the training, points the validations.
Perplexity is on a logarithmic axis.

Example: curves fairseq/train.log mixhead/train.log --labels fairseq,Mixhead
"""

import math
from argparse import ArgumentParser, Namespace
from typing import Any

from mixhead_plugin.analysis import figures, output
from mixhead_plugin.analysis.logs import INNER, Run, read_log
from mixhead_plugin.errors import OptionError

NAMES = {"loss": "loss, bits", "nll_loss": "negative log-likelihood, bits", "ppl": "perplexity"}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("logs", nargs="+", metavar="LOG", help="logs of fairseq-train --log-format json, one for a run")
    output.add_arguments(parser, labels=True)
    text = "panels: loss, nll_loss, ppl, bleu, accuracy, orthogonal_loss, ... (default: %(default)s)"
    parser.add_argument("--metrics", default="loss,ppl", metavar="A,B,...", help=text)
    parser.add_argument("--subset", default="valid", help="the validation set to draw (default: %(default)s)")


def run(args: Namespace) -> None:
    labels = output.labels(args, [output.name_of(path) for path in args.logs])
    runs = dict(zip(labels, map(read_log, args.logs), strict=True))
    metrics = [name for name in args.metrics.split(",") if name]
    logged = {m for run in runs.values() for series in (INNER, "train", args.subset) for m in run.get(series, {})}
    if not metrics or not logged.issuperset(metrics):
        raise OptionError(f"--metrics {args.metrics}: must be one or several of {', '.join(sorted(logged))}")
    results: dict[str, Any] = {}
    for label, series in runs.items():
        updates = max(update for found in series.values() for points in found.values() for update in points)
        print(f"{label}: {updates} updates")
        results[label] = {}
        for name, found in series.items():
            results[label][name] = {m: {"updates": list(p), "values": list(p.values())} for m, p in found.items()}
    output.write(args, "curves", {"runs": results}, {"curves": draw(runs, metrics, args.subset)})


def draw(runs: dict[str, Run], metrics: list[str], subset: str) -> Any:
    from matplotlib.ticker import LogLocator, NullFormatter

    def plot(panel: Any, points: dict[int, float], **look: Any) -> None:
        finite = [value if math.isfinite(value) else math.nan for value in points.values()]  # NaN leaves a gap
        if points:
            panel.plot(list(points), finite, **look)

    with figures.style():
        figure, axes = figures.subplots(1, len(metrics), (4.6, 3.6))
        lines = figures.lines(runs)
        for panel, metric in zip(axes[0], metrics, strict=True):
            for label, run in runs.items():
                look = {**lines[label], "linewidth": 0.7, "alpha": 0.6, "label": f"{label}: training"}
                means = run.get("train", {}).get(metric, {})  # over the epochs
                plot(panel, run.get(INNER, {}).get(metric) or means, **look)
                look = {**lines[label], "linewidth": 1.8, "marker": "o", "markersize": 3}
                plot(panel, run.get(subset, {}).get(metric, {}), **look, label=f"{label}: {subset}")
            panel.set(xlabel="updates", ylabel=NAMES.get(metric, metric))
            if metric == "ppl":
                panel.set_yscale("log")
                panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # numbers also between powers of ten
                panel.yaxis.set_major_formatter("{x:g}")
                panel.yaxis.set_minor_formatter(NullFormatter())
        figures.legend_below(figure, axes)
    return figure
