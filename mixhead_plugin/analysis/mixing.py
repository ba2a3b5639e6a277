"""Show the matrices that mix the heads, and how far they are from the identity and from orthogonal (mixhead section 3).

M[j, i] is the weight of source head j in mixed head i. The first figure shows M of every layer. Where M depends on the
position (Mixhead B), it shows the mean over the tokens.

The second figure shows the Frobenius norms ||M - I||, how much the heads are mixed, and ||M^T M - I||, whose square the
orthogonal_* criteria penalise. Where M depends on the position, they are computed for each token and then averaged:
tokens far from the identity may have a mean near it.

A pruned model's M is rectangular, [source heads, mixed heads], and has no distance from the identity.

Example: mixing mixhead/checkpoint_best.pt --limit 20
"""

import math
from argparse import ArgumentParser, Namespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.analysis import figures, loading, output
from mixhead_plugin.analysis.attentions import attentions, by_site, hooked, where
from mixhead_plugin.analysis.loading import Loaded
from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import Heads, MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS

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


class Layer(NamedTuple):
    """The mixing of one attention."""

    name: str
    kind: str  # a key of HEAD_MIXINGS
    total: Means


def features(mixing: Tensor) -> Tensor:
    """Return a row for each matrix of M [T, Hs, Hm] that can be summed: 1, both distances, M; [T, 3 + Hs * Hm]."""
    mixing = mixing.double().cpu()
    return torch.cat([torch.ones(len(mixing), 1).double(), distances(mixing), mixing.flatten(1)], 1)


def means(sums: Tensor, mixing: Tensor) -> Means:
    """Return the means of summed `features` [3 + Hs * Hm] of matrices shaped like M [..., Hs, Hm]."""
    _, identity, orthogonal, *entries = (sums / sums[0]).tolist()
    matrix = torch.tensor(entries, dtype=torch.float64).reshape(mixing.shape[-2:])
    return {"tokens": int(sums[0]), "mixing": matrix, "from_identity": identity, "from_orthogonal": orthogonal}


def constant(name: str, attention: MixheadAttention) -> Layer:
    """Return the mixing of an attention where M is the same for all positions."""
    mixing = attention.head_mixing.weight.detach()
    total = means(features(mixing[None])[0], mixing)
    del total["tokens"]
    return Layer(name, attention.head_mixing_kind, total)


def over_tokens(loaded: Loaded, args: Namespace, names: list[str]) -> list[Layer]:
    """Return the mixing of the attentions `names`, where M depends on the position, over the tokens of a set."""
    real: dict[str, Tensor] = {}  # whether a token of the present batch is no padding, by side, bool [B, Nq]
    sums: dict[str, Tensor] = {}  # of the features
    last: dict[str, Tensor] = {}  # M of the present batch

    def see(name: str, attention: MixheadAttention, heads: Heads) -> None:
        if name in names:
            side = "encoder" if where(name).site == "encoder-self" else "decoder"
            sums[name] = sums.get(name, 0) + features(heads.mixing[real[side]]).sum(0)
            last[name] = heads.mixing

    pad = loaded.task.source_dictionary.pad()
    target_pad = (loaded.task.target_dictionary or loaded.task.source_dictionary).pad()
    with torch.no_grad(), hooked(loaded.model, see):
        for batch in loading.batches_from(args, loaded):
            source = batch["net_input"]["src_tokens"]
            read = batch["net_input"].get("prev_output_tokens")  # a language model reads its source
            real.update(encoder=source.ne(pad), decoder=source.ne(pad) if read is None else read.ne(target_pad))
            loading.forward(loaded, batch["net_input"])
    found = attentions(loaded.model)
    return [Layer(name, found[name].head_mixing_kind, means(total, last[name])) for name, total in sums.items()]


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
    for name, kind, total in layers:
        shape = "x".join(map(str, total["mixing"].shape))
        identity = total["from_identity"]
        first = "rectangular" if math.isnan(identity) else f"from identity {identity:.3f}"
        print(f"{where(name)}: M {shape}, {first}, from orthogonal {total['from_orthogonal']:.3f}")
        results[name] = {"place": where(name).site, "layer": where(name).layer, "head_mixing": kind, **total}
    sites = {site: [x for x in layers if x.name in names] for site, names in by_site(loaded.model).items()}
    sites = {site: there for site, there in sites.items() if there}
    with figures.style():
        pictures = {"mixing": draw_matrices(sites), "mixing_distances": draw_distances(sites)}
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
