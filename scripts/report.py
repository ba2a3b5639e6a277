#!/usr/bin/env python3
"""Make tables and pictures of runs, beside the papers' numbers.

Without arguments it writes results/tables.md, results/*.svg and the list of comparisons
results/comparisons.csv from results/*.json.

    scripts/report.py
    scripts/report.py GRID.toml       print the table of a grid's finished runs
    scripts/report.py results/X.json  print the table of saved runs
    scripts/report.py examples/grids/mixhead_table_8.toml --save results/table8.json
    scripts/report.py results/convergence.json --compare 'softmax,5M in the time of B' B,5M

A number is the mean over seeds ± its standard deviation, with the number of seeds in brackets. The
gain says how much better a row is than the baseline with the same seed; above 0 is better. For
perplexities it is the difference of the logarithms in percent, for other metrics the difference.
From three seeds on, its 95% interval and p are those of scipy's paired t-test. The paper's models
and texts are larger, so its numbers are shown and not tested. A grid that plans a number of `seeds`
shows no result before every point has as many.
"""

import argparse
import html
import itertools
import math
import os
import re
import signal
import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib import ticker
from studies import effect_figures, effects, planned
from studies.grids import fail
from studies.inference import Estimate
from studies.provenance import ROOT
from studies.study import (
    LOSS,
    LOWER_IS_BETTER,
    Row,
    Study,
    from_results,
    from_runs,
    gain,
    save,
    with_kept,
)

from mixhead_plugin.heads.figures import LINES, colours

matplotlib.use("Agg")

# ---- tables -------------------------------------------------------------------------------------


def spread(values: Collection[float], decimals: int) -> str:
    if not values:
        return "not run"
    deviation = f" ± {statistics.stdev(values):.{decimals}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{decimals}f}{deviation} ({len(values)})"


def gain_cells(study: Study, found: Estimate | None, metric: str = "") -> list[str]:
    """Return the mean with its interval, and p."""
    if found is None:
        return ["", ""]
    decimals = study.decimals(metric or study.metric)
    mean, low, high = (f"{v:+.{decimals}f}" for v in (found.mean, found.low, found.high))
    return [mean, ""] if math.isnan(found.p) else [f"{mean} [{low}, {high}]", f"{found.p:.2g}"]


def comparison(study: Study, words: Sequence[str]) -> str:
    """Return a line about two rows, each named by its labels with commas between them."""
    if study.waits:
        fail(
            f"--compare: {study.source} shows no result before {study.grid.seeds} seeds have every "
            "point"
        )
    named = {",".join(row): row for row in study.rows}
    if unknown := [name for name in words if name not in named]:
        fail(f"--compare {unknown[0]}: has no run; must be among {'; '.join(named)}")
    rows = [named[name] for name in words]
    found = gain(study, *rows)
    if found is None:
        fail(f"--compare {' '.join(words)}: have no seed in common")
    mean, p = gain_cells(study, found)
    seeds = f"{found.count} seeds" + (f", p {p}" if p else ", no interval")
    time = (
        f"; CPU time of the updates, ratio {ratio}"
        if (ratio := median(study.time_ratios(*rows)))
        else ""
    )
    return (
        f"{words[0]} over {words[1]}: {mean} {study.unit(study.metric)}, {study.metric}; "
        f"{seeds}{time}"
    )


def median(ratios: Sequence[float]) -> str:
    return (
        f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]" if ratios else ""
    )


def markdown(study: Study) -> str:
    """Return the table of a study; columns that no row has are left out."""
    hidden = study.waits
    own_table = "" if hidden else planned.own_table(study)
    compared = not hidden and not own_table and any(study.baseline(row) for row in study.rows)
    metrics = study.metrics
    # a planned experiment has all its metrics compared
    gained = study.metrics if study.grid.seeds else [study.metric]
    if not study.measure(study.metric).startswith(LOWER_IS_BETTER) and any(
        study.values(r, LOSS) for r in study.rows
    ):
        metrics, gained = [*metrics, LOSS], [study.metric, LOSS]  # beside BLEU and the like
    head = [
        *study.grid.axes,
        "paper",
        *(f"{metric}, {escaped(study.measure(metric))}" for metric in metrics),
    ]
    head += (
        [word for metric in gained for word in (f"gain in {metric}, {study.unit(metric)}", "p")]
        if compared
        else []
    )
    head += ["training time, ratio"]  # divided by the baseline's of the same round
    times = {
        tuple(cost["labels"].values()): cost.get("time_ratios", [])
        for cost in study.cost.get("rows", [])
    }
    lines = []
    for row in study.rows:
        cells = [*row, study.published(row)]
        for metric in metrics:
            values = study.values(row, metric).values()
            if not study.grid.measures(row, metric):
                cells.append("")
            else:
                cells.append(
                    f"{len(values)} runs" if hidden else spread(values, study.decimals(metric))
                )
        for metric in gained if compared else []:
            cells += gain_cells(study, gain(study, row, metric=metric), metric)
        lines.append([*cells, median(times.get(row, []))])
    used = [i for i in range(len(head)) if any(line[i] for line in lines)]
    table = [head, ["---"] * len(head), *lines]
    text = "\n".join("| " + " | ".join(line[i] for i in used) + " |" for line in table)
    if hidden:
        text += f"\n\nNot ended: {study.whole_seeds} of {study.grid.seeds} seeds have every point."
    elif own_table:
        text += f"\n\n{own_table}"
    return f"## {study.grid.title}\n\n{facts(study)}\n\n{text}\n"


def escaped(text: str) -> str:
    """Return the text for Markdown, without HTML and links."""
    return re.sub(r"([\[\]|`\\])", r"\\\1", html.escape(" ".join(text.split()), quote=False))


def facts(study: Study) -> str:
    """Return a list of facts about the runs, with all values that occur."""

    def listed(name: str) -> str:
        return "; ".join(dict.fromkeys(escaped(run[name]) for run in study.runs if run.get(name)))

    minutes = sorted(run["seconds"] / 60 for run in study.runs)
    seeds = [run["seed"] for run in study.runs]
    versions = {
        escaped(f"{name} {version}")
        for run in study.runs
        for name, version in run["versions"].items()
    }
    lines = [
        f"Grid: `{study.source}`; {len(study.rows)} of "
        f"{math.prod(map(len, study.grid.axes.values()))} rows.",
        f"Runs: {len(study.runs)}, {minutes[0]:.0f} to {minutes[-1]:.0f} minutes each; "
        f"{listed('device')}.",
        f"Seeds: {min(seeds)} to {max(seeds)}.",
        # a task may draw its own data
        *(f"Text: SHA-256 {data}." for data in [listed("data")] if data),
        f"Commits: {listed('commit')}.",
        f"Versions: {', '.join(sorted(versions))}.",
    ]
    return "\n".join(f"- {line}" for line in lines)


# ---- pictures ----------------------------------------------------------------------------------


@matplotlib.rc_context({"svg.hashsalt": "mixhead", "svg.fonttype": "none", "font.size": 9})
def draw(study: Study, path: Path) -> None:
    """Draw the metric of each row, the gains with their intervals, and the training curves,
    if any.
    """
    if planned.draw_own(study, path):
        return
    rows = [row for row in study.rows if study.values(row, study.metric)]
    gained = {row: found for row in rows if (found := gain(study, row))}
    ends = ("tokens", "cpu_seconds") if study.grid.starts else ()
    curves = [
        name
        for name in ("tokens", "cpu_seconds")
        if any(len(curve(study, row, name)) > 1 for row in rows)
    ]
    of = colours(map(study.variant, rows))
    styles = dict(zip(dict.fromkeys(group(study, row) for row in rows), itertools.cycle(LINES)))
    count = (len(ends) or 1) + bool(gained) + len(curves)
    figure, axes = plt.subplots(1, count, figsize=(max(4.4 * count, 6), 3.6), squeeze=False)
    panels = iter(axes[0])
    for name in ends:
        draw_ends(next(panels), study, rows, name, of)
    if not ends:
        draw_values(next(panels), study, rows, of)
    if gained:
        draw_gains(next(panels), study, gained, of)
    for panel, name in zip(panels, curves):
        for row in rows:
            if points := curve(study, row, name):
                panel.plot(
                    *zip(*points), color=of[study.variant(row)], ls=styles[group(study, row)]
                )
        panel.set(
            xlabel=name.replace("_", " ").replace("cpu", "CPU"),
            ylabel=f"validation loss, {study.loss_unit}",
        )
    handles = [
        plt.Line2D([], [], color=colour, marker="o", ls="", label=name)
        for name, colour in of.items()
    ]
    if curves and len(styles) > 1:
        handles += [
            plt.Line2D([], [], color="grey", ls=style, label=name) for name, style in styles.items()
        ]
    if any(study.published_gain(row) is not None for row in gained):
        handles.append(
            plt.Line2D(
                [], [], color="grey", marker="D", ls="", mfc="none", label="the paper's gain"
            )
        )
    if len(handles) > 1:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
        )
    figure.suptitle(study.grid.title)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def group(study: Study, row: Row) -> str:
    """Return the labels of a row other than its variant."""
    return ", ".join(label for label in row if label != study.variant(row))


def place(study: Study, rows: Sequence[Row]) -> tuple[list[str], dict[Row, float]]:
    """Return the groups of rows, and the place of each row on the axis."""
    groups = list(dict.fromkeys(group(study, row) for row in rows))
    variants = list(dict.fromkeys(map(study.variant, rows)))
    step, middle = 0.7 / len(variants), (len(variants) - 1) / 2
    at = {row: step * (variants.index(study.variant(row)) - middle) for row in rows}
    return groups, {row: groups.index(group(study, row)) + own for row, own in at.items()}


def draw_values(panel: Any, study: Study, rows: Sequence[Row], of: Mapping[str, str]) -> None:
    groups, at = place(study, rows)
    for row in rows:
        values = list(study.values(row, study.metric).values())
        panel.plot(
            [at[row]] * len(values), values, "o", color=of[study.variant(row)], ms=3, alpha=0.5
        )
        panel.plot(
            at[row], statistics.fmean(values), "_", color=of[study.variant(row)], ms=12, mew=2
        )
    panel.set_ylabel(f"{study.metric}, {study.measure(study.metric)}: seeds and mean")
    panel.set(xticks=range(len(groups)), xticklabels=groups, xlabel=study.groups)


def draw_ends(
    panel: Any, study: Study, rows: Sequence[Row], name: str, of: Mapping[str, str]
) -> None:
    """Draw the metric at the end of each run against its tokens or CPU seconds, and a line through
    the means.
    """
    for variant, colour in of.items():
        means = []
        for row in (row for row in rows if study.variant(row) == variant):
            ended = [run for run in study.of(row) if study.metric in run["metrics"]]
            points = [(run["points"][-1][name], run["metrics"][study.metric]) for run in ended]
            panel.plot(*zip(*points), "o", color=colour, ms=3, alpha=0.5)
            means.append(tuple(map(statistics.fmean, zip(*points))))
        panel.plot(*zip(*sorted(means)), color=colour, marker="_", ms=12, mew=2, lw=1)
    panel.set(
        xlabel=f"{name.replace('_', ' ').replace('cpu', 'CPU')} of all updates, logarithmic",
        xscale="log",
    )
    panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
    panel.xaxis.set_major_formatter(ticker.EngFormatter())
    panel.xaxis.set_minor_locator(ticker.NullLocator())
    panel.set(ylabel=f"{study.metric}, {study.measure(study.metric)}: seeds and mean")


def draw_gains(
    panel: Any, study: Study, gained: Mapping[Row, Estimate], of: Mapping[str, str]
) -> None:
    groups, at = place(study, list(gained))
    for row, found in gained.items():
        error = (
            None if math.isnan(found.p) else [[found.mean - found.low], [found.high - found.mean]]
        )
        panel.errorbar(
            at[row], found.mean, error, fmt="o", color=of[study.variant(row)], ms=4, capsize=3
        )
        if (published := study.published_gain(row)) is not None:
            panel.plot(at[row], published, "D", color=of[study.variant(row)], ms=5, mfc="none")
    panel.axhline(0, color="grey", lw=0.8)
    panel.set_ylabel(
        f"gain over {study.grid.baseline}, {study.unit(study.metric)}\nwith 95% intervals"
    )
    panel.set(xticks=range(len(groups)), xticklabels=groups, xlabel=study.groups)


def curve(study: Study, row: Row, name: str) -> list[tuple[float, float]]:
    """Return the validation loss against tokens or CPU seconds,
    each a mean over the row's seeds.
    """
    by_update: dict[float, list[tuple[float, float]]] = {}
    for run in study.of(row):
        for point in run.get("points", []):
            if "valid_loss" in point and name in point:
                by_update.setdefault(point["update"], []).append((point[name], point["valid_loss"]))
    return [tuple(map(statistics.fmean, zip(*points))) for _, points in sorted(by_update.items())]


# ---- the command -------------------------------------------------------------------------------


def refuse_unwritable(path: Path) -> None:
    """End the program if --save cannot be written, before the table is made."""
    if not path.parent.is_dir():
        fail(f"--save {path}: {path.parent} is no folder")
    if path.is_dir():
        fail(f"--save {path}: is a folder, must be a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        fail(f"--save {path}: cannot be written to")


def main() -> None:
    parser = argparse.ArgumentParser(
        "report.py", None, __doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "a grid that scripts/sweep.py ran, or a .json file of saved runs (default: all results)"
    parser.add_argument("grid", nargs="?", type=Path, help=text)
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs", help="folder of the runs (default: runs)"
    )
    text = "print the gain of the first row over the second"
    parser.add_argument(
        "--compare", nargs=2, action="append", default=[], metavar="LABEL,LABEL", help=text
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the runs to one JSON file, and its picture"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "results", help="saved runs (default: results)"
    )
    args = parser.parse_args()
    if args.save:
        refuse_unwritable(args.save)
    if args.grid:
        study = (
            from_results(args.grid)
            if args.grid.suffix == ".json"
            else from_runs(args.grid, args.runs)
        )
        if args.save and args.save.exists():
            study = with_kept(study, args.save)
        print(markdown(study))
        for words in args.compare:
            print(comparison(study, words))
        if args.save:
            save(study, args.save)
            if not study.waits:
                draw(study, args.save.with_suffix(".svg"))
        return
    comparisons = args.results / "comparisons.csv"
    studies = [from_results(path) for path in sorted(args.results.glob("*.json"))]
    if not studies:
        fail(f"{args.results}: has no JSON files")
    text = (
        "# Tables\n\nWritten by `scripts/report.py`. "
        + " ".join(__doc__.split("\n\n")[-1].split())
        + "\n"
    )
    if comparisons.exists():
        text += f"\n{effects.sections(args.results)}"
        effect_figures.draw(args.results)
    for study in studies:
        text += f"\n{markdown(study)}"
        if not study.waits:
            text += f"\n![{study.grid.title}]({study.name}.svg)\n"
            draw(study, args.results / f"{study.name}.svg")
    (args.results / "tables.md").write_text(text, encoding="utf-8")
    print(args.results / "tables.md")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no traceback for `report.py FILE | head`
    main()
