"""Draw the positions that trained models give to zeros."""

import io
import logging
import re
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

# The colours of Okabe and Ito, which colour-blind people can tell apart.
LOOKS = {
    "softmax": dict(color="#000000", marker="o", linestyle="-"),
    "sigsoftmax": dict(color="#999999", marker="x", linestyle="--"),
    "l2": dict(color="#0072B2", marker="s", linestyle="-"),
    "unnormalized": dict(color="#D55E00", marker="^", linestyle="-"),
    "relu2": dict(color="#009E73", marker="v", linestyle="-."),
    "swish-l2": dict(color="#CC79A7", marker="D", linestyle="-"),
    "gain": dict(color="#E69F00", marker="P", linestyle="--"),
    "markers": dict(color="#56B4E9", marker="*", linestyle="-"),
    "end-marker": dict(color="#7B3F00", marker="+", linestyle=":"),
}


def draw(folder: Path, rows: list[dict[str, Any]], n: int) -> None:
    """Write position_probe.png and .svg: a column for each model and kind of position, a curve for each first seed."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq turns on everyone's debugging messages
    columns = list(dict.fromkeys((row["model"], row["position"]) for row in rows))
    lengths = (n, 2 * n)
    figure = Figure(figsize=(max(6.8, 2.9 * len(columns)), 5.6))
    axes = figure.subplots(len(lengths), len(columns), squeeze=False)
    shown = {}
    for column, (model, position) in enumerate(columns):
        for length, axis in zip(lengths, axes[:, column]):
            places = range(1, length + 1)
            (shown["right answer"],) = axis.plot(places, places, color="#000000", linewidth=6, alpha=0.12)
            drawn = [row for row in rows if (row["model"], row["position"]) == (model, position)]
            for i, row in enumerate(drawn):
                every = max(1, length // 3)
                (shown[row["attention"]],) = axis.plot(
                    places,
                    row["answers"][str(length)],
                    markersize=5,
                    linewidth=1.2,
                    markevery=(i * every // len(drawn), every),
                    **LOOKS[row["attention"]],
                )
            kind = "as in training" if length == n else "twice as many"
            axis.set(
                title=f"{model}, {position}: {length} zeros ({kind})",
                xlim=(0, length + 1),
                ylim=(-0.06 * length, 1.12 * length),
            )
            axis.title.set_size(9)
            axis.grid(alpha=0.3)
        axes[-1, column].set_xlabel("place of the zero")
    for axis in axes[:, 0]:
        axis.set_ylabel("answer of the model")
    figure.legend(shown.values(), shown, loc="lower center", ncols=5, fontsize=8, columnspacing=1.5, frameon=False)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    with rc_context({"svg.hashsalt": "position_probe"}):
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    # fewer digits and no indentation make the file much smaller
    text = re.sub(r"\b([1-9]\d*\.\d\d)\d+", r"\1", svg.getvalue())
    (folder / "position_probe.svg").write_text(re.sub(r"\n +", "\n", text))
    figure.savefig(folder / "position_probe.png", dpi=150)
