"""Single heads: which there are, a model without some of them, and what is left when they are gone."""

from contextlib import contextmanager
from typing import Collection, Dict, Iterator, List, Mapping, NamedTuple, Tuple

from mixhead_plugin.modules.attention import HeadGates, MixheadAttention
from mixhead_plugin.modules.pruning import KeptHeads, mask, number_of_heads

KINDS = {"source": "source heads", "mixed": "mixed heads"}


class Head(NamedTuple):
    """One head of one attention."""

    attention: str
    kind: str  # a key of KINDS; "mixed" where heads do not mix: a head is then what it gives
    index: int


def kinds(attention: MixheadAttention) -> Tuple[str, ...]:
    """The kinds of heads that `attention` has and that can be taken away one by one."""
    return tuple(KINDS) if attention.head_mixing is not None else ("mixed",)


def all_heads(attentions: Mapping[str, MixheadAttention]) -> List[Head]:
    return [
        Head(name, kind, index)
        for name, attention in attentions.items()
        for kind in kinds(attention)
        for index in range(number_of_heads(attention, kind))
    ]


def kept_heads(attentions: Mapping[str, MixheadAttention], removed: Collection[Head]) -> Dict[str, KeptHeads]:
    """What stays of every attention when the heads `removed` are gone; an attention may lose all."""
    gone = set(removed)
    kept = {}
    for name, attention in attentions.items():
        left = {
            kind: tuple(i for i in range(number_of_heads(attention, kind)) if Head(name, kind, i) not in gone)
            for kind in kinds(attention)
        }
        kept[name] = KeptHeads(left.get("source", left["mixed"]), left["mixed"])
    return kept


@contextmanager
def gated(attentions: Mapping[str, MixheadAttention], gates: Mapping[str, HeadGates]) -> Iterator[None]:
    """The attentions with these gates, by name; afterwards with those that they had."""
    before = {name: attention.gates for name, attention in attentions.items()}
    try:
        for name, attention in attentions.items():
            attention.gates = gates[name]
        yield
    finally:
        for name, attention in attentions.items():
            attention.gates = before[name]


@contextmanager
def without(attentions: Mapping[str, MixheadAttention], removed: Collection[Head]) -> Iterator[None]:
    """The attentions as if the heads `removed` were cut off."""
    kept = kept_heads(attentions, removed)
    with gated(attentions, {name: mask(attention, kept[name]) for name, attention in attentions.items()}):
        yield
