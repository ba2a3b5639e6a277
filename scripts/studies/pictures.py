"""The picture of a study: its values, the gains over the baseline, and the training curves."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib import ticker

from mixhead_plugin.heads.figures import LINES, colours, save_svg
from studies import planned_pictures
from studies.colours import VARIANTS
from studies.inference import Estimate, bars_of
from studies.study import Row, Study, gain

Axes = Any  # of matplotlib
Curve = list[tuple[float, float]]


@matplotlib.rc_context({"svg.hashsalt": "mixhead", "svg.fonttype": "none", "font.size": 9})
def draw(study: Study, path: Path) -> None:
    """Draw the picture that was registered for the study, or panels side by side.

    The panels are the metric of each row, the gains with their intervals, and the training curves.
    """
    if planned_pictures.draw_own(study, path):
        return
    rows = [row for row in study.rows if study.values(row, study.metric)]
    gains = gains_of(study, rows)
    colour_of = colours(map(study.variant, rows), fixed=VARIANTS)
    panels = panels_of_values(study, rows, colour_of)
    if gains:
        panels.append(partial(draw_gains, study=study, gains=gains, colour_of=colour_of))
    styles = styles_of(study, rows)
    curves = [name for name in ("tokens", "cpu_seconds") if has_curve(study, rows, name)]
    for name in curves:
        panels.append(
            partial(
                draw_curves, study=study, rows=rows, name=name, colour_of=colour_of, styles=styles
            )
        )

    width = max(4.4 * len(panels), 6)
    figure, axes = plt.subplots(1, len(panels), figsize=(width, 3.6), squeeze=False)
    for panel, draw_panel in zip(axes[0], panels):
        draw_panel(panel)
    handles = legend_of(study, gains, colour_of, styles if curves else {})
    if len(handles) > 1:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=len(handles), frameon=False
        )
    figure.suptitle(study.grid.title)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    save_svg(figure, path)
    plt.close(figure)


def gains_of(study: Study, rows: Sequence[Row]) -> dict[Row, Estimate]:
    """Return the gains of the rows that have one."""
    gains = {}
    for row in rows:
        estimate = gain(study, row)
        if estimate is not None:
            gains[row] = estimate
    return gains


def legend_of(
    study: Study,
    gains: Mapping[Row, Estimate],
    colour_of: Mapping[str, str],
    styles: Mapping[str, Any],
) -> list[Any]:
    """Return a mark for each variant, a line for each group of curves, and the paper's mark."""
    handles = []
    for variant, colour in colour_of.items():
        handles.append(plt.Line2D([], [], color=colour, marker="o", ls="", label=variant))
    if len(styles) > 1:
        for group, style in styles.items():
            handles.append(plt.Line2D([], [], color="grey", ls=style, label=group))
    if any(study.published_gain(row) is not None for row in gains):
        handles.append(
            plt.Line2D(
                [], [], color="grey", marker="D", ls="", mfc="none", label="the paper's gain"
            )
        )
    return handles


# ---- where a row stands ------------------------------------------------------------------------


def groups_of(study: Study, rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(map(study.group, rows)))


def styles_of(study: Study, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the style of line of each group."""
    return dict(zip(groups_of(study, rows), itertools.cycle(LINES)))


def places_of(study: Study, rows: Sequence[Row]) -> dict[Row, float]:
    """Return where each row stands on the axis: groups at 0, 1, ..., their variants beside it."""
    groups = groups_of(study, rows)
    variants = list(dict.fromkeys(map(study.variant, rows)))
    step = 0.7 / len(variants)
    middle = (len(variants) - 1) / 2
    places = {}
    for row in rows:
        beside = variants.index(study.variant(row)) - middle
        places[row] = groups.index(study.group(row)) + step * beside
    return places


def name_groups(panel: Axes, study: Study, rows: Sequence[Row]) -> None:
    groups = groups_of(study, rows)
    panel.set(xticks=range(len(groups)), xticklabels=groups, xlabel=study.groups)


# ---- values ------------------------------------------------------------------------------------


def panels_of_values(
    study: Study, rows: Sequence[Row], colour_of: Mapping[str, str]
) -> list[Callable[[Axes], None]]:
    """Return what draws the values: by row, or by the ends of runs that start from others."""
    if not study.grid.starts:
        return [partial(draw_values, study=study, rows=rows, colour_of=colour_of)]
    ends = []
    for row in rows:
        ends += [end for _, end in ends_of(study, row)]
    panels = []
    for name in ("tokens", "cpu_seconds"):
        if all(name in end for end in ends):
            panels.append(
                partial(draw_ends, study=study, rows=rows, name=name, colour_of=colour_of)
            )
    return panels


def ends_of(study: Study, row: Row) -> list[tuple[float, Mapping[str, float]]]:
    """Return the metric and the last point of each run of a row.

    The points of a system without /proc have no CPU seconds.
    """
    ends = []
    for run in study.runs_of(row):
        if study.metric in run["metrics"]:
            points = run.get("points") or [{}]
            ends.append((run["metrics"][study.metric], points[-1]))
    return ends


def draw_values(
    panel: Axes, study: Study, rows: Sequence[Row], colour_of: Mapping[str, str]
) -> None:
    """Draw each seed and the mean of each row."""
    places = places_of(study, rows)
    for row in rows:
        values = list(study.values(row, study.metric).values())
        colour = colour_of[study.variant(row)]
        panel.plot([places[row]] * len(values), values, "o", color=colour, ms=3, alpha=0.5)
        panel.plot(places[row], statistics.fmean(values), "_", color=colour, ms=12, mew=2)
    panel.set_ylabel(label_of_values(study))
    name_groups(panel, study, rows)


def draw_ends(
    panel: Axes, study: Study, rows: Sequence[Row], name: str, colour_of: Mapping[str, str]
) -> None:
    """Draw the metric at the end of each run against its tokens or CPU seconds.

    A line goes through the means.
    """
    for variant, colour in colour_of.items():
        means = []
        for row in rows:
            if study.variant(row) != variant:
                continue
            points = [(end[name], value) for value, end in ends_of(study, row)]
            panel.plot(*zip(*points), "o", color=colour, ms=3, alpha=0.5)
            means.append(mean_of(points))
        panel.plot(*zip(*sorted(means)), color=colour, marker="_", ms=12, mew=2, lw=1)
    panel.set(xlabel=f"{words_of(name)} of all updates, logarithmic", xscale="log")
    panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 3, 5)))
    panel.xaxis.set_major_formatter(ticker.EngFormatter())
    panel.xaxis.set_minor_locator(ticker.NullLocator())
    panel.set(ylabel=label_of_values(study))


def label_of_values(study: Study) -> str:
    return f"{study.metric}, {study.measure(study.metric)}: seeds and mean"


def words_of(name: str) -> str:
    """Return 'CPU seconds' for cpu_seconds."""
    return name.replace("_", " ").replace("cpu", "CPU")


def mean_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    x, y = zip(*points)
    return statistics.fmean(x), statistics.fmean(y)


# ---- gains and curves --------------------------------------------------------------------------


def draw_gains(
    panel: Axes, study: Study, gains: Mapping[Row, Estimate], colour_of: Mapping[str, str]
) -> None:
    """Draw the gain of each row with its interval, and the paper's gain."""
    rows = list(gains)
    places = places_of(study, rows)
    for row, estimate in gains.items():
        colour = colour_of[study.variant(row)]
        bars = None if math.isnan(estimate.p) else bars_of([estimate])
        panel.errorbar(places[row], estimate.mean, bars, fmt="o", color=colour, ms=4, capsize=3)
        published = study.published_gain(row)
        if published is not None:
            panel.plot(places[row], published, "D", color=colour, ms=5, mfc="none")
    panel.axhline(0, color="grey", lw=0.8)
    unit = study.unit(study.metric)
    panel.set_ylabel(f"gain over {study.grid.baseline}, {unit}\nwith 95% intervals")
    name_groups(panel, study, rows)


def draw_curves(
    panel: Axes,
    study: Study,
    rows: Sequence[Row],
    name: str,
    colour_of: Mapping[str, str],
    styles: Mapping[str, Any],
) -> None:
    """Draw the validation loss of each row against tokens or CPU seconds."""
    for row in rows:
        points = curve(study, row, name)
        if points:
            look = {"color": colour_of[study.variant(row)], "ls": styles[study.group(row)]}
            panel.plot(*zip(*points), **look)
    panel.set(xlabel=words_of(name), ylabel=f"validation loss, {study.loss_unit}")


def has_curve(study: Study, rows: Sequence[Row], name: str) -> bool:
    """Return True if some row has more than one point."""
    return any(len(curve(study, row, name)) > 1 for row in rows)


def curve(study: Study, row: Row, name: str) -> Curve:
    """Return the validation loss against tokens or CPU seconds.

    Each is a mean over the row's seeds.
    """
    by_update: dict[float, Curve] = {}
    for run in study.runs_of(row):
        for point in run.get("points", []):
            if "valid_loss" in point and name in point:
                by_update.setdefault(point["update"], []).append((point[name], point["valid_loss"]))
    return [mean_of(points) for _, points in sorted(by_update.items())]
