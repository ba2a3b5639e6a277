"""Leave heads out while a block lasts."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from mixhead_plugin.errors import warn_caller
from mixhead_plugin.heads.attention import Attention, HeadNumbers
from mixhead_plugin.heads.choosing import Head, all_heads, by_attention, choose
from mixhead_plugin.heads.gates import Silence, missed_gates, none_passed, opened


class Experiment(NamedTuple):
    """A way to leave heads out, which is tried for each head of a model in turn.

    Attributes:
        words: what is scored, as 'the model without this head'
        removed: takes a head and all heads of the model, and returns those that are left out
    """

    words: str
    removed: Callable[[Head, Sequence[Head]], list[Head]]


def _itself(head: Head, heads: Sequence[Head]) -> list[Head]:
    return [head]


def _others_beside_it(head: Head, heads: Sequence[Head]) -> list[Head]:
    """Return the other heads of its attention, in its stage."""
    return [
        other
        for other in heads
        if other.attention == head.attention
        and other.stage == head.stage
        and other.number != head.number
    ]


# The sixteen-heads essay, figures 3 and 5.
EXPERIMENTS = {
    "single": Experiment("without this head", _itself),
    "only": Experiment("with this head alone in its attention", _others_beside_it),
}


@contextlib.contextmanager
def without(attentions: Sequence[Attention], removed: Iterable[Head]) -> Iterator[None]:
    """Make the heads `removed` 0 within the context, in this thread.

    The outputs are those after pruning.

    Args:
        attentions: those of the model, in its order
        removed: the heads to leave out

    Raises:
        RuntimeError: at the end, if no call passed any of their attentions; a warning names single
            ones
    """
    named = {attention.name: attention for attention in attentions}
    gates: list[Silence] = []
    for name, by_stage in by_attention(removed).items():
        for stage, some in by_stage.items():
            gates.append(Silence(named[name], stage, some))
    with opened(gate.open() for gate in gates):
        yield

    missed = missed_gates(gates)
    if not missed:
        return
    if not any(gate.calls for gate in gates):
        raise none_passed("ablate", missed)
    warn_caller(f"ablate: had no effect on {', '.join(missed)}, which no call passed")


def ablate(
    attentions: Sequence[Attention], heads: Mapping[int | str, Iterable[int]]
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the outputs of some mixed heads are 0, for calls in this thread.

    Args:
        attentions: those of the model, in its order
        heads: numbers of heads by layer; a layer is the number of an attention, from 0, or its name

    Raises:
        HeadsError: at once, a layer or a head that does not exist
        RuntimeError: as `without`
    """
    chosen = choose(attentions, heads)
    removed = []
    for layer, some in chosen.items():
        for number in some:
            removed.append(Head(attentions[layer].name, "mixed", number))
    return without(attentions, removed)


def ablations(
    attentions: Sequence[Attention],
    experiment: str,
    score: Callable[[], dict[str, float]],
    progress: Callable[[list[Head]], Iterable[Head]] = list,
) -> dict[str, HeadNumbers]:
    """Return the scores of an experiment on each head, by metric.

    Args:
        attentions: those of the model
        experiment: a key of EXPERIMENTS
        score: scores the model once, by metric
        progress: a function around the list of heads, as `tqdm` is one
    """
    removed_with = EXPERIMENTS[experiment].removed
    heads = all_heads(attentions)
    # by metric, attention and stage; the heads of a stage come by their number
    measured: dict[str, dict[str, dict[str, list[float]]]] = {}
    for head in progress(heads):
        with without(attentions, removed_with(head, heads)):
            scores = score()
        for metric, value in scores.items():
            by_stage = measured.setdefault(metric, {}).setdefault(head.attention, {})
            by_stage.setdefault(head.stage, []).append(value)
    return {metric: _as_tensors(numbers) for metric, numbers in measured.items()}


def _as_tensors(numbers: Mapping[str, Mapping[str, Sequence[float]]]) -> HeadNumbers:
    """Return the numbers of the heads, by attention and stage, as tensors."""
    tensors = {}
    for attention, by_stage in numbers.items():
        tensors[attention] = {
            stage: torch.tensor(values, dtype=torch.float64) for stage, values in by_stage.items()
        }
    return tensors
