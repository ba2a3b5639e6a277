"""One figure for each table: our means with error bars; and one of spectra where they were measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reproduction.results import Study
from reproduction.samples import sample

NUMERIC = ("tokens", "heads", "head-size")  # axes that are drawn as such


def draw(studies: Sequence[Study], folder: Path) -> list[Path]:
    """Of one table, at all its scales; the files made."""
    from mixhead_plugin.analysis import figures  # takes seconds

    made = []
    with figures.style():
        shown = [study for study in studies if study.part["runs"]]
        if shown:
            figure, axes = figures.subplots(1, len(shown), (4.8, 3.6))
            for panel, study in zip(axes[0], shown):
                if across := next((axis for axis in NUMERIC if axis in study.axes), None):
                    lines(figures, panel, study, across)
                else:
                    dots(figures, panel, study)
                panel.set_title(f"{study.part['title']}\n{study.scale}: mean and standard deviation over the seeds")
                panel.grid(True, axis="y")
            if panel.get_legend_handles_labels()[0]:
                figures.legend_below(figure, axes)
            made += figures.save(figure, str(folder), studies[0].table)
        spectra = [study for study in studies if any("spectrum" in run for run in study.part["runs"])]
        if spectra:
            made += figures.save(spectrum(figures, spectra), str(folder), f"{studies[0].table}_spectrum")
    return made


def bar(study: Study, row: Sequence[str]) -> tuple[float, float]:
    """Mean and standard deviation, nan where there are too few runs for them."""
    values = list(study.values(row, study.metric).values())
    if not values:
        return np.nan, np.nan
    found = sample(values)
    return found.mean, found.deviation


def what(study: Study) -> str:
    return f"{study.measure.name} ({study.metric}), {study.part['better']} is better"


def lines(figures: Any, panel: Any, study: Study, axis: str) -> None:
    """A line for each attention over an axis of numbers."""
    at = list(study.axes).index(axis)
    xs = [float(label) for label in study.axes[axis]]
    others = list(dict.fromkeys(row[:at] + row[at + 1 :] for row in study.rows))
    for i, other in enumerate(others):
        found = [bar(study, (*other[:at], label, *other[at:])) for label in study.axes[axis]]
        means, deviations = zip(*found)
        panel.errorbar(
            xs, means, deviations, **figures.line(i), marker="o", markersize=4, capsize=3, label="/".join(other)
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(xs, study.axes[axis])
    panel.minorticks_off()
    panel.set(xlabel=axis, ylabel=what(study))


def dots(figures: Any, panel: Any, study: Study) -> None:
    """A point for each row."""
    for i, row in enumerate(study.rows):
        mean, deviation = bar(study, row)
        panel.errorbar([i], [mean], [deviation], color=figures.COLOURS[0], marker="o", markersize=5, capsize=4)
    names = ["/".join(row) for row in study.rows]
    turned = sum(map(len, names)) > 40
    panel.set_xticks(range(len(names)), names, rotation=90 if turned else 0)
    panel.set(ylabel=what(study), xlim=(-0.5, len(names) - 0.5))


def spectrum(figures: Any, studies: Sequence[Study]) -> Any:
    """Share of the largest singular values, mean over layers, heads and seeds; a panel for each place and length."""
    panels: dict[tuple[str, str, int], dict[str, list[Any]]] = {}
    for study in studies:
        for run in study.part["runs"]:
            for place, values in run.get("spectrum", {"places": {}})["places"].items():
                length = run["spectrum"]["length"]
                own = study.attention(run["labels"])
                others = ", ".join(f"{axis} {label}" for axis, label in zip(study.axes, run["labels"]) if label != own)
                title = f"{study.scale}{', ' if others else ''}{others}"
                curves = panels.setdefault((title, place, length), {})
                curves.setdefault(own or "/".join(run["labels"]), []).append(values)
    across = min(3, len(panels))
    figure, axes = figures.subplots(-(-len(panels) // across), across, (3.8, 3.4))
    for panel in axes.flat[len(panels) :]:
        panel.axis("off")
    for panel, ((title, place, length), curves) in zip(axes.flat, panels.items()):
        names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
        for name, values in curves.items():
            curve = np.mean([v["mean_cumulative"] for v in values], 0)
            rank = np.mean([v["mean_effective_rank"] for v in values])
            # the colours are the same in all panels, so the rank stands at the curve's own legend
            panel.plot(range(1, len(curve) + 1), curve, **figures.line(names.index(name)), label=f"{name}: {rank:.1f}")
        panel.set(title=f"{title}: {place}", xlabel=f"largest singular values (of {length})", ylim=(0, 1.02))
        figures.integer_axis(panel.xaxis)
        panel.legend(title="effective rank", loc="lower right")
        panel.grid(True)
    for row in axes:
        row[0].set_ylabel("share of their sum")
    return figure
