"""Weigh every head by one backward pass per batch (Michel et al. 2019, section 4.1; essay,
'Systematic Head Pruning').

The essay is 'Are Sixteen Heads Really Better than One?'. The importance of head h is I_h, the mean
over the sentences of |dL/d xi_h|, for a gate xi_h = 1 on the head.

L is the loss that the model was trained with, summed over a sentence (over a window, for language
models). Where heads mix, the weights of source heads are mixed, and the outputs of mixed heads go
to out_proj; both kinds are weighed.

To compare two sets, give --subset valid,test. The command draws the importances on one set over
those on the other, and prints Pearson's r. Figure 4 of the essay compares the scores after ablating
instead: `ablate --subset valid,test`.

Writes importance.{png,svg,json}, for two sets also importance-2.{png,svg} and
importance-correlation.{png,svg}.

Example: importance checkpoint_best.pt --subset valid
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from fairseq.criterions import FairseqCriterion
from fairseq.modules.checkpoint_activations import unwrap_checkpoint
from torch import nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis import heads, loading, output
from mixhead_plugin.fairseq.analysis.correlation import correlation_figure, pearson, subsets_of
from mixhead_plugin.fairseq.analysis.heads import HeadNumbers, gated, kinds, shown_kinds
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.attention import HeadGates, MixheadAttention


def sentence_gradients(
    model: nn.Module,
    criterion: FairseqCriterion,
    batch: dict[str, Any],
    attentions: Mapping[str, MixheadAttention],
) -> HeadNumbers:
    """Return dL(x) / d xi_h for every sentence x of a batch and every head h, each [B, H].

    Each sentence has a gate of its own, [B, H], which affects only that sentence's loss. The model
    must be in evaluation mode and without --checkpoint-activations, which hide the gates.
    """
    rows = batch["net_input"]["src_tokens"].shape[0]
    ones = {}
    for name, attention in attentions.items():
        for kind in kinds(attention):
            # [B, H]
            gate = next(attention.parameters()).new_ones(
                rows, heads.number_of_heads(attention, kind)
            )
            ones[name, kind] = gate.requires_grad_()
    gates = {
        name: HeadGates(ones.get((name, "source")), ones[name, "mixed"]) for name in attentions
    }
    with torch.enable_grad(), gated(attentions, gates):
        loss = criterion(model, batch)[0]
        # A classifier may not use the output of every attention: its gradient is then 0.
        gradients = torch.autograd.grad(
            loss, list(ones.values()), allow_unused=True, materialize_grads=True
        )
    found: HeadNumbers = {name: {} for name in attentions}
    for (name, kind), gradient in zip(ones, gradients, strict=True):
        found[name][kind] = gradient
    return found


def importance(
    model: nn.Module,
    criterion: FairseqCriterion,
    batches: Iterable[dict[str, Any]],
    attentions: Mapping[str, MixheadAttention],
) -> tuple[HeadNumbers, int]:
    """Return I_h of every head, in float64, and the number of sentences."""
    sums: HeadNumbers = {name: {} for name in attentions}
    sentences = 0
    for batch in batches:
        for name, by_kind in sentence_gradients(model, criterion, batch, attentions).items():
            for kind, gradient in by_kind.items():
                # [H]
                sums[name][kind] = sums[name].get(kind, 0) + gradient.double().abs().sum(0).cpu()
        sentences += batch["net_input"]["src_tokens"].shape[0]
    for name, by_kind in sums.items():
        if not all(total.isfinite().all() for total in by_kind.values()):
            raise OptionError(
                f"the importances of the heads of {name} are not finite; are its parameters "
                "damaged?"
            )
    means = {
        name: {kind: total / sentences for kind, total in by_kind.items()}
        for name, by_kind in sums.items()
    }
    return means, sentences


def normalized_by_layer(weights: HeadNumbers) -> HeadNumbers:
    """Divide the importances of each attention and kind by their l2 norm (Michel et al. 2019,
    section 4.1).
    """
    return {
        name: {kind: w / w.norm() if w.any() else w for kind, w in each.items()}
        for name, each in weights.items()
    }


NORMALIZATIONS = {"none": lambda weights: weights, "layer": normalized_by_layer}


def add_arguments(parser: ArgumentParser) -> None:
    loading.add_arguments(parser)
    add_normalization(parser, default="none")
    output.add_arguments(parser)


def add_normalization(parser: ArgumentParser, default: str) -> None:
    text = (
        "layer: divide the importances of each attention by their l2 norm, like Michel et al. "
        "(default: %(default)s)"
    )
    parser.add_argument("--normalize", choices=list(NORMALIZATIONS), default=default, help=text)


def run(args: Namespace) -> None:
    subsets = subsets_of(args)
    title = "importance: mean |dL/dξ|, the change of the loss per change of a head's gate ξ"
    if args.normalize != "none":
        title = "importance: mean |dL/dξ| of a head's gate ξ, l2 norm 1 in each layer"
    results: dict[str, Any] = {"sets": []}
    shown, pictures = {}, {}
    loaded = loading.load_from(args, args.checkpoint)
    data = str(loaded.cfg.task.data)
    for subset in subsets:
        weights, sentences = weigh(args, loaded, subset)
        shown[subset] = NORMALIZATIONS[args.normalize](weights)
        print(
            f"{subset}: importance of each head ({sentences} "
            f"sentences)\n{heads.table(shown[subset])}"
        )
        pictures["importance" if len(shown) == 1 else "importance-2"] = heads.heat_maps(
            shown[subset], title
        )
        found = {"label": subset, "data": data, "subset": subset, "sentences": sentences}
        results["sets"].append({**found, "attentions": heads.as_json(weights)})
    if len(shown) == 2:
        results["pearson"] = pearson(*shown.values())
        for kind, r in results["pearson"].items():
            print(f"Pearson's r of the {shown_kinds(weights)[kind]}: {r:.3f}")
        pictures["importance-correlation"] = correlation_figure(shown, results["pearson"], title)
    output.write(args, "importance", results, pictures)


def weigh(args: Namespace, loaded: Loaded, subset: str) -> tuple[HeadNumbers, int]:
    loaded.model.requires_grad_(False)  # only the gates need gradients
    unwrap_checkpoint(loaded.model)
    batches = loading.batches_from(args, loaded, subset)
    return importance(loaded.model, loaded.criterion, batches, heads.attentions(loaded.model))
