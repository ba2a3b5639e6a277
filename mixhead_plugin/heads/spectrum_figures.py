"""Pictures of the spectra of attention matrices, with a column of panels for each site.

The help of `python -m mixhead_plugin.analysis spectrum` explains them.
"""

from typing import Any

import numpy as np

from mixhead_plugin.heads import figures
from mixhead_plugin.heads.sites import SITES
from mixhead_plugin.heads.spectrum import NOTE, Measured

CAN_SHOW = (
    "Above: softmax allows at most D values, mixed heads more; "
    "whether a model needs more is not shown.\n"
    "Below: 1 if all heads look alike at a token; what the heads are good for is not shown."
)
LEAST_LOG = 1e-7  # below it, a singular value of log P is only rounding


def _sites(measured: list[Measured]) -> list[str]:
    return [site for site in SITES if any(site in one.spectra for one in measured)]


def draw_curves(measured: list[Measured], length: int) -> Any:
    """Draw the shares of the largest singular values.

    A checkpoint has a colour. Layers are thin, and the mean of the layers is bold.

    Args:
        measured: the spectra of each checkpoint, and of its source heads
        length: the number of singular values, which is that of the tokens in a window
    """
    sites = _sites(measured)
    width = 3.6 if len(sites) > 1 else 4.8
    figure, axes = figures.subplots(1, len(sites), (width, 3.8))
    ranks = np.arange(1, length + 1)
    looks = figures.looks(one.checkpoint for one in measured)
    for axis, site in zip(axes[0], sites, strict=True):
        for one in measured:
            if site not in one.spectra:
                continue
            look = looks[one.checkpoint]
            curves = [spectrum.cumulative.numpy() for spectrum in one.spectra[site].values()]
            for curve in curves:
                axis.plot(ranks, curve, **look, linewidth=0.6, alpha=0.55)
            axis.plot(ranks, np.mean(curves, 0), **look, linewidth=2.2, label=one.label)
        equal = {"color": "grey", "linestyle": ":", "linewidth": 1}
        axis.plot(ranks, ranks / length, **equal, label="all singular values equal")
        axis.set_title(site)
        axis.set_xlabel(f"number of largest singular values, of {length}")
        axis.set(xlim=(1, length), ylim=(0, 1.02))
        figures.integer_axis(axis.xaxis)
    axes[0, 0].set_ylabel("share of the sum of singular values")
    figures.legend_below(figure, axes)
    return figure


def draw_ranks(measured: list[Measured]) -> Any:
    """Draw the effective ranks, layer by head: a row of panels for each checkpoint."""
    panels: list[list[tuple[str, Any] | None]] = []
    for one in measured:
        row: list[tuple[str, Any] | None] = []
        for site in _sites(measured):
            if site in one.spectra:
                layers = one.spectra[site].values()
                ranks = [spectrum.effective_rank.tolist() for spectrum in layers]
                row.append((f"{one.label}\n{site}: mean {one.mean_rank(site):.1f}", ranks))
            else:
                row.append(None)
        panels.append(row)
    figure = figures.heat_maps(panels, (3.0, 2.3), "effective rank", xlabel="head", ylabel="layer")
    if any(one.source for one in measured):
        figure.supxlabel(NOTE, fontsize=8)
    return figure


def draw_logs(measured: list[Measured]) -> Any:
    """Draw the singular values of log P, and below them the rank over the heads of each layer."""
    sites = _sites(measured)
    width = 3.6 if len(sites) > 1 else 4.8
    figure, axes = figures.subplots(2, len(sites), (width, 3.0))
    looks = figures.looks(one.checkpoint for one in measured)
    for (above, below), site in zip(axes.T, sites, strict=True):
        most_heads = 1
        without_log = []
        for one in measured:
            if site not in one.spectra:
                continue
            layers = one.spectra[site]
            look = dict(looks[one.checkpoint])
            if one.source:
                look["linestyle"] = (0, (2, 1))  # dashes
            label: str | None = one.label
            for spectrum in layers.values():
                numbers = np.arange(1, len(spectrum.log) + 1)
                values = spectrum.log.clamp(min=LEAST_LOG)
                above.plot(numbers, values, **look, label=label, alpha=0.7)
                label = None  # the legend has a checkpoint once
                most_heads = max(most_heads, len(spectrum.effective_rank))
            ranks = [spectrum.rank_over_heads for spectrum in layers.values()]
            below.plot(list(layers), ranks, **look, label=one.label, marker="o")
            if all(spectrum.log.isnan().all() for spectrum in layers.values()):
                without_log.append(one.label)

        if without_log:
            names = ", ".join(without_log)
            words = f"{names}: hidden, zero or\nnegative weights have no logarithm"
            above.text(0.5, 0.1, words, ha="center", transform=above.transAxes)
        above.set(title=site, xlabel="number k of the singular value")
        above.set(yscale="log", ylim=(LEAST_LOG, 2))
        below.set(xlabel="layer", ylim=(1, most_heads))
        figures.integer_axis(above.xaxis)
        figures.integer_axis(below.xaxis)
    axes[0, 0].set_ylabel("singular value of log P\n(largest = 1)")
    axes[1, 0].set_ylabel("effective rank of\n{P_j[t]} over heads j")
    figures.legend_below(figure, axes)
    figure.suptitle(CAN_SHOW, fontsize=8)
    return figure
