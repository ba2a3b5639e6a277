"""Draw the error over the head size."""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mixhead_plugin.heads import figures

LOOKS = {
    "softmax": {
        "color": "#000000",
        "marker": "o",
        "markersize": 4,
        "linestyle": "-",
    },
    # This curve is nearly that of softmax, so its markers are frames around those points.
    "sigsoftmax": {
        "color": "#009E73",
        "marker": "s",
        "markersize": 8,
        "markerfacecolor": "none",
        "linestyle": "--",
    },
    "mixhead": {
        "color": "#0072B2",
        "marker": "^",
        "markersize": 5,
        "linestyle": "-",
    },
    "fixhead": {
        "color": "#CC79A7",
        "marker": "",
        "linestyle": "-.",
    },
}
SMALLEST = 1e-3  # below it the axis is linear, to show 0


def draw(
    folder: Path, rows: list[dict[str, Any]], tasks: dict[str, str], settings: dict[str, Any]
) -> None:
    """Write low_rank_bottleneck.png and .svg.

    Args:
        folder: the folder to write to
        rows: the errors, as `measure` of run.py returns them
        tasks: the titles of the panels, by task
        settings: the flags of the run
    """
    n = settings["positions"]
    figure = Figure(figsize=(9.6, 4.4))
    axes = figure.subplots(1, len(tasks), sharey=True)
    for axis, (task, title) in zip(axes, tasks.items()):
        for name, look in LOOKS.items():
            line = [row for row in rows if row["task"] == task and row["attention"] == name]
            if name == "fixhead":
                axis.axhline(
                    line[0]["mean"], label=f"fixhead: heads of size {n}", linewidth=2, **look
                )
                continue
            across = [row["head_size"] for row in line]
            means = [row["mean"] for row in line]
            spreads = [row["std"] for row in line]
            label = name
            if name == "mixhead":
                label = f"mixhead: {settings['heads']} heads, M learned"
            axis.errorbar(across, means, spreads, label=label, capsize=2, linewidth=1.4, **look)
        axis.set(title=title, xlabel=f"head size (n = {n} positions)")
        axis.set_xticks(_apart(settings["sizes"], n / 20))
        axis.set_yscale("symlog", linthresh=SMALLEST, linscale=0.5)
        axis.set_ylim(-SMALLEST / 5, 1.3)
        axis.set_yticks([0, SMALLEST, 1e-2, 1e-1, 1], ["0", "0.001", "0.01", "0.1", "1"])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.title.set_size(11)
    axes[0].set_ylabel("error of the attention weights\n(1 = that of 1/n everywhere)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figures.save(figure, folder, "low_rank_bottleneck")


def _apart(sizes: list[int], distance: float) -> list[int]:
    """Return the sizes that get a label; smaller ones without room for it are left out."""
    shown: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not shown or shown[-1] - size >= distance:
            shown.append(size)
    return sorted(shown)
