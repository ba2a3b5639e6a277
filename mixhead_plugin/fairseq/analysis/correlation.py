"""Compare a number of each head on two sets of the data: Pearson's r, and a picture with a point
for each head.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis.heads import SITES, HeadNumbers, points, shown_kinds
from mixhead_plugin.heads import figures


def subsets_of(args: Namespace) -> list[str]:
    """Return the one or two sets of --subset; refuse others."""
    subsets = args.subset.split(",")
    if len(subsets) > 2 or len(set(subsets)) < len(subsets):
        raise OptionError(f"--subset {args.subset}: must be one set, or two different ones")
    return subsets


def pearson(left: HeadNumbers, right: HeadNumbers) -> dict[str, float]:
    """Return Pearson's r of two numbers of the same heads, by kind; NaN where one of them is
    constant.
    """
    pairs = {
        kind: torch.stack([points(left, kind), points(right, kind)]) for kind in shown_kinds(left)
    }
    return {kind: float(torch.corrcoef(pair)[0, 1]) for kind, pair in pairs.items()}


def correlation_figure(
    shown: Mapping[str, HeadNumbers],
    r: Mapping[str, float],
    label: str,
    whole: tuple[float, float] | None = None,
) -> Any:
    """Draw each head's number on one set over its number on the other.

    Args:
        shown: the numbers, by the name of the set; two sets
        r: Pearson's r by kind of head, as `pearson` returns it
        label: what the numbers are
        whole: the numbers of the whole model on both sets, which get a mark of their own; None for
            no mark
    """
    (left_label, left), (right_label, right) = shown.items()
    with figures.style():
        figure, axes = figures.subplots(1, len(r), (3.4, 3.2))
        for panel, kind in zip(axes[0], r, strict=True):
            for site, marker, colour in zip(SITES, "os^", figures.COLOURS, strict=False):
                x, y = points(left, kind, site), points(right, kind, site)
                if len(x):
                    panel.plot(x, y, marker, markersize=4, alpha=0.7, color=colour, label=site)
            if whole is None:
                both = torch.cat([points(left, kind), points(right, kind)])
                ends = [float(both.min()), float(both.max())]
                panel.plot(ends, ends, color="grey", linewidth=0.8, zorder=0)  # equal on both
            else:
                panel.plot(*whole, "k+", markersize=9, label="whole model")
            title = f"{shown_kinds(left)[kind]}: r = {r[kind]:.3f}"
            panel.set(title=title, xlabel=f"{label} on {left_label}", ylabel=f"on {right_label}")
            panel.legend()
    return figure
