"""Weigh every head by one backward pass a batch.

Michel et al. 2019, section 4.1; the sixteen-heads essay.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mixhead_plugin.errors import warn_caller, wrong_argument
from mixhead_plugin.heads.attention import STAGES, Attention, HeadNumbers, HeadsError
from mixhead_plugin.heads.gates import Weight, evaluating, missed_gates, none_passed, opened

Batch = TypeVar("Batch")


def importance(
    attentions: Sequence[Attention],
    batches: Iterable[Batch],
    loss: Callable[[Batch], Tensor],
    sentences_of: Callable[[Batch], int],
    stages: Collection[str] = tuple(STAGES),
) -> tuple[HeadNumbers, int]:
    """Return the importance of every head in float64, and the number of sentences.

    The importance of head h is I_h, the mean over the sentences of |dL/d xi_h|, for a gate xi_h = 1
    on the head: on its output, or on the weights P_h of a source head. The model must be in
    evaluation mode, and must not compute heads again in the backward pass.

    Args:
        attentions: the attentions to weigh, of one model
        batches: what `loss` takes
        loss: takes a batch, and returns the sum of the losses of its sentences
        sentences_of: takes a batch, and returns the number of its sentences
        stages: which heads to weigh

    Raises:
        HeadsError: stages that no attention has, no sentence, a loss without a gradient, or an
            importance that is not finite
        RuntimeError: no call passed the gates; a warning names single attentions
    """
    sums: dict[tuple[str, str], Tensor] = {}
    for attention in attentions:
        for stage in _weighed(attention, stages):
            zeros = torch.zeros(attention.heads[stage], dtype=torch.float64)
            sums[attention.name, stage] = zeros
    if not sums:
        theirs: dict[str, None] = {}  # a set in order
        for attention in attentions:
            theirs.update(dict.fromkeys(attention.heads))
        raise HeadsError(
            f"stages {', '.join(stages)}: must be some of {', '.join(theirs)}, which the "
            "attentions have"
        )

    reached: set[str] = set()  # attentions on which a loss depends
    sentences = 0
    for batch in batches:
        in_batch = sentences_of(batch)
        gradients = _gradients(attentions, batch, loss, in_batch, stages)
        for (name, stage), gradient in gradients.items():
            reached.add(name)
            # The modulus of each sentence before the sum: that is why each has gates of its own.
            sums[name, stage] += gradient.abs().sum(0)
        sentences += in_batch

    if not sentences:
        raise HeadsError("importance: must have a batch with a sentence")
    means: HeadNumbers = {attention.name: {} for attention in attentions}
    for (name, stage), total in sums.items():
        if not total.isfinite().all():
            raise HeadsError(
                f"importance: that of {name} is not finite; are the parameters damaged?"
            )
        means[name][stage] = total / sentences
    missed = [name for name, by_stage in means.items() if by_stage and name not in reached]
    if missed:
        warn_caller(f"importance: is 0 for {', '.join(missed)}, on which no loss depends")
    return means, sentences


def _weighed(attention: Attention, stages: Collection[str]) -> list[str]:
    return [stage for stage in attention.heads if stage in stages]


def _gradients(
    attentions: Sequence[Attention],
    batch: Batch,
    loss: Callable[[Batch], Tensor],
    sentences: int,
    stages: Collection[str],
) -> dict[tuple[str, str], Tensor]:
    """Return dL(x) / d xi_h for every sentence x of a batch and every head h.

    The result is by the name of the attention and the stage, each [B, H] in float64 on the CPU,
    without those on which the loss does not depend. Each sentence has a gate of its own, which
    affects only that sentence's loss.
    """
    gates: list[Weight] = []
    for attention in attentions:
        for stage in _weighed(attention, stages):
            gates.append(Weight(attention, stage, sentences))
    with torch.enable_grad(), opened(gate.open() for gate in gates):
        value = loss(batch)
        _check_loss(value)

        ones = {(gate.name, gate.stage): gate.ones for gate in gates if gate.ones is not None}
        if not ones:
            raise none_passed("importance", missed_gates(gates))
        if not value.requires_grad:
            raise HeadsError(
                "importance: the loss has no gradient, it must not be detached or under no_grad or "
                "inference_mode"
            )
        gradients = torch.autograd.grad(value, list(ones.values()), allow_unused=True)

    if all(gradient is None for gradient in gradients):
        raise HeadsError("importance: the loss does not depend on any head")
    by_gate = {}
    for key, gradient in zip(ones, gradients):
        if gradient is not None:
            # [sentences, 1, heads, 1] or [sentences, heads, 1] -> [sentences, heads]
            by_gate[key] = gradient.double().flatten(1).cpu()
    return by_gate


def _check_loss(value: Any) -> None:
    """Raise HeadsError if what a loss returned is not one number in a tensor."""
    if not isinstance(value, Tensor):
        raise HeadsError(
            f"importance: the loss returned a {type(value).__name__}, must return a tensor of one "
            "number"
        )
    if value.numel() != 1:
        raise HeadsError(
            f"importance: the loss returned a tensor of shape {list(value.shape)}, must return one "
            "number, the sum over the sentences"
        )


def importance_by_layer(
    model: nn.Module,
    attentions: Sequence[Attention],
    batches: Iterable[Any],
    loss: Callable[[Any, Any], Tensor],
) -> dict[int, Tensor]:
    """Return the importance of every mixed head by layer, each [H'] in float64.

    Args:
        model: the model, which is put into evaluation mode meanwhile
        attentions: those of the model, in its order
        batches: what `loss` takes: mappings, sequences or tensors; the first dimension of their
            first tensor counts sentences
        loss: takes the model and a batch, and returns the sum of the losses of its sentences

    Raises:
        HeadsError: as `importance`; one batch in place of several, a batch without a tensor, or a
            loss that is no function
        RuntimeError: as `importance`
    """
    # A loop over one batch would take its sentences, or the names in it, for batches.
    if isinstance(batches, (Mapping, Tensor, str)) or not isinstance(batches, Iterable):
        raise HeadsError(wrong_argument("batches", batches, "several batches, as [batch]"))
    if not callable(loss):
        raise HeadsError(wrong_argument("loss", loss, "a function of the model and a batch"))
    with evaluating(model):
        numbers, _ = importance(
            attentions, batches, lambda batch: loss(model, batch), sentences_of, stages=["mixed"]
        )
    return by_layer(numbers)


def sentences_of(batch: Any) -> int:
    """Return the first dimension of the first tensor of a batch that has one."""
    entries: Iterable[Any] = [batch]
    if isinstance(batch, Mapping):
        entries = batch.values()
    elif isinstance(batch, (list, tuple)):
        entries = batch
    for entry in entries:
        if isinstance(entry, Tensor) and entry.dim() > 0:
            return entry.size(0)
    raise HeadsError(
        f"batches: one is a {type(batch).__name__} without a tensor, must have one whose first "
        "dimension counts its sentences"
    )


def by_layer(numbers: HeadNumbers) -> dict[int, Tensor]:
    """Return the numbers of mixed heads by the number of their attention in the model."""
    return {layer: by_stage["mixed"] for layer, by_stage in enumerate(numbers.values())}


def normalized_by_layer(weights: HeadNumbers) -> HeadNumbers:
    """Divide the importances of each attention and stage by their l2 norm; zeros stay.

    Michel et al. 2019, section 4.1.

    Args:
        weights: the importance of each head
    """
    normalized: HeadNumbers = {}
    for name, by_stage in weights.items():
        normalized[name] = {}
        for stage, numbers in by_stage.items():
            norm = numbers.norm()
            normalized[name][stage] = numbers / norm if norm > 0 else numbers
    return normalized


# How heads of different attentions are compared.
NORMALIZATIONS: dict[str, Callable[[HeadNumbers], HeadNumbers]] = {
    "none": lambda weights: weights,
    "layer": normalized_by_layer,
}
