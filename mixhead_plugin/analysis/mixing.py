"""What did the matrices learn that mix the heads?

M[j, i] is the weight of source head j in mixed head i. The first figure has M of every layer; where it depends on the
position (Mixhead B), its mean over the tokens. The second has two distances in the Frobenius norm: ||M - I||, how much
is mixed at all, and ||M^T M - I||, how far from orthogonal, which the orthogonal_* criteria penalise (its square).
Where M depends on the position, both are computed token by token, then averaged: a mean of M near the identity does
not say that single tokens are.

The third, for Mixhead B, has the distances by how frequent the token is that stands at the position (what the decoder
reads, not what it predicts): bins of the dictionary's counts from training, each with its share of all tokens.

A pruned model's M is rectangular, [source heads, mixed heads]: then it has no distance from the identity.
"""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqLanguageModel
from torch import Tensor

from mixhead_plugin.analysis import figures, loading
from mixhead_plugin.analysis.attentions import Where, attentions, watching, where
from mixhead_plugin.analysis.loading import Loaded
from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import Heads, MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS

# Shares of the tokens in training that the most frequent words, the next and so on make up.
BINS = (0.5, 0.75, 0.9, 0.99, 1.0)
SPECIAL = "special symbols"
POSITION_WISE = "position-wise"


# ---- measures --------------------------------------------------------------------------------------------------------


class Distances(NamedTuple):
    """Frobenius norms, [...] for matrices [..., Hs, Hm], float64."""

    identity: Optional[Tensor]  # of M - I; None where M is not square
    orthogonal: Tensor  # of M^T M - I


def distances(mixing: Tensor) -> Distances:
    """How far M [..., Hs, Hm] is from the identity and from orthogonal columns."""
    mixing = mixing.double()
    sources, mixed = mixing.shape[-2:]
    gram = mixing.transpose(-2, -1) @ mixing  # [..., Hm, Hm]
    orthogonal = torch.linalg.matrix_norm(gram - torch.eye(mixed).to(gram))
    if sources != mixed:
        return Distances(None, orthogonal)
    return Distances(torch.linalg.matrix_norm(mixing - torch.eye(mixed).to(mixing)), orthogonal)


class Classes(NamedTuple):
    """Which class each symbol of a dictionary belongs to."""

    names: List[str]
    of: Tensor  # int64 [symbols], a number of `names`


def frequency_classes(dictionary: Dictionary, special: Tuple[int, ...] = ()) -> Optional[Classes]:
    """The symbols of a dictionary by the share of tokens that they and all more frequent ones make up, see BINS.

    A symbol that spans a border belongs to the class that it begins in. The special symbols, which no count says
    anything about, are a class of their own.

    Args:
        dictionary: with the counts that fairseq-preprocess wrote
        special: symbols beside its own special ones, such as RoBERTa's mask

    Returns:
        None for a dictionary without counts: all are equal
    """
    counts = torch.tensor(dictionary.count, dtype=torch.float64)
    own = torch.arange(len(counts)) >= dictionary.nspecial
    own[list(special)] = False
    used = counts[own & (counts > 0)]  # Dictionary.finalize fills up with madeupword000i, of which there are none
    if used.numel() < 2 or used.max() == used.min():
        return None
    shares = torch.where(own, counts, torch.zeros(())) / counts[own].sum()
    order = shares.argsort(descending=True, stable=True)
    before = torch.empty_like(shares)  # what is more frequent
    before[order] = shares[order].cumsum(0) - shares[order]
    classes = torch.bucketize(before + 1e-12, torch.tensor(BINS[:-1], dtype=torch.float64), right=True)
    classes[~own] = len(BINS)
    names = [f"{low:.0%}-{high:.0%}" for low, high in zip((0.0, *BINS), BINS)]
    return Classes([*names, SPECIAL], classes)


@dataclass
class Total:
    """Sums over tokens, of one class or of all."""

    tokens: int
    mixing: Tensor  # [Hs, Hm]
    identity: float  # NaN if M is not square
    orthogonal: float

    def add(self, mixing: Tensor) -> None:
        """M [T, Hs, Hm] of T further tokens"""
        found = distances(mixing)
        self.tokens += mixing.shape[0]
        self.mixing = self.mixing + mixing.double().sum(0).cpu()
        self.identity += float("nan") if found.identity is None else found.identity.sum().item()
        self.orthogonal += found.orthogonal.sum().item()

    def mean(self) -> Dict[str, Any]:
        """As it stands in the JSON; nothing but the number for a class without tokens."""
        if not self.tokens:
            return {"tokens": 0}
        values = {"mixing": self.mixing, "from_identity": self.identity, "from_orthogonal": self.orthogonal}
        return {"tokens": self.tokens, **{name: value / self.tokens for name, value in values.items()}}


def nothing() -> Total:
    return Total(0, torch.zeros(()), 0.0, 0.0)


# ---- the command -----------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """What one attention learned."""

    where: Where
    kind: str  # a key of HEAD_MIXINGS
    total: Dict[str, Any]  # see Total.mean; without "tokens" where M is the same for all
    classes: Dict[str, Dict[str, Any]]  # of the frequencies, for position-wise mixing


def constant(name: str, attention: MixheadAttention) -> Layer:
    """Of a mixing that does not depend on the position"""
    mixing = attention.head_mixing.weight.detach().cpu()  # [Hs, Hm]
    total = nothing()
    total.add(mixing[None])
    means = {key: value for key, value in total.mean().items() if key != "tokens"}
    return Layer(where(name), attention.head_mixing_kind, means, {})


def position_wise(loaded: Loaded, args: Namespace) -> Dict[str, Layer]:
    """Of each attention whose mixing depends on the position, over the tokens of a set."""
    task = loaded.task
    sides = {"encoder": task.source_dictionary, "decoder": task.source_dictionary}
    if task.target_dictionary is not None and not isinstance(loaded.model, FairseqLanguageModel):
        sides["decoder"] = task.target_dictionary  # a language model reads its source
    special = tuple(index for index in (getattr(task, "mask_idx", None),) if index is not None)
    classes = {side: frequency_classes(dictionary, special) for side, dictionary in sides.items()}
    names = {n for n, a in attentions(loaded.model).items() if a.head_mixing_kind == POSITION_WISE}
    totals: Dict[str, Dict[str, Total]] = {name: {} for name in names}
    queries: Dict[str, Tensor] = {}

    def see(name: str, attention: MixheadAttention, heads: Heads) -> None:
        if name not in names:
            return
        side = "encoder" if where(name).site == "encoder-self" else "decoder"
        tokens = queries[side]  # [B, Nq]
        real = tokens.ne(sides[side].pad())
        mixing = heads.mixing[real]  # [T, Hs, Hm]
        totals[name].setdefault("", nothing()).add(mixing)
        if classes[side] is not None:
            groups = classes[side].of[tokens[real].cpu()].to(mixing.device)  # [T]
            for number, group in enumerate(classes[side].names):
                totals[name].setdefault(group, nothing()).add(mixing[groups == number])

    with torch.no_grad(), watching(loaded.model, see):
        for batch in loading.batches_from(args, loaded):
            net_input = batch["net_input"]
            source = net_input["src_tokens"]
            queries.update(encoder=source, decoder=net_input.get("prev_output_tokens", source))
            loading.forward(loaded, net_input)
    for side, found in classes.items():
        if found is None and any(side in name.split(".") for name in names):
            print(f"{loaded.name}: the {side}'s dictionary has no counts: no classes of tokens")
    return {
        name: Layer(
            where(name),
            POSITION_WISE,
            total[""].mean(),
            {group: value.mean() for group, value in total.items() if group},
        )
        for name, total in totals.items()
    }


def draw_matrices(layers: List[Layer]) -> figures.Figure:
    """M of each layer, a row of panels for each place and eight of its layers."""
    rows: List[List[Layer]] = []
    for site in dict.fromkeys(layer.where.site for layer in layers):
        there = [layer for layer in layers if layer.where.site == site]
        rows += [there[i : i + 8] for i in range(0, len(there), 8)]
    figure, axes = figures.subplots(len(rows), max(map(len, rows)), (2.0, 2.3), square=True)
    high = max(layer.total["mixing"].abs().max().item() for layer in layers)
    for row, there in enumerate(rows):
        for column, panel in enumerate(axes[row]):
            if column >= len(there):
                panel.axis("off")
                continue
            layer = there[column]
            image = figures.heat_map(panel, layer.total["mixing"], low=-high, high=high, diverging=True)
            figures.integer_axis(panel.xaxis, ticks=4)  # they are small
            panel.set(title=str(layer.where), ylabel="source head j" if column == 0 else "")
            panel.set_xlabel("mixed head i" if row == len(rows) - 1 else "")
            panel.set_aspect("equal")
    mean = "mean of M[j, i]" if any(layer.kind == POSITION_WISE for layer in layers) else "M[j, i]"
    figures.colour_bar(figure, image, axes, mean)
    return figure


DISTANCES = {"from_identity": r"$\|M - I\|_F$", "from_orthogonal": r"$\|M^\top M - I\|_F$"}


def drawn_distances(layers: List[Layer]) -> Dict[str, str]:
    """Those of DISTANCES that any of `layers` has."""
    return {name: label for name, label in DISTANCES.items() if not all(math.isnan(x.total[name]) for x in layers)}


def draw_distances(layers: List[Layer]) -> figures.Figure:
    """The distances over the layers, a line for each place."""
    drawn = drawn_distances(layers)
    figure, axes = figures.subplots(1, len(drawn), (3.6, 3.2))
    for panel, (name, label) in zip(axes[0], drawn.items()):
        for i, site in enumerate(dict.fromkeys(layer.where.site for layer in layers)):
            points = [(layer.where.layer, layer.total[name]) for layer in layers if layer.where.site == site]
            panel.plot(*zip(*points), **figures.line(i), marker="o", markersize=4, label=site)
        panel.set(xlabel="layer", ylabel=label)
        figures.from_zero(panel, [layer.total[name] for layer in layers])
        figures.integer_axis(panel.xaxis)
        panel.grid(True)
    figures.legend_below(figure, axes)
    return figure


def draw_classes(layers: List[Layer]) -> figures.Figure:
    """The distances by class of tokens, a line for each layer; a row of panels for each place."""
    sites = list(dict.fromkeys(layer.where.site for layer in layers))
    drawn = drawn_distances(layers)
    figure, axes = figures.subplots(len(sites), len(drawn), (4.2, 3.2))
    for row, site in enumerate(sites):
        there = [layer for layer in layers if layer.where.site == site]
        groups = [group for group in there[0].classes if there[0].classes[group]["tokens"]]
        words = [group for group in groups if group != SPECIAL]
        for panel, (name, label) in zip(axes[row], drawn.items()):
            for layer in there:
                values = [layer.classes[group][name] for group in groups]
                look = dict(color=figures.shade(layer.where.layer, len(there)), marker="o", markersize=4)
                panel.plot(range(len(words)), values[: len(words)], **look)
                panel.plot(range(len(words), len(groups)), values[len(words) :], **look)
            panel.set(title=site, ylabel=label)
            panel.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
            figures.from_zero(panel, [layer.classes[group][name] for layer in there for group in groups])
            panel.grid(True)
            if row == len(sites) - 1:
                panel.set_xlabel("words from most to least frequent, share of tokens")
        figures.layer_bar(figure, axes[row : row + 1], len(there))
    return figure


def results(layers: Dict[str, Layer]) -> Dict[str, Any]:
    """All numbers, for JSON."""
    return {
        name: {
            "place": layer.where.site,
            "layer": layer.where.layer,
            "head_mixing": layer.kind,
            **layer.total,
            **({"classes": layer.classes} if layer.classes else {}),
        }
        for name, layer in layers.items()
    }


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    figures.add_arguments(parser)


def run(args: Namespace) -> None:
    loaded = loading.load_from(args, args.checkpoint)
    mixing = {name: a for name, a in attentions(loaded.model).items() if a.head_mixing is not None}
    if not mixing:
        kinds = ", ".join(kind for kind, entry in HEAD_MIXINGS.items() if entry.build)
        raise OptionError(f"{args.checkpoint}: has --head-mixing none; must be a model with one of {kinds}")
    over_tokens: Dict[str, Layer] = {}
    if any(a.head_mixing_kind == POSITION_WISE for a in mixing.values()):
        over_tokens = position_wise(loaded, args)
    layers = {name: over_tokens.get(name) or constant(name, attention) for name, attention in mixing.items()}
    for layer in layers.values():
        mixing, identity = layer.total["mixing"], layer.total["from_identity"]
        shape = "x".join(map(str, mixing.shape))
        first = "rectangular" if math.isnan(identity) else f"from identity {identity:.3f}"
        print(f"{layer.where}: M {shape}, {first}, from orthogonal {layer.total['from_orthogonal']:.3f}")
    with figures.style():
        files = figures.save(draw_matrices(list(layers.values())), args.output, "mixing")
        files += figures.save(draw_distances(list(layers.values())), args.output, "mixing_distances")
        by_class = [layer for layer in layers.values() if layer.classes]
        if by_class:
            files += figures.save(draw_classes(by_class), args.output, "mixing_tokens")
    files.append(figures.save_json(args.output, "mixing", args, {"attentions": results(layers)}))
    figures.report(files)
