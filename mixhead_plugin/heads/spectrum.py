"""How many dimensions the attention matrices have (mixhead figures 1 and 3; Roy and Vetterli 2007).

The help of `python -m mixhead_plugin.analysis spectrum` explains the measures.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.heads.attention import Heads, HeadsError, mixed_weights
from mixhead_plugin.heads.sites import where

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
    weight that has no logarithm: it is hidden, 0 or negative. NaN also where all weights of each
    row are equal, because the largest value is then 0.

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
        self.by_site: dict[tuple[bool, str, int], list[Spectrum]] = {}

    def add(self, name: str, heads: Heads) -> None:
        """Add the heads of the attention `name` on one window.

        Raise HeadsError if their weights are not finite.
        """
        weights = heads.weights()  # [1, H, n, n]
        if not weights.isfinite().all():
            raise HeadsError(f"the weights of {name} are not finite; are its parameters damaged?")
        mixed = mixed_weights(weights, heads.mixing)
        self.by_site.setdefault((False, *where(name)), []).append(spectrum_of(mixed[0]))
        if heads.mixing is not None:
            self.by_site.setdefault((True, *where(name)), []).append(spectrum_of(weights[0]))

    def means(self, checkpoint: str, windows: int) -> list[Measured]:
        """Return the means over the windows for the heads of a model.

        If heads mix, those for its source heads follow.
        """
        measured = {source: Measured(checkpoint, source, windows, {}) for source in (False, True)}
        for (source, site, layer), spectra in self.by_site.items():
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
