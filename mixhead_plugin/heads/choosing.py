"""Name heads of a model, and choose which of them go."""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.errors import wrong_argument
from mixhead_plugin.heads.attention import STAGES, Attention, HeadNumbers, HeadsError


class Head(NamedTuple):
    """One head of one attention.

    Attributes:
        attention: the name of its attention in the model
        stage: a key of STAGES; always "mixed" where heads do not mix
        number: which head it is, from 0
    """

    attention: str
    stage: str
    number: int


def all_heads(attentions: Iterable[Attention]) -> list[Head]:
    """Return the heads of all stages, in the order of the model.

    Args:
        attentions: those of the model, in its order
    """
    heads = []
    for attention in attentions:
        for stage, total in attention.heads.items():
            heads += [Head(attention.name, stage, number) for number in range(total)]
    return heads


def choose(
    attentions: Sequence[Attention], heads: Mapping[int | str, Iterable[int]]
) -> dict[int, list[int]]:
    """Return chosen mixed heads by the number of their layer.

    Args:
        attentions: those of the model, in its order
        heads: numbers of heads by layer; a layer is the number of an attention, from 0, or its name

    Raises:
        HeadsError: a layer or a head that does not exist, or heads that are no whole numbers
    """
    if not isinstance(heads, Mapping):
        wanted = "a dict of layers and numbers of their heads, as {0: [1, 3]}"
        raise HeadsError(wrong_argument("heads", heads, wanted))
    names = [attention.name for attention in attentions]
    indices_of: dict[int, list[int]] = {}
    for layer, some in heads.items():
        number = _number_of(layer, names)
        if not isinstance(number, int) or not 0 <= number < len(attentions):
            wanted = f"from 0 to {len(attentions) - 1}, or a name such as {names[0]}"
            raise HeadsError(f"layer {number!r}: must be {wanted}")
        total = attentions[number].heads["mixed"]
        indices = _numbers_of_heads(some, layer, total)
        indices_of[number] = sorted(indices.union(indices_of.get(number, ())))
    return indices_of


def _numbers_of_heads(heads: Any, layer: int | str, total: int) -> set[int]:
    """Return numbers of heads as ints of Python, whatever library they are of.

    Args:
        heads: those that are chosen
        layer: the layer of the heads, as the user calls it
        total: how many heads there are

    Raises:
        HeadsError: no list, or one with something else than the number of a head
    """
    try:
        chosen = list(heads)
    except TypeError:  # not `Iterable`, because a tensor of one number is one, too
        raise HeadsError(
            f"heads {heads!r} of layer {layer}: must be a list of numbers, as [0]"
        ) from None
    numbers = set()
    for head in map(_as_int, chosen):
        if type(head) is not int or head not in range(total):
            raise HeadsError(
                f"head {head!r} of layer {layer}: must be a whole number from 0 to {total - 1}"
            )
        numbers.add(head)
    return numbers


def _number_of(layer: Any, names: Sequence[str]) -> Any:
    """Return the number of a layer as an int of Python, whatever library it is of.

    Anything that names no layer is returned unchanged, so that the caller can refuse it.
    """
    if isinstance(layer, str):
        return names.index(layer) if layer in names else layer
    return _as_int(layer)


def _as_int(value: Any) -> Any:
    """Return a whole number as an int of Python; anything else unchanged.

    True and False are unchanged, too. Python takes them for 1 and 0, so a mask, which says for each
    head whether it goes, would choose heads 1 and 0.
    """
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def least_important(weights: HeadNumbers, fraction: float, at_least: int = 1) -> list[Head]:
    """Return the least important heads of each stage.

    Args:
        weights: the importance of each head
        fraction: which share of the heads of a stage to return, from 0 to 1
        at_least: how many heads of each stage stay in each attention, the most important ones
    """
    chosen: list[Head] = []
    for stage in STAGES:
        number = 0
        going: list[Head] = []
        for name, by_stage in weights.items():
            if stage not in by_stage:
                continue
            number += len(by_stage[stage])
            order = by_stage[stage].argsort(stable=True).tolist()
            for index in order[: max(0, len(order) - at_least)]:
                going.append(Head(name, stage, index))
        going.sort(key=lambda head: float(weights[head.attention][head.stage][head.number]))
        chosen += going[: round(fraction * number)]
    return chosen


class KeptHeads(NamedTuple):
    """The heads of one attention that stay, ascending; without mixing both are the same."""

    source: tuple[int, ...]
    mixed: tuple[int, ...]


def kept_by(attention: Attention, removed: Mapping[str, Collection[int]]) -> KeptHeads:
    """Return the heads of an attention that stay without those that are removed, by stage."""
    kept = {}
    for stage, number in attention.heads.items():
        gone = removed.get(stage, ())
        kept[stage] = tuple(head for head in range(number) if head not in gone)
    return KeptHeads(kept.get("source", kept["mixed"]), kept["mixed"])


def by_attention(heads: Iterable[Head]) -> dict[str, dict[str, list[int]]]:
    """Return the numbers of heads by the name of their attention and by stage."""
    numbers_of: dict[str, dict[str, list[int]]] = {}
    for head in heads:
        numbers_of.setdefault(head.attention, {}).setdefault(head.stage, []).append(head.number)
    return numbers_of
