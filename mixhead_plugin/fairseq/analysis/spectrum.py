"""Show how many dimensions the attention matrices have (mixhead figures 1 and 3; Roy and Vetterli
2007).

spectrum: the matrix of a head on a window of n tokens has n singular values s_1 >= s_2 >= ... The
curves are (s_1 + ... + s_k) / (s_1 + ... + s_n) over k, means over heads and windows, after the
mixing: thin for a layer, bold for the mean of the layers. A curve near the upper left corner means
a low rank.

effective_rank: exp(-sum_k p_k ln p_k) with p_k = s_k / sum s, of each head. It is n if all singular
values are equal, and 1 if only one is not 0. Where heads mix, the source heads stand beside the
mixed ones.

log_and_heads: above the singular values of log P minus the mean of each row, of which softmax gives
at most D. Hidden, zero and negative weights have no logarithm, so causal attention is left out.
Below the effective rank of the rows {P_j[t]} over the heads j, a mean over the tokens t. M is
linear and adds no row outside their span.

A window is the first --length tokens of a sentence (of a block, for language models), on both sides
of a translation. Shorter sentences are left out. Checkpoints are only comparable on the same data.

Example: spectrum fairseq/checkpoint_best.pt mixhead/checkpoint_best.pt --labels fairseq,Mixhead
--length 128
"""

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import loading, output
from mixhead_plugin.fairseq.analysis.heads import SITES, hooked, where
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.attention import Heads, MixheadAttention
from mixhead_plugin.heads import figures
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


def usual_length(loaded: Loaded, subset: str) -> int:
    """Return the median length of the sentences; of a translation, the shorter side counts."""
    dataset = loading.load_subset(loaded, subset)
    if not hasattr(dataset, "size"):  # the windows of --task truncated_bptt_lm
        return int(loaded.cfg.task.tokens_per_sample)
    return int(np.median([min(np.atleast_1d(dataset.size(i))) for i in range(len(dataset))]))


def windows(loaded: Loaded, subset: str, length: int) -> Iterator[dict[str, Tensor]]:
    """Yield the inputs of one window after another, from random places of the set."""
    source, target = loaded.task.source_dictionary, loaded.task.target_dictionary
    pads = {"src_tokens": source.pad(), "prev_output_tokens": (target or source).pad()}
    # Sentences of one batch would have similar lengths.
    for batch in loading.batches(loaded, subset, batch_size=1, shuffle=True):
        net_input = batch["net_input"]
        rows = {name: net_input[name][:1] for name in pads if name in net_input}
        # [1, length]
        tokens = {name: row[row.ne(pads[name])][None, :length] for name, row in rows.items()}
        if all(row.shape[1] == length for row in tokens.values()):
            if "src_lengths" in net_input:
                tokens["src_lengths"] = net_input["src_lengths"][:1].clamp(max=length)
            yield tokens


class Spectrum(NamedTuple):
    """The means of one attention over the windows."""

    cumulative: Tensor  # [n], mean also over the heads
    effective_rank: Tensor  # [H]
    log: Tensor  # [n], of log P, mean also over the heads that have one; NaN if none has
    rank_over_heads: Tensor  # mean over the tokens


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


def measure(loaded: Loaded, args: Namespace, length: int) -> list[Measured]:
    """Return the spectra of the heads of a model and, if heads mix, those of its source heads."""
    # by source or not, site and layer: one for each window
    found: dict[tuple[bool, str, int], list[Spectrum]] = {}

    def see(name: str, attention: MixheadAttention, heads: Heads) -> None:
        weights = heads.weights()  # [1, H, n, n]
        if not weights.isfinite().all():
            raise OptionError(
                f"{loaded.path}: the weights of {name} are not finite; are its parameters damaged?"
            )
        for source, matrices in ((False, mix_heads(weights, heads.mixing)), (True, weights)):
            if not source or heads.mixing is not None:
                values = singular_values(matrices)[0]  # [H, n]
                measures = (
                    cumulative(values).mean(0),
                    effective_rank(values),
                    log_spectrum(matrices[0]).nanmean(0),
                )
                spectrum = Spectrum(*measures, rank_over_heads(matrices[0]).mean())
                found.setdefault((source, *where(name)), []).append(spectrum)

    number = 0
    with torch.no_grad(), hooked(loaded.model, see):
        for inputs in itertools.islice(windows(loaded, args.subset, length), args.windows):
            number += 1
            loading.forward(loaded, inputs, alone=True)
    if not number:
        usual = usual_length(loaded, args.subset)
        raise OptionError(
            f"--length {length}: no sentence of {args.subset} is that long; the median is {usual}"
        )
    means: dict[bool, dict[str, dict[int, Spectrum]]] = {False: {}, True: {}}
    for (source, site, layer), spectra in found.items():
        mean = Spectrum(*(torch.stack(values).nanmean(0) for values in zip(*spectra, strict=True)))
        means[source].setdefault(site, {})[layer] = mean
    return [
        Measured(loaded.name, source, number, sites) for source, sites in means.items() if sites
    ]


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser, several=True, batching=False)
    output.add_arguments(parser, labels=True)
    text = "tokens in a window (default: the median length in the set)"
    parser.add_argument("--length", type=loading.positive, metavar="N", help=text)
    text = "largest number of windows (default: %(default)s)"
    parser.add_argument("--windows", type=loading.positive, default=16, metavar="N", help=text)


def run(args: Namespace) -> None:
    labels = output.labels(args, [output.name_of(path) for path in args.checkpoints])
    measured: list[Measured] = []
    length = args.length
    for path, label in zip(args.checkpoints, labels, strict=True):
        loaded = loading.load_from(args, path, label)
        length = length or usual_length(loaded, args.subset)
        measured += measure(loaded, args, length)
    print(f"windows of {length} tokens from {args.subset}, --windows {args.windows} at most")
    for m in measured:
        for site in m.spectra:
            print(
                f"{m.label}: {site}: mean effective rank {m.mean_rank(site):.2f} of {length}, "
                f"windows: {m.windows}"
            )
    results = {"length": length, "models": {m.label: as_json(m) for m in measured}}
    if any(m.source for m in measured):
        print(NOTE)
        results["note"] = NOTE
    with figures.style():
        pictures = {"spectrum": draw_curves([m for m in measured if not m.source], length)}
        pictures["effective_rank"] = draw_ranks(measured)
        pictures["log_and_heads"] = draw_logs(measured)
    output.write(args, "spectrum", results, pictures)


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
