"""Show the matrices that mix the heads, and how far from identity and orthogonality they are.

M[j, i] is the weight of source head j in mixed head i (mixhead section 3). The first figure shows
M - I of every layer, because the ones of the diagonal would hide what was learned. Where M depends
on the position (Mixhead B), it shows the mean over the tokens, and another figure shows the
standard deviation over the tokens.

It prints the Frobenius norms ||M - I|| and ||M^T M - I||. Where M depends on the position, they are
means over the tokens, because the mean of M can be near the identity although no token's M is. The
orthogonal_* criteria penalise the second, squared.

A pruned model's M is rectangular, [source heads, mixed heads]. It has no distance from the identity
and is drawn whole.

Example: mixing mixhead/checkpoint_best.pt --limit 20
"""

import math
from argparse import ArgumentParser, Namespace
from typing import Any

from torch import Tensor

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import loading, output
from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.padding import not_padding
from mixhead_plugin.fairseq.sites import side_of_attention
from mixhead_plugin.heads import figures
from mixhead_plugin.heads.attention import Attention, Heads
from mixhead_plugin.heads.mixing_figures import draw_matrices
from mixhead_plugin.heads.mixing_statistics import LayerMixing, MixingSums, as_json, of_matrix
from mixhead_plugin.heads.sites import by_site, where
from mixhead_plugin.heads.views import watched
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS


def over_tokens(loaded: Loaded, args: Namespace, head_mixing: str) -> dict[str, LayerMixing]:
    """Return the mixing of all attentions over the tokens of a set.

    Args:
        loaded: a model whose M depends on the position
        args: the flags of the command
        head_mixing: the model's --head-mixing
    """
    # the tokens of the batch that are not padding, by side, bool [B, Nq]
    real: dict[str, Tensor] = {}
    sums: dict[str, MixingSums] = {}

    def see(attention: Attention, heads: Heads) -> None:
        if heads.mixing is None:
            return
        of_tokens = heads.mixing[real[side_of_attention(attention.name)]]  # [tokens, H, H']
        sums.setdefault(attention.name, MixingSums()).add(of_tokens)

    with watched(attentions_of(loaded.model), see):
        for batch in loading.batches_from(args, loaded):
            real.update(not_padding(loaded.task, batch["net_input"]))
            loading.forward(loaded, batch["net_input"])
    return {name: of_one.means(name, head_mixing) for name, of_one in sums.items()}


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    output.add_arguments(parser)


def run(args: Namespace) -> None:
    loaded = loading.load_from(args, args.checkpoint)
    mixing = {}
    for attention in attentions_of(loaded.model):
        if attention.module.head_mixing is not None:
            mixing[attention.name] = attention.module
    if not mixing:
        values = ", ".join(value for value, row in HEAD_MIXINGS.items() if row.build)
        raise OptionError(
            f"{args.checkpoint}: has --head-mixing none; must be a model with one of {values}"
        )
    (head_mixing,) = {module.variant.head_mixing for module in mixing.values()}
    by_position = bool(HEAD_MIXINGS[head_mixing].reads)
    if by_position:
        layers = over_tokens(loaded, args, head_mixing)
    else:
        layers = {}
        for name, module in mixing.items():
            layers[name] = of_matrix(name, head_mixing, module.head_mixing.weight)

    results: dict[str, Any] = {}
    for name, layer in layers.items():
        shape = "x".join(map(str, layer.mixing.shape))
        first = f"from identity {layer.from_identity:.3f}"
        if math.isnan(layer.from_identity):
            first = "rectangular"
        print(f"{where(name)}: M {shape}, {first}, from orthogonal {layer.from_orthogonal:.3f}")
        results[name] = as_json(layer)

    sites = {}
    for site, names in by_site(layers).items():
        sites[site] = [layers[name] for name in names]
    with figures.style():
        pictures = {"mixing": draw_matrices(sites)}
        if by_position:
            pictures["mixing_spread"] = draw_matrices(sites, spread=True)
    output.write(args, "mixing", {"attentions": results}, pictures)
