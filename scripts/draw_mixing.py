#!/usr/bin/env python3
"""Draw docs/mixing.svg: three source heads, the weights of M as lines, three mixed heads."""

import sys
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from mixhead_plugin.analysis.figures import COLOURS

MIXING = np.array([[0.8, 0.5, 0.0], [0.2, 0.4, 0.3], [0.0, 0.1, 0.7]])  # M[j, i]: source head j in mixed head i


def weights(length: int = 8) -> np.ndarray:
    """Return causal weights of three heads [3, N, N]: the word before, the first words, all words."""
    query, key = np.indices((length, length))
    scores = np.stack([-3.0 * abs(query - key - 1), -1.5 * key, 0.0 * key])
    raised = np.where(key <= query, np.exp(scores), 0.0)
    return raised / raised.sum(-1, keepdims=True)


def draw(path: Path) -> None:
    """Write the picture; a mixed head has the colours of the heads that it is made of."""
    # [3, N, N, RGB]: what each head takes away from white
    ink = (
        np.sqrt(weights())[..., None]
        * np.array([1 - np.array(matplotlib.colors.to_rgb(c)) for c in COLOURS[:3]])[:, None, None]
    )
    figure = Figure(figsize=(7.4, 3.5))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, 7.4), ylim=(3.5, 0))
    axis.axis("off")
    for side, x, heads in (("P", 1.3, ink), (r"\bar{P}", 5.1, np.einsum("jqkc,ji->iqkc", ink, MIXING))):
        for i, head in enumerate(heads):
            top = 0.42 + 0.92 * i
            axis.imshow(np.clip(1 - head, 0, 1), extent=(x, x + 0.8, top + 0.8, top), interpolation="nearest", zorder=2)
            axis.add_patch(matplotlib.patches.Rectangle((x, top), 0.8, 0.8, fill=False, color="#777777", zorder=3))
            at, align = (x - 0.12, "right") if side == "P" else (x + 0.92, "left")
            axis.text(at, top + 0.42, f"${side}_{i + 1}$", ha=align, va="center", fontsize=13)
    for j, i in zip(*MIXING.nonzero()):
        ends = np.array([[2.15, 0.82 + 0.92 * j], [5.05, 0.82 + 0.92 * i]])
        axis.plot(*ends.T, color=COLOURS[j], linewidth=9 * MIXING[j, i], alpha=0.85, solid_capstyle="butt", zorder=1)
        at = ends[0] + (0.2 + 0.14 * i) * (ends[1] - ends[0])
        label = {"boxstyle": "round,pad=0.15", "color": "white"}
        axis.text(*at, f"{MIXING[j, i]:.1f}", color=COLOURS[j], ha="center", va="center", weight="bold", bbox=label)
    for x, text in ((1.7, "source heads"), (3.6, "M"), (5.5, "mixed heads")):
        axis.text(x, 0.24, text, ha="center", va="center", fontsize=11)
    axis.text(3.6, 3.32, r"$\bar{P}_i = \sum_j\; M[j, i]\; P_j$", ha="center", va="center", fontsize=12)
    with matplotlib.rc_context({"svg.hashsalt": "mixing"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=150)


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "mixing.svg"))
