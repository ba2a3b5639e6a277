"""How many dimensions do the attention matrices have?

The matrix of a head, [n, n] for a window of n tokens, has n singular values s_1 >= s_2 >= ... The figure shows
(s_1 + ... + s_k) / (s_1 + ... + s_n) over k for each layer (thin) and the mean of the layers (bold): the closer a
curve is to the upper left corner, the lower is the rank. It is computed for each head and window, then averaged over
them. Where heads mix, the matrices are the mixed ones, which act on the values; --source shows those before mixing too.

The second figure is the effective rank of each head, exp(-sum_k p_k ln p_k) with p_k = s_k / sum s: n if all
singular values are equal, 1 if there is only one.

Windows are the first --length tokens of sentences (blocks, for language models) that have as many, on both sides of a
translation; give all checkpoints the same data.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Tuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from mixhead_plugin.analysis import figures, loading
from mixhead_plugin.analysis.attentions import PLACES, by_place, watching
from mixhead_plugin.analysis.loading import Loaded
from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import Heads, MixheadAttention
from mixhead_plugin.ops.reference import mix_heads

CHUNK_BYTES = 256 * 2**20  # of float64 matrices that are decomposed at once
TOKENS = ("src_tokens", "prev_output_tokens")


# ---- measures --------------------------------------------------------------------------------------------------------


def singular_values(matrices: Tensor) -> Tensor:
    """Singular values [..., min(n, m)] of matrices [..., n, m], falling; float64 on the CPU, whatever comes."""
    flat = matrices.flatten(0, -3)  # [matrices, n, m]
    size = max(1, CHUNK_BYTES // (8 * flat.shape[-2] * flat.shape[-1]))
    values = [torch.linalg.svdvals(chunk.cpu().double()) for chunk in flat.split(size)]
    return torch.cat(values).unflatten(0, matrices.shape[:-2])


def cumulative(values: Tensor) -> Tensor:
    """(s_1 + ... + s_k) / (s_1 + ... + s_n) for each k (mixhead figure 1): [..., n] -> [..., n].

    A matrix of zeros, whose singular values have no shares, gives NaN.
    """
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of s_k / sum s (Roy and Vetterli 2007): [..., n] -> [...]; NaN for a matrix of zeros."""
    shares = values / values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


# ---- windows ---------------------------------------------------------------------------------------------------------


def usual_length(loaded: Loaded, subset: str) -> int:
    """A length that at least half of the sentences have, on each of their sides."""
    dataset = loading.load_subset(loaded, subset)
    if not hasattr(dataset, "size"):  # the windows of --task truncated_bptt_lm
        return int(loaded.cfg.task.tokens_per_sample)
    lengths = [min(np.atleast_1d(dataset.size(i))) for i in range(len(dataset))]
    return int(np.median(lengths))


def cut(net_input: Dict[str, Any], pads: Dict[str, int], length: int) -> Tuple[Dict[str, Tensor], int]:
    """The sentences of a batch that are long enough, without padding and all of the same length.

    Args:
        net_input: a batch's; token tensors are [B, N], padded on either side
        pads: the padding symbol of each token tensor
        length: n

    Returns:
        the input with tokens [B', length], and B'
    """
    tokens = {name: net_input[name] for name in TOKENS if name in net_input}
    real = {name: rows.ne(pads[name]) for name, rows in tokens.items()}
    long = torch.stack([mask.sum(1) >= length for mask in real.values()]).all(0)  # [B]
    windows = {}
    for name, rows in tokens.items():
        first = real[name][long].int().argmax(1)  # [B'], where the padding on the left ends
        columns = first[:, None] + torch.arange(length, device=rows.device)  # [B', length]
        windows[name] = rows[long].gather(1, columns)
    number = int(long.sum())
    if "src_lengths" in net_input:
        windows["src_lengths"] = torch.full_like(net_input["src_lengths"][:number], length)
    return windows, number


def forget(model: nn.Module) -> None:
    """Empty the memory of a recurrent model: windows at random places do not go on from each other."""
    for module in model.modules():
        if hasattr(module, "reset_memory"):
            module.reset_memory()


def windows(loaded: Loaded, args: Namespace, length: int) -> Iterator[Dict[str, Tensor]]:
    """Inputs of one window each, `args.windows` of them at most, at random places of the set."""
    pads = {"src_tokens": loaded.task.source_dictionary.pad()}
    if loaded.task.target_dictionary is not None:
        pads["prev_output_tokens"] = loaded.task.target_dictionary.pad()
    left = args.windows
    progress = tqdm(total=left, desc=loaded.name, unit="window", disable=None, leave=False)
    with progress:
        # one by one, for a batch has sentences of similar lengths
        for batch in loading.batches(loaded, args.subset, batch_size=1, shuffle=True, bar=False):
            inputs, number = cut(batch["net_input"], pads, length)
            for i in range(min(number, left)):
                forget(loaded.model)
                yield {name: rows[i : i + 1] for name, rows in inputs.items()}
                progress.update()
                left -= 1
            if not left:
                return


# ---- the command -----------------------------------------------------------------------------------------------------


@dataclass
class Spectrum:
    """Of one attention: means over `windows` windows."""

    windows: int
    curve: Tensor  # [n], also over the heads
    rank: Tensor  # [H]


@dataclass
class Measured:
    """Of one checkpoint, or of its source heads; by place and layer."""

    checkpoint: str
    source: bool
    windows: int
    spectra: Dict[str, Dict[int, Spectrum]]

    @property
    def label(self) -> str:
        return f"{self.checkpoint}, before mixing" if self.source else self.checkpoint


def measure(loaded: Loaded, args: Namespace, length: int) -> List[Measured]:
    """The spectra of the mixed heads of a model, then, with `args.source` and mixing, of its source heads."""
    sums: Dict[bool, Dict[str, Spectrum]] = {False: {}}

    def add(source: bool, name: str, matrices: Tensor) -> None:
        values = singular_values(matrices)  # [1, H, n]
        curve, rank = cumulative(values).mean((0, 1)), effective_rank(values).mean(0)
        known = sums.setdefault(source, {}).setdefault(name, Spectrum(0, torch.zeros(()), torch.zeros(())))
        known.windows, known.curve, known.rank = known.windows + 1, known.curve + curve, known.rank + rank

    def see(name: str, attention: MixheadAttention, heads: Heads) -> None:
        weights = heads.weights()  # [1, H, n, n]
        if not weights.isfinite().all():
            raise OptionError(f"{loaded.path}: the weights of {name} are not finite; are its parameters damaged?")
        add(False, name, mix_heads(weights, heads.mixing))
        if args.source and heads.mixing is not None:
            add(True, name, weights)

    number = 0
    with torch.no_grad(), watching(loaded.model, see):
        for number, inputs in enumerate(windows(loaded, args, length), 1):  # noqa: B007 (also needed behind)
            loading.forward(loaded, inputs)
    if not number:
        raise OptionError(
            f"--length {length}: no sentence of {args.subset} has as many tokens; half of them have "
            f"{usual_length(loaded, args.subset)}"
        )
    sites = by_place(loaded.model)
    measured = []
    for source, spectra in sums.items():
        means = {name: Spectrum(s.windows, s.curve / s.windows, s.rank / s.windows) for name, s in spectra.items()}
        measured.append(
            Measured(
                loaded.name,
                source,
                number,
                {
                    site: {layer: means[name] for layer, name in layers.items() if name in means}
                    for site, layers in sites.items()
                    if any(name in means for name in layers.values())
                },
            )
        )
    return measured


def mean_rank(layers: Dict[int, Spectrum]) -> float:
    """Mean over the layers of the mean over their heads"""
    return float(np.mean([spectrum.rank.mean().item() for spectrum in layers.values()]))


def draw_curves(measured: List[Measured], length: int) -> figures.Figure:
    """A panel for each place, a colour for each checkpoint."""
    sites = [site for site in PLACES if any(site in m.spectra for m in measured)]
    figure, axes = figures.subplots(1, len(sites), (3.6 if len(sites) > 1 else 4.8, 3.8), sharey=True)
    ranks = np.arange(1, length + 1)
    checkpoints = list(dict.fromkeys(m.checkpoint for m in measured))
    for axis, site in zip(axes[0], sites):
        for m in measured:
            curves = [s.curve.numpy() for s in m.spectra.get(site, {}).values()]
            if not curves:
                continue
            look = figures.line(checkpoints.index(m.checkpoint))
            if m.source:
                look["linestyle"] = (0, (2, 1))
            for curve in curves:
                axis.plot(ranks, curve, **look, linewidth=0.6, alpha=0.55)
            axis.plot(ranks, np.mean(curves, 0), **look, linewidth=2.2, label=m.label)
        axis.plot(ranks, ranks / length, color="grey", linestyle=":", linewidth=1, label="all singular values equal")
        axis.set(title=site, xlabel=f"number of largest singular values (of {length})", xlim=(1, length))
        figures.integer_axis(axis.xaxis)
        axis.set_ylim(0, 1.02)
        axis.grid(True)
    axes[0, 0].set_ylabel("share of the sum of singular values")
    figures.legend_below(figure, axes)
    return figure


def draw_ranks(measured: List[Measured]) -> figures.Figure:
    """A row for each checkpoint, a column for each place, or all in one row: layers down, heads across."""
    sites = [site for site in PLACES if any(site in m.spectra for m in measured)]
    grid = [[(m, site) for site in sites] for m in measured]
    if len(sites) == 1:
        grid = [[panel for row in grid for panel in row]]
    found = [s.rank for m in measured for layers in m.spectra.values() for s in layers.values()]
    low, high = (float(end([end(rank).item() for rank in found])) for end in (np.nanmin, np.nanmax))
    layers = max(len(layers) for m in measured for layers in m.spectra.values())
    figure, axes = figures.subplots(len(grid), len(grid[0]), (3.0, 1.5 + 0.14 * layers))
    for panel, (m, site) in zip(axes.flat, [panel for row in grid for panel in row]):
        if site not in m.spectra:
            panel.axis("off")
            continue
        ranks = figures.ragged([s.rank.tolist() for s in m.spectra[site].values()])
        image = figures.heat_map(panel, ranks, low=low, high=high, xlabel="head", ylabel="layer")
        panel.set_title(f"{m.label}\n{site}: mean {mean_rank(m.spectra[site]):.1f}")
    figures.colour_bar(figure, image, axes, "effective rank")
    return figure


def results(measured: List[Measured]) -> Dict[str, Any]:
    """All numbers, for JSON."""
    return {
        m.label: {
            "windows": m.windows,
            "places": {
                site: {
                    "mean_effective_rank": mean_rank(layers),
                    "mean_cumulative": np.mean([s.curve.numpy() for s in layers.values()], 0),
                    "layers": {layer: {"effective_rank": s.rank, "cumulative": s.curve} for layer, s in layers.items()},
                }
                for site, layers in m.spectra.items()
            },
        }
        for m in measured
    }


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser, several=True, batching=False)
    figures.add_arguments(parser)
    figures.add_labels(parser)
    parser.add_argument(
        "--length", type=loading.positive, metavar="N", help="tokens in a window (default: what half of the set has)"
    )
    parser.add_argument(
        "--windows", type=loading.positive, default=16, metavar="N", help="how many at most (default: %(default)s)"
    )
    parser.add_argument("--source", action="store_true", help="also the matrices of the source heads, before mixing")


def run(args: Namespace) -> None:
    labels = figures.labels(args, len(args.checkpoints))
    measured: List[Measured] = []
    length: Optional[int] = args.length
    for path, label in zip(args.checkpoints, labels):
        loaded = loading.load_from(args, path, label)
        if length is None:
            length = usual_length(loaded, args.subset)
        measured += measure(loaded, args, length)
    figures.check_distinct([m.label for m in measured])
    print(f"windows of {length} tokens from {args.subset}, --windows {args.windows} at most")
    for m in measured:
        for site, layers in m.spectra.items():
            rank = mean_rank(layers)
            print(f"{m.label}: {site}: mean effective rank {rank:.2f} of {length}, windows: {m.windows}")
    with figures.style():
        files = figures.save(draw_curves(measured, length), args.output, "spectrum")
        files += figures.save(draw_ranks(measured), args.output, "effective_rank")
    files.append(figures.save_json(args.output, "spectrum", args, {"length": length, "models": results(measured)}))
    figures.report(files)
