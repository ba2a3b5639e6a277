"""Show the matrices that mix the heads, and how far they are from the identity and from orthogonal (mixhead section 3).

M[j, i] is the weight of source head j in mixed head i. The first figure shows M of every layer. Where M depends on the
position (Mixhead B), it shows the mean over the tokens.

The second figure shows the Frobenius norms ||M - I||, how much the heads are mixed, and ||M^T M - I||, whose square the
orthogonal_* criteria penalise. Where M depends on the position, they are computed for each token and then averaged:
tokens far from the identity may have a mean near it.

The third figure, for Mixhead B, shows the distances by the frequency of the token at the position. In a decoder that is
the token that it reads, not the one that it predicts. The classes of frequency are shares of the training's tokens.

A pruned model's M is rectangular, [source heads, mixed heads], and has no distance from the identity.

Example: mixing mixhead/checkpoint_best.pt --limit 20
"""

import math
from argparse import ArgumentParser, Namespace
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.models import FairseqLanguageModel
from torch import Tensor

from mixhead_plugin.analysis import figures, loading, output
from mixhead_plugin.analysis.attentions import attentions, by_site, hooked, where
from mixhead_plugin.analysis.loading import Loaded
from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import Heads, MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS

# Class borders: the most frequent words that make up half of the training's tokens, and so on.
BINS = (0.5, 0.75, 0.9, 0.99, 1.0)
SPECIAL = "special symbols"
DISTANCES = {"from_identity": r"$\|M - I\|_F$", "from_orthogonal": r"$\|M^\top M - I\|_F$"}

# Means of "mixing", [Hs, Hm], and of DISTANCES; over tokens also their number, "tokens".
Means = dict[str, Any]


def distances(mixing: Tensor) -> Tensor:
    """Return ||M - I|| (NaN if M is not square) and ||M^T M - I||, [..., 2], of matrices M [..., Hs, Hm]."""
    sources, mixed = mixing.shape[-2:]
    eye = torch.eye(mixed).to(mixing)
    orthogonal = torch.linalg.matrix_norm(mixing.transpose(-2, -1) @ mixing - eye)
    identity = torch.linalg.matrix_norm(mixing - eye) if sources == mixed else torch.full_like(orthogonal, math.nan)
    return torch.stack([identity, orthogonal], -1)


class Classes(NamedTuple):
    names: list[str]
    of: Tensor  # int64 [symbols], an index of `names`


def frequency_classes(dictionary: Dictionary, special: tuple[int, ...] = ()) -> Classes:
    """Sort the symbols of a dictionary into classes by the share of tokens that are more frequent, see BINS.

    Special symbols, the dictionary's and `special`, are a class of their own. Without counts there are no classes.
    """
    counts = torch.tensor(dictionary.count, dtype=torch.float64)
    own = torch.arange(len(counts)) >= dictionary.nspecial
    own[list(special)] = False
    used = counts[own & (counts > 0)]  # Dictionary.finalize fills up with madeupword000i, which have no count
    if used.numel() < 2 or used.max() == used.min():
        return Classes([], torch.zeros(len(counts), dtype=torch.int64))
    shares = torch.where(own, counts, 0) / counts[own].sum()
    order = shares.argsort(descending=True, stable=True)
    before = torch.empty_like(shares)  # share of the more frequent symbols
    before[order] = shares[order].cumsum(0) - shares[order]
    classes = torch.bucketize(before + 1e-12, torch.tensor(BINS[:-1], dtype=torch.float64), right=True)
    classes[~own] = len(BINS)
    names = [f"{low:.0%}-{high:.0%}" for low, high in zip((0.0, *BINS), BINS, strict=False)]
    return Classes([*names, SPECIAL], classes)


class Layer(NamedTuple):
    """The mixing of one attention."""

    name: str
    kind: str  # a key of HEAD_MIXINGS
    total: Means
    classes: dict[str, Means]  # by class of frequency, where M depends on the position


def features(mixing: Tensor) -> Tensor:
    """Return a row for each matrix of M [T, Hs, Hm] that can be summed: 1, both distances, M; [T, 3 + Hs * Hm]."""
    mixing = mixing.double().cpu()
    return torch.cat([torch.ones(len(mixing), 1).double(), distances(mixing), mixing.flatten(1)], 1)


def means(sums: Tensor, mixing: Tensor) -> Means:
    """Return the means of summed `features` [3 + Hs * Hm] of matrices shaped like M [..., Hs, Hm]."""
    if not sums[0]:
        return {"tokens": 0}
    _, identity, orthogonal, *entries = (sums / sums[0]).tolist()
    matrix = torch.tensor(entries, dtype=torch.float64).reshape(mixing.shape[-2:])
    return {"tokens": int(sums[0]), "mixing": matrix, "from_identity": identity, "from_orthogonal": orthogonal}


def constant(name: str, attention: MixheadAttention) -> Layer:
    """Return the mixing of an attention where M is the same for all positions."""
    mixing = attention.head_mixing.weight.detach()
    total = means(features(mixing[None])[0], mixing)
    del total["tokens"]
    return Layer(name, attention.head_mixing_kind, total, {})


def over_tokens(loaded: Loaded, args: Namespace, names: list[str]) -> list[Layer]:
    """Return the mixing of the attentions `names`, where M depends on the position, over the tokens of a set."""
    task = loaded.task
    special = (task.mask_idx,) if hasattr(task, "mask_idx") else ()
    reads_source = isinstance(loaded.model, FairseqLanguageModel) or task.target_dictionary is None
    read = {
        "encoder": task.source_dictionary,
        "decoder": task.source_dictionary if reads_source else task.target_dictionary,
    }
    classes = {side: frequency_classes(dictionary, special) for side, dictionary in read.items()}
    side_of = {name: "encoder" if where(name).site == "encoder-self" else "decoder" for name in names}
    queries: dict[str, Tensor] = {}  # tokens of the present batch, by side, [B, Nq]
    sums: dict[str, Tensor] = {}  # of the features by class
    last: dict[str, Tensor] = {}  # M of the present batch

    def see(name: str, attention: MixheadAttention, heads: Heads) -> None:
        if name in side_of:
            tokens, (groups, class_of) = queries[side_of[name]], classes[side_of[name]]
            real = tokens.ne(read[side_of[name]].pad())
            rows = features(heads.mixing[real])  # [T, features]
            known = sums.setdefault(name, rows.new_zeros(max(1, len(groups)), rows.shape[1]))
            known.index_add_(0, class_of[tokens[real].cpu()], rows)
            last[name] = heads.mixing

    with torch.no_grad(), hooked(loaded.model, see):
        for batch in loading.batches_from(args, loaded):
            source = batch["net_input"]["src_tokens"]
            queries.update(encoder=source, decoder=batch["net_input"].get("prev_output_tokens", source))
            loading.forward(loaded, batch["net_input"])
    for side in dict.fromkeys(side_of.values()):
        if not classes[side].names:
            print(f"{loaded.name}: the {side}'s dictionary has no counts: no classes of tokens")
    found = []
    for name, by_class in sums.items():
        groups = zip(classes[side_of[name]].names, by_class, strict=False)
        in_classes = {group: means(row, last[name]) for group, row in groups}
        kind = attentions(loaded.model)[name].head_mixing_kind
        found.append(Layer(name, kind, means(by_class.sum(0), last[name]), in_classes))
    return found


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    output.add_arguments(parser)


def run(args: Namespace) -> None:
    loaded = loading.load_from(args, args.checkpoint)
    mixing = {name: a for name, a in attentions(loaded.model).items() if a.head_mixing is not None}
    if not mixing:
        kinds = ", ".join(kind for kind, entry in HEAD_MIXINGS.items() if entry.build)
        raise OptionError(f"{args.checkpoint}: has --head-mixing none; must be a model with one of {kinds}")
    dependent = [name for name, a in mixing.items() if HEAD_MIXINGS[a.head_mixing_kind].reads_query]
    layers = [constant(name, attention) for name, attention in mixing.items() if name not in dependent]
    layers += over_tokens(loaded, args, dependent) if dependent else []
    layers.sort(key=lambda layer: list(mixing).index(layer.name))
    results = {}
    for name, kind, total, classes in layers:
        shape = "x".join(map(str, total["mixing"].shape))
        identity = total["from_identity"]
        first = "rectangular" if math.isnan(identity) else f"from identity {identity:.3f}"
        print(f"{where(name)}: M {shape}, {first}, from orthogonal {total['from_orthogonal']:.3f}")
        results[name] = {"place": where(name).site, "layer": where(name).layer, "head_mixing": kind, **total}
        results[name] |= {"classes": classes} if classes else {}
    sites = {site: [x for x in layers if x.name in names] for site, names in by_site(loaded.model).items()}
    sites = {site: there for site, there in sites.items() if there}
    counted = {site: there for site, there in sites.items() if there[0].classes}
    with figures.style():
        pictures = {"mixing": draw_matrices(sites), "mixing_distances": draw_distances(sites)}
        if counted:
            pictures["mixing_tokens"] = draw_classes(counted)
    output.write(args, "mixing", {"attentions": results}, pictures)


def draw_matrices(sites: dict[str, list[Layer]]) -> Any:
    """Draw M of each layer: a row of panels for each site and eight of its layers."""
    rows = [there[i : i + 8] for there in sites.values() for i in range(0, len(there), 8)]
    panels = [[(str(where(layer.name)), layer.total["mixing"].tolist()) for layer in row] for row in rows]
    labels = {"xlabel": "mixed head i", "ylabel": "source head j"}
    return figures.heat_maps(panels, (2.0, 2.3), "mean of M[j, i]", "RdBu_r", square=True, **labels)


def draw_distances(sites: dict[str, list[Layer]]) -> Any:
    """Draw the distances over the layers, a line for each site."""
    figure, axes = figures.subplots(1, len(DISTANCES), (3.6, 3.2))
    for panel, (name, label) in zip(axes[0], DISTANCES.items(), strict=True):
        for i, (site, there) in enumerate(sites.items()):
            numbers, values = [where(layer.name).layer for layer in there], [layer.total[name] for layer in there]
            panel.plot(numbers, values, **figures.line(i), marker="o", markersize=4, label=site)
        panel.set(xlabel="layer", ylabel=label)
        panel.set_ylim(0, 1.08 * panel.get_ylim()[1])
        figures.integer_axis(panel.xaxis)
    figures.legend_below(figure, axes)
    return figure


def draw_classes(sites: dict[str, list[Layer]]) -> Any:
    """Draw the distances by class of tokens: a line for each layer, a row of panels for each site."""
    figure, axes = figures.subplots(len(sites), len(DISTANCES), (4.2, 3.2))
    for row, (site, there) in zip(axes, sites.items(), strict=True):
        groups = [group for group, found in there[0].classes.items() if found["tokens"]]
        for panel, (name, label) in zip(row, DISTANCES.items(), strict=True):
            for i, layer in enumerate(there):
                values = [layer.classes[group][name] for group in groups]
                panel.plot(groups, values, **figures.line(i), marker="o", label=f"layer {where(layer.name).layer}")
            panel.set(title=site, ylabel=label, xlabel="words from most to least frequent, share of tokens")
            panel.tick_params("x", rotation=30)
            panel.set_ylim(0, 1.08 * panel.get_ylim()[1])
    figures.legend_below(figure, axes)
    return figure
