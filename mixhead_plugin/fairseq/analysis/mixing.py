"""Show the matrices that mix the heads, and their distances from the identity and orthogonality
(mixhead section 3).

M[j, i] is the weight of source head j in mixed head i. The first figure shows M - I of every layer,
because the ones of the diagonal would hide what was learned. Where M depends on the position
(Mixhead B), it shows the mean over the tokens, and another figure the standard deviation over the
tokens.

It prints the Frobenius norms ||M - I|| and ||M^T M - I||, where M depends on the position their
means over the tokens: the mean of M can be near the identity although no token's M is. The
orthogonal_* criteria penalise the second, squared.

A pruned model's M is rectangular, [source heads, mixed heads]. It has no distance from the identity
and is drawn whole.

Example: mixing mixhead/checkpoint_best.pt --limit 20
"""

import math
from argparse import ArgumentParser, Namespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import loading, output
from mixhead_plugin.fairseq.analysis.heads import attentions, by_site, hooked, where
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.attention import Heads, MixheadAttention
from mixhead_plugin.heads import figures
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS


def distances(mixing: Tensor) -> Tensor:
    """Return ||M - I|| (NaN if M is not square) and ||M^T M - I||, [..., 2], of matrices M [...,
    Hs, Hm].
    """
    sources, mixed = mixing.shape[-2:]
    eye = torch.eye(mixed).to(mixing)
    orthogonal = torch.linalg.matrix_norm(mixing.transpose(-2, -1) @ mixing - eye)
    identity = (
        torch.linalg.matrix_norm(mixing - eye)
        if sources == mixed
        else torch.full_like(orthogonal, math.nan)
    )
    return torch.stack([identity, orthogonal], -1)


class Layer(NamedTuple):
    """The mixing of one attention, as in mixing.json; where M depends on the position, means over
    the tokens.
    """

    place: str  # one of SITES
    layer: int
    head_mixing: str
    mixing: Tensor  # [Hs, Hm]
    from_identity: float
    from_orthogonal: float
    tokens: int | None = None
    spread: Tensor | None = None  # standard deviation of M over the tokens, [Hs, Hm]


def over_tokens(loaded: Loaded, args: Namespace) -> dict[str, Layer]:
    """Return the mixing of all attentions of a model, where M depends on the position, over the
    tokens of a set.
    """
    # the tokens of the batch that are not padding, by side, bool [B, Nq]
    real: dict[str, Tensor] = {}
    # by attention: tokens, sums of M, of M^2, of distances
    sums: dict[str, tuple[int, Tensor, Tensor, Tensor]] = {}

    def see(name: str, attention: MixheadAttention, heads: Heads) -> None:
        if heads.mixing is not None:
            side = "encoder" if where(name).site == "encoder-self" else "decoder"
            mixing = heads.mixing[real[side]].double().cpu()  # [tokens, Hs, Hm]
            tokens, *before = sums.get(name, (0, 0, 0, 0))
            added = (x.sum(0) for x in (mixing, mixing.square(), distances(mixing)))
            sums[name] = (
                tokens + len(mixing),
                *(old + new for old, new in zip(before, added, strict=True)),
            )

    pad = loaded.task.source_dictionary.pad()
    target_pad = (loaded.task.target_dictionary or loaded.task.source_dictionary).pad()
    with torch.no_grad(), hooked(loaded.model, see):
        for batch in loading.batches_from(args, loaded):
            source = batch["net_input"]["src_tokens"]
            read = batch["net_input"].get("prev_output_tokens")  # a language model reads its source
            real.update(
                encoder=source.ne(pad),
                decoder=source.ne(pad) if read is None else read.ne(target_pad),
            )
            loading.forward(loaded, batch["net_input"])
    found = attentions(loaded.model)
    layers = {}
    for name, (tokens, *totals) in sums.items():
        mean, square, far = (total / tokens for total in totals)
        spread = (square - mean.square()).clamp(min=0).sqrt()
        layers[name] = Layer(
            *where(name), found[name].kinds["head_mixing"], mean, *far.tolist(), tokens, spread
        )
    return layers


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    output.add_arguments(parser)


def run(args: Namespace) -> None:
    loaded = loading.load_from(args, args.checkpoint)
    mixing = {name: a for name, a in attentions(loaded.model).items() if a.head_mixing is not None}
    if not mixing:
        kinds = ", ".join(kind for kind, entry in HEAD_MIXINGS.items() if entry.build)
        raise OptionError(
            f"{args.checkpoint}: has --head-mixing none; must be a model with one of {kinds}"
        )
    (kind,) = {attention.kinds["head_mixing"] for attention in mixing.values()}
    if HEAD_MIXINGS[kind].reads:
        layers = over_tokens(loaded, args)
    else:
        matrices = {
            name: a.head_mixing.weight.detach().double().cpu() for name, a in mixing.items()
        }
        layers = {
            name: Layer(*where(name), kind, m, *distances(m).tolist())
            for name, m in matrices.items()
        }
    results = {}
    for name, layer in layers.items():
        shape = "x".join(map(str, layer.mixing.shape))
        first = (
            "rectangular"
            if math.isnan(layer.from_identity)
            else f"from identity {layer.from_identity:.3f}"
        )
        print(f"{where(name)}: M {shape}, {first}, from orthogonal {layer.from_orthogonal:.3f}")
        results[name] = {key: value for key, value in layer._asdict().items() if value is not None}
    sites = {site: [layers[name] for name in names] for site, names in by_site(layers).items()}
    with figures.style():
        pictures = {"mixing": draw_matrices(sites)}
        if HEAD_MIXINGS[kind].reads:
            pictures["mixing_spread"] = draw_matrices(sites, spread=True)
    output.write(args, "mixing", {"attentions": results}, pictures)


def draw_matrices(sites: dict[str, list[Layer]], spread: bool = False) -> Any:
    """Draw M - I or the spread of M of each layer: a row of panels for each site and eight of its
    layers.
    """

    def panel(layer: Layer) -> tuple[str, Any]:
        title, (sources, mixed) = f"{layer.place} {layer.layer}", layer.mixing.shape
        if spread:
            return title, layer.spread.tolist()
        if sources != mixed:
            return f"{title}: M", layer.mixing.tolist()
        return title, (layer.mixing - torch.eye(sources)).tolist()

    rows = [there[i : i + 8] for there in sites.values() for i in range(0, len(there), 8)]
    panels = [[panel(layer) for layer in row] for row in rows]
    labels = {"xlabel": "mixed head i", "ylabel": "source head j"}
    rectangular = any(
        layer.mixing.size(0) != layer.mixing.size(1) for there in sites.values() for layer in there
    )
    label = "(M - I)[j, i]; M[j, i] where the title says M" if rectangular else "(M - I)[j, i]"
    label = "standard deviation of M[j, i] over tokens" if spread else label
    return figures.heat_maps(
        panels, (2.0, 2.3), label, figures.SEQUENTIAL if spread else "PuOr", square=True, **labels
    )
