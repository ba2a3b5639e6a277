"""Draw the positions that trained models give to zeros."""

import itertools
import logging
import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from mixhead_plugin.heads import figures

COLUMNS = 3


def draw(folder: Path, rows: list[dict[str, Any]], n: int) -> None:
    """Write position_probe.png and .svg.

    Each attention of the first model has a panel, with its first seeds.
    """
    # fairseq turns on everyone's debugging messages
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    rows = [row for row in rows if row["model"] == rows[0]["model"]]
    attentions = list(dict.fromkeys(row["attention"] for row in rows))
    colours = dict(zip(dict.fromkeys(row["position"] for row in rows), figures.COLOURS))
    lines = math.ceil(len(attentions) / COLUMNS)
    figure = Figure(figsize=(7.2, 1.1 + 1.6 * lines), layout="constrained")
    axes = figure.subplots(lines, COLUMNS, sharex=True, sharey=True, squeeze=False)
    shown = {}
    for attention, axis in itertools.zip_longest(attentions, axes.flat):
        if attention is None:
            axis.axis("off")
            continue
        (shown["right answer"],) = axis.plot(
            [1, 2 * n], [1, 2 * n], color="#000000", linewidth=6, alpha=0.15
        )
        for row in rows:
            if row["attention"] != attention:
                continue
            for length, style, kind in ((n, "-", "as in training"), (2 * n, ":", "twice as many")):
                name = f"{row['position']}: {length} zeros, {kind}"
                look = {"color": colours[row["position"]], "linestyle": style, "linewidth": 1.6}
                (shown[name],) = axis.plot(
                    range(1, length + 1), row["answers"][str(length)], **look
                )
        axis.set(
            title=attention,
            xlim=(0, 2 * n + 1),
            ylim=(-0.1 * n, 2.2 * n),
            xticks=(1, n, 2 * n),
            yticks=(1, n, 2 * n),
        )
        axis.title.set_size(9)
        axis.tick_params(labelsize=8)
    axes[-1, COLUMNS // 2].set_xlabel("place of the zero", fontsize=9)
    figure.supylabel(f"answer of the {rows[0]['model']}", fontsize=9)
    figure.legend(
        shown.values(), shown, loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    figures.save(figure, folder, "position_probe")
