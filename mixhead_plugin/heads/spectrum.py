"""How many dimensions the attention matrices have (mixhead figures 1 and 3; Roy and Vetterli 2007).

The help of `python -m mixhead_plugin.analysis spectrum` explains the measures and the pictures.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mixhead_plugin.heads import figures
from mixhead_plugin.heads.attention import Heads, HeadsError
from mixhead_plugin.heads.sites import SITES, where
from mixhead_plugin.ops.reference import mix_heads

CAN_SHOW = (
    "Above: softmax allows at most D values, mixed heads more; "
    "whether a model needs more is not shown.\n"
    "Below: 1 if all heads look alike at a token; what the heads are good for is not shown."
)
NOTE = (
    "Mixing changes the effective rank mechanically: a random mixing raises it, averaging can "
    "lower it."
)


def singular_values(matrices: Tensor) -> Tensor:
    """Return the singular values [..., min(n, m)], descending, in float64 on the CPU.

    Args:
        matrices: [..., n, m]
    """
    return torch.linalg.svdvals(matrices.cpu().double())


def cumulative(values: Tensor) -> Tensor:
    """Return (s_1 + ... + s_k) / (s_1 + ... + s_n) for each k, [..., n] (mixhead figure 1)."""
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def effective_rank(values: Tensor) -> Tensor:
    """Return the effective rank [...], exp of the entropy of s_k / sum s (Roy and Vetterli 2007).

    Args:
        values: the singular values s [..., n]; zeros alone give NaN
    """
    shares = values / values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def log_spectrum(weights: Tensor) -> Tensor:
    """Return the singular values of log P minus the mean of each row, [..., min(n, m)].

    They are divided by the largest.

    Softmax of queries and keys of size D gives at most D values above 0. NaN for a matrix with a
    weight that has no logarithm: it is hidden, 0 or negative.

    Args:
        weights: P [..., n, m]
    """
    logs = weights.double().log()
    centred = logs - logs.mean(-1, keepdim=True)
    defined = centred.isfinite().all(-1).all(-1)  # [...]
    values = singular_values(centred.where(defined[..., None, None], 0))
    return (values / values[..., :1]).where(defined[..., None].cpu(), torch.nan)


def rank_over_heads(weights: Tensor) -> Tensor:
    """Return the effective rank [..., Nq] of the rows {P_j[t]} over the heads j; NaN for zeros.

    Args:
        weights: P [..., H, Nq, Nk]
    """
    return effective_rank(singular_values(weights.transpose(-3, -2)))


class Spectrum(NamedTuple):
    """The means of one attention over the windows."""

    cumulative: Tensor  # [n], mean also over the heads
    effective_rank: Tensor  # [H]
    log: Tensor  # [n], of log P, mean also over the heads that have one; NaN if none has
    rank_over_heads: Tensor  # mean over the tokens


def spectrum_of(matrices: Tensor) -> Spectrum:
    """Return the spectrum of the heads of one attention on one window, [H, n, n]."""
    values = singular_values(matrices)  # [H, n]
    return Spectrum(
        cumulative=cumulative(values).mean(0),
        effective_rank=effective_rank(values),
        log=log_spectrum(matrices).nanmean(0),
        rank_over_heads=rank_over_heads(matrices).mean(),
    )


class Measured(NamedTuple):
    """The spectra of the heads of a checkpoint, or of its source heads."""

    checkpoint: str
    source: bool  # before mixing
    windows: int
    spectra: dict[str, dict[int, Spectrum]]  # by site and layer

    @property
    def label(self) -> str:
        return f"{self.checkpoint}, before mixing" if self.source else self.checkpoint

    def mean_rank(self, site: str) -> float:
        """Return the mean over the layers of the mean over their heads."""
        means = [spectrum.effective_rank.mean() for spectrum in self.spectra[site].values()]
        return float(torch.stack(means).mean())


class Spectra:
    """Collects the spectra of the attentions of a model, one window after the other."""

    def __init__(self) -> None:
        # By whether they are before mixing, site and layer: one for each window.
        self.by_place: dict[tuple[bool, str, int], list[Spectrum]] = {}

    def add(self, name: str, heads: Heads) -> None:
        """Add the heads of the attention `name` on one window.

        Raise HeadsError if their weights are not finite.
        """
        weights = heads.weights()  # [1, H, n, n]
        if not weights.isfinite().all():
            raise HeadsError(f"the weights of {name} are not finite; are its parameters damaged?")
        mixed = mix_heads(weights, heads.mixing)
        self.by_place.setdefault((False, *where(name)), []).append(spectrum_of(mixed[0]))
        if heads.mixing is not None:
            self.by_place.setdefault((True, *where(name)), []).append(spectrum_of(weights[0]))

    def means(self, checkpoint: str, windows: int) -> list[Measured]:
        """Return the means over the windows for the heads of a model.

        If heads mix, those for its source heads follow.
        """
        measured = {source: Measured(checkpoint, source, windows, {}) for source in (False, True)}
        for (source, site, layer), spectra in self.by_place.items():
            mean = {}
            for measure in Spectrum._fields:
                over_windows = torch.stack([getattr(spectrum, measure) for spectrum in spectra])
                mean[measure] = over_windows.nanmean(0)
            measured[source].spectra.setdefault(site, {})[layer] = Spectrum(**mean)
        return [one for one in measured.values() if one.spectra]


def as_json(measured: Measured) -> dict[str, Any]:
    """Return what spectrum.json has of a checkpoint."""
    places = {}
    for site, layers in measured.spectra.items():
        curves = torch.stack([spectrum.cumulative for spectrum in layers.values()])
        places[site] = {
            "mean_effective_rank": measured.mean_rank(site),
            "mean_cumulative": curves.mean(0),
            "layers": {layer: spectrum._asdict() for layer, spectrum in layers.items()},
        }
    return {"windows": measured.windows, "places": places}


# ---- pictures: a column of panels for each site ------------------------------------------------


def _sites(measured: list[Measured]) -> list[str]:
    return [site for site in SITES if any(site in one.spectra for one in measured)]


def draw_curves(measured: list[Measured], length: int) -> Any:
    """Draw the shares of the largest singular values.

    A checkpoint has a colour. Layers are thin, and the mean of the layers is bold.
    """
    sites = _sites(measured)
    width = 3.6 if len(sites) > 1 else 4.8
    figure, axes = figures.subplots(1, len(sites), (width, 3.8))
    ranks = np.arange(1, length + 1)
    lines = figures.lines(one.checkpoint for one in measured)
    for axis, site in zip(axes[0], sites, strict=True):
        for one in measured:
            if site not in one.spectra:
                continue
            look = lines[one.checkpoint]
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


LEAST_LOG = 1e-7  # below it, a singular value of log P is only rounding


def draw_logs(measured: list[Measured]) -> Any:
    """Draw the singular values of log P, and below them the rank over the heads of each layer."""
    sites = _sites(measured)
    width = 3.6 if len(sites) > 1 else 4.8
    figure, axes = figures.subplots(2, len(sites), (width, 3.0))
    lines = figures.lines(one.checkpoint for one in measured)
    for (above, below), site in zip(axes.T, sites, strict=True):
        most_heads = 1
        without_log = []
        for one in measured:
            if site not in one.spectra:
                continue
            layers = one.spectra[site]
            look = dict(lines[one.checkpoint])
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
