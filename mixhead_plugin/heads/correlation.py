"""Compare a number of each head on two sets of the data.

Pearson's r, and a picture with a point for each head.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mixhead_plugin.heads.attention import HeadNumbers
from mixhead_plugin.heads.numbers import points, shown_stages
from mixhead_plugin.heads.sites import SITES


def pearson(left: HeadNumbers, right: HeadNumbers) -> dict[str, float]:
    """Return Pearson's r of two numbers of the same heads, by stage; NaN for constant ones."""
    by_stage = {}
    for stage in shown_stages(left):
        pair = torch.stack([points(left, stage), points(right, stage)])
        by_stage[stage] = float(torch.corrcoef(pair)[0, 1])
    return by_stage


def correlation_figure(
    shown: Mapping[str, HeadNumbers],
    r: Mapping[str, float],
    label: str,
    whole: tuple[float, float] | None = None,
) -> Any:
    """Draw each head's number on one set over its number on the other.

    Args:
        shown: the numbers, by the name of the set; two sets
        r: Pearson's r by stage, as `pearson` returns it
        label: what the numbers are
        whole: the numbers of the whole model on both sets, which get a mark of their own; None for
            no mark
    """
    from mixhead_plugin.heads import figures  # needs numpy, which `pearson` does not

    left_label, right_label = shown
    left = shown[left_label]
    right = shown[right_label]
    with figures.style():
        figure, axes = figures.subplots(1, len(r), (3.4, 3.2))
        for panel, stage in zip(axes[0], r, strict=True):
            for site, marker, colour in zip(SITES, "os^", figures.COLOURS, strict=False):
                x = points(left, stage, site)
                y = points(right, stage, site)
                if len(x):
                    panel.plot(x, y, marker, markersize=4, alpha=0.7, color=colour, label=site)
            if whole is None:
                both = torch.cat([points(left, stage), points(right, stage)])
                ends = [float(both.min()), float(both.max())]
                panel.plot(ends, ends, color="grey", linewidth=0.8, zorder=0)  # equal on both
            else:
                panel.plot(*whole, "k+", markersize=9, label="whole model")
            title = f"{shown_stages(left)[stage]}: r = {r[stage]:.3f}"
            panel.set(title=title, xlabel=f"{label} on {left_label}", ylabel=f"on {right_label}")
            panel.legend()
    return figure
