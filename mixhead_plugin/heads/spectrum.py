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
    """Return the singular values [..., min(n, m)] of matrices [..., n, m], descending, in float64
    on the CPU.
    """
    return torch.linalg.svdvals(matrices.cpu().double())


def cumulative(values: Tensor) -> Tensor:
    """Return (s_1 + ... + s_k) / (s_1 + ... + s_n) for each k (mixhead figure 1): [..., n] -> [...,
    n].
    """
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def effective_rank(values: Tensor) -> Tensor:
    """Return exp of the entropy of s_k / sum s (Roy and Vetterli 2007): [..., n] -> [...]; NaN for
    zeros.
    """
    shares = values / values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def log_spectrum(weights: Tensor) -> Tensor:
    """Return the singular values [..., min(n, m)] of log P minus the mean of each row, divided by
    the largest.

    Softmax of queries and keys of size D gives at most D values above 0. NaN for a matrix with a
    weight that has no logarithm: it is hidden, 0 or negative.
    """
    logs = weights.double().log()
    centred = logs - logs.mean(-1, keepdim=True)
    defined = centred.isfinite().all(-1).all(-1)  # [...]
    values = singular_values(centred.where(defined[..., None, None], 0))
    return (values / values[..., :1]).where(defined[..., None].cpu(), torch.nan)


def rank_over_heads(weights: Tensor) -> Tensor:
    """Return the effective rank of the rows {P_j[t]} over the heads j: [..., H, Nq, Nk] -> [...,
    Nq]; NaN for zeros.
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
        return float(
            np.mean(
                [spectrum.effective_rank.mean().item() for spectrum in self.spectra[site].values()]
            )
        )


class Spectra:
    """Collects the spectra of the attentions of a model, one window after the other."""

    def __init__(self) -> None:
        # by whether they are before mixing, site and layer: one for each window
        self.found: dict[tuple[bool, str, int], list[Spectrum]] = {}

    def add(self, name: str, heads: Heads) -> None:
        """Add the heads of the attention `name` on one window.

        Raise HeadsError if their weights are not finite.
        """
        weights = heads.weights()  # [1, H, n, n]
        if not weights.isfinite().all():
            raise HeadsError(f"the weights of {name} are not finite; are its parameters damaged?")
        mixed = mix_heads(weights, heads.mixing)
        self.found.setdefault((False, *where(name)), []).append(spectrum_of(mixed[0]))
        if heads.mixing is not None:
            self.found.setdefault((True, *where(name)), []).append(spectrum_of(weights[0]))

    def means(self, checkpoint: str, windows: int) -> list[Measured]:
        """Return the means over the windows for the heads of a model and, if heads mix, for its
        source heads.
        """
        measured = {source: Measured(checkpoint, source, windows, {}) for source in (False, True)}
        for (source, site, layer), spectra in self.found.items():
            mean = Spectrum(*(torch.stack(values).nanmean(0) for values in zip(*spectra)))
            measured[source].spectra.setdefault(site, {})[layer] = mean
        return [one for one in measured.values() if one.spectra]


def as_json(measured: Measured) -> dict[str, Any]:
    return {
        "windows": measured.windows,
        "places": {
            site: {
                "mean_effective_rank": measured.mean_rank(site),
                "mean_cumulative": torch.stack([s.cumulative for s in layers.values()]).mean(0),
                "layers": {layer: spectrum._asdict() for layer, spectrum in layers.items()},
            }
            for site, layers in measured.spectra.items()
        },
    }


def draw_curves(measured: list[Measured], length: int) -> Any:
    """Draw a panel for each site, with a colour for each checkpoint."""
    sites = [site for site in SITES if any(site in m.spectra for m in measured)]
    figure, axes = figures.subplots(1, len(sites), (3.6 if len(sites) > 1 else 4.8, 3.8))
    ranks = np.arange(1, length + 1)
    lines = figures.lines(m.checkpoint for m in measured)
    for axis, site in zip(axes[0], sites, strict=True):
        for m in measured:
            curves = [s.cumulative.numpy() for s in m.spectra.get(site, {}).values()]
            for curve in curves:
                axis.plot(ranks, curve, **lines[m.checkpoint], linewidth=0.6, alpha=0.55)
            if curves:
                axis.plot(
                    ranks, np.mean(curves, 0), **lines[m.checkpoint], linewidth=2.2, label=m.label
                )
        axis.plot(
            ranks,
            ranks / length,
            color="grey",
            linestyle=":",
            linewidth=1,
            label="all singular values equal",
        )
        axis.set(
            title=site,
            xlabel=f"number of largest singular values, of {length}",
            xlim=(1, length),
            ylim=(0, 1.02),
        )
        figures.integer_axis(axis.xaxis)
    axes[0, 0].set_ylabel("share of the sum of singular values")
    figures.legend_below(figure, axes)
    return figure


def draw_ranks(measured: list[Measured]) -> Any:
    """Draw layer by head: a row of panels for each checkpoint, and a column for each site."""
    sites = [site for site in SITES if any(site in m.spectra for m in measured)]

    def panel(m: Measured, site: str) -> tuple[str, Any] | None:
        if site not in m.spectra:
            return None
        ranks = [s.effective_rank.tolist() for s in m.spectra[site].values()]
        return f"{m.label}\n{site}: mean {m.mean_rank(site):.1f}", ranks

    panels = [[panel(m, site) for site in sites] for m in measured]
    figure = figures.heat_maps(panels, (3.0, 2.3), "effective rank", xlabel="head", ylabel="layer")
    if any(m.source for m in measured):
        figure.supxlabel(NOTE, fontsize=8)
    return figure


def draw_logs(measured: list[Measured]) -> Any:
    """Draw the singular values of log P, and below the rank over the heads of each layer; a column
    for each site.
    """
    sites = [site for site in SITES if any(site in m.spectra for m in measured)]
    figure, axes = figures.subplots(2, len(sites), (3.6 if len(sites) > 1 else 4.8, 3.0))
    lines = figures.lines(m.checkpoint for m in measured)
    for (above, below), site in zip(axes.T, sites, strict=True):
        heads = 1
        for m in measured:
            layers = m.spectra.get(site, {})
            heads = max([heads, *(len(spectrum.effective_rank) for spectrum in layers.values())])
            look = (
                lines[m.checkpoint]
                | ({"linestyle": (0, (2, 1))} if m.source else {})
                | {"label": m.label}
            )
            for layer, spectrum in layers.items():
                first = look if layer == min(layers) else look | {"label": None}
                above.plot(
                    np.arange(1, len(spectrum.log) + 1),
                    spectrum.log.clamp(min=1e-7),
                    **first,
                    alpha=0.7,
                )
            below.plot(
                list(layers),
                [spectrum.rank_over_heads for spectrum in layers.values()],
                **look,
                marker="o",
            )
        found = {m.label: m.spectra[site].values() for m in measured if site in m.spectra}
        if missing := [
            label for label, some in found.items() if all(one.log.isnan().all() for one in some)
        ]:
            words = f"{', '.join(missing)}: hidden, zero or\nnegative weights have no logarithm"
            above.text(0.5, 0.1, words, ha="center", transform=above.transAxes)
        above.set(title=site, xlabel="number k of the singular value", yscale="log", ylim=(1e-7, 2))
        below.set(xlabel="layer", ylim=(1, heads))
        figures.integer_axis(above.xaxis)
        figures.integer_axis(below.xaxis)
    axes[0, 0].set_ylabel("singular value of log P\n(largest = 1)")
    axes[1, 0].set_ylabel("effective rank of\n{P_j[t]} over heads j")
    figures.legend_below(figure, axes)
    figure.suptitle(CAN_SHOW, fontsize=8)
    return figure
