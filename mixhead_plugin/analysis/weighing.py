"""The importance of heads, I_h = E_x |dL(x) / d xi_h| (sixteen-heads essay, 'Systematic Head Pruning')."""

from typing import Any, Callable, Dict, Iterable, List, Mapping, Tuple

import torch
from torch import Tensor, nn

from mixhead_plugin.analysis.heads import KINDS, Head, gated, kinds
from mixhead_plugin.modules.attention import HeadGates, MixheadAttention
from mixhead_plugin.modules.pruning import number_of_heads

# fairseq's call: model, sample -> loss, sample size, what to log
Criterion = Callable[[nn.Module, Dict[str, Any]], Tuple[Tensor, Any, Any]]
# By attention, then by kind of head: one number for each head, [H].
HeadNumbers = Dict[str, Dict[str, Tensor]]


def sentence_gradients(
    model: nn.Module, criterion: Criterion, batch: Dict[str, Any], attentions: Mapping[str, MixheadAttention]
) -> HeadNumbers:
    """dL(x) / d xi_h for every sentence x of a batch and every head h, from one forward and one backward pass.

    Sentences do not see each other, so a gate of its own for each of them, [B, H], gets the gradient of its loss alone.

    Args:
        model: as its dropout is to be, so in evaluation mode; without --checkpoint-activations, through which no
            gradient comes to a gate
        criterion: called with model and batch, gives the loss first, summed over the sentences; L(x) is a sentence's
            share, a window's for language models
        batch: fairseq's sample
        attentions: those of the model, by name

    Returns:
        by attention and kind [B, H], in the parameters' dtype
    """
    rows = batch["net_input"]["src_tokens"].shape[0]
    ones: Dict[Tuple[str, str], Tensor] = {}
    for name, attention in attentions.items():
        parameter = next(attention.parameters())
        for kind in kinds(attention):
            shape = (rows, number_of_heads(attention, kind))
            ones[name, kind] = parameter.new_ones(shape).requires_grad_()  # [B, H]
    with (
        torch.enable_grad(),
        gated(attentions, {name: HeadGates(ones.get((name, "source")), ones[name, "mixed"]) for name in attentions}),
    ):
        loss = criterion(model, batch)[0]
        # an attention that the loss does not see, above a classifier's last state for instance, weighs nothing
        gradients = torch.autograd.grad(loss, list(ones.values()), allow_unused=True, materialize_grads=True)
    found: HeadNumbers = {name: {} for name in attentions}
    for (name, kind), gradient in zip(ones, gradients):
        found[name][kind] = gradient
    return found


def importance(
    model: nn.Module,
    criterion: Criterion,
    batches: Iterable[Dict[str, Any]],
    attentions: Mapping[str, MixheadAttention],
) -> Tuple[HeadNumbers, int]:
    """I_h of every head, the mean over the sentences of |dL(x) / d xi_h|, and how many sentences there were.

    Arguments as in `sentence_gradients`.

    Returns:
        by attention and kind [H] float64, on the CPU; the number of sentences, at least 1

    Raises:
        ValueError: no batches
        FloatingPointError: an importance is not finite
    """
    sums: HeadNumbers = {name: {} for name in attentions}
    sentences = 0
    for batch in batches:
        for name, by_kind in sentence_gradients(model, criterion, batch, attentions).items():
            for kind, gradient in by_kind.items():
                total = gradient.double().abs().sum(0).cpu()  # [H]
                sums[name][kind] = sums[name].get(kind, 0) + total
        sentences += batch["net_input"]["src_tokens"].shape[0]
    if not sentences:
        raise ValueError("no sentences to weigh heads on")
    for name, by_kind in sums.items():
        if not all(total.isfinite().all() for total in by_kind.values()):
            raise FloatingPointError(f"the importance of the heads of {name} is not finite")
    return {
        name: {kind: total / sentences for kind, total in by_kind.items()} for name, by_kind in sums.items()
    }, sentences


def normalised_by_layer(weights: HeadNumbers) -> HeadNumbers:
    """Each attention's and kind's importances divided by their l2 norm (Michel et al. 2019, section 4.1); 0 stays 0."""
    return {
        name: {kind: w / w.norm() if w.any() else w for kind, w in by_kind.items()} for name, by_kind in weights.items()
    }


NORMALISATIONS = {"none": lambda weights: weights, "layer": normalised_by_layer}


def removal_order(weights: HeadNumbers, at_least: int = 1) -> Dict[str, List[Head]]:
    """By kind, the heads that may go, the least important first.

    Args:
        weights: importances
        at_least: how many heads of each kind stay in each attention: its most important ones

    Raises:
        ValueError: `at_least` below 1; an attention without heads gives nothing to out_proj
    """
    if at_least < 1:
        raise ValueError(f"at_least {at_least}: must be at least 1")
    order: Dict[str, List[Tuple[float, Head]]] = {}
    for name, by_kind in weights.items():
        for kind, w in by_kind.items():
            ascending = torch.argsort(w, stable=True).tolist()
            going = order.setdefault(kind, [])
            going.extend((float(w[index]), Head(name, kind, index)) for index in ascending[: max(0, len(w) - at_least)])
    return {kind: [head for _, head in sorted(going, key=lambda pair: pair[0])] for kind, going in order.items()}


def least_important(weights: HeadNumbers, fraction: float, at_least: int = 1) -> List[Head]:
    """The `fraction` of the heads, of each kind, that weigh least, or as many as `at_least` lets go.

    Args:
        weights: importances
        fraction: of all heads of a kind, 0 to 1
        at_least: as in `removal_order`
    """
    chosen: List[Head] = []
    for kind, order in removal_order(weights, at_least).items():
        total = sum(len(by_kind[kind]) for by_kind in weights.values() if kind in by_kind)
        chosen += order[: round(fraction * total)]
    return chosen


def pearson(left: HeadNumbers, right: HeadNumbers) -> Dict[str, float]:
    """Pearson's r of two importances of the same heads, by kind; NaN where one of them is constant."""
    r = {}
    for kind in [kind for kind in KINDS if any(kind in by_kind for by_kind in left.values())]:
        pair = torch.stack([as_points(weights, kind) for weights in (left, right)])  # [2, heads]
        r[kind] = float(torch.corrcoef(pair)[0, 1])
    return r


def as_points(weights: HeadNumbers, kind: str) -> Tensor:
    """All numbers of one kind of head in the order of the attentions, [heads]"""
    return torch.cat([by_kind[kind] for by_kind in weights.values() if kind in by_kind])
