"""List the heads of a model, mask some of them, and show a number for each."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.analysis import figures
from mixhead_plugin.analysis.attentions import by_site, where
from mixhead_plugin.modules.attention import HeadGates, MixheadAttention
from mixhead_plugin.modules.pruning import KeptHeads, mask, number_of_heads

KINDS = {"source": "source heads", "mixed": "mixed heads"}
# By attention, then by kind of head: one number for each head, [H].
HeadNumbers = dict[str, dict[str, Tensor]]


class Head(NamedTuple):
    """One head of one attention."""

    attention: str
    kind: str  # a key of KINDS; always "mixed" where heads do not mix
    index: int


def kinds(attention: MixheadAttention) -> tuple[str, ...]:
    return tuple(KINDS) if attention.head_mixing is not None else ("mixed",)


def all_heads(attentions: Mapping[str, MixheadAttention]) -> list[Head]:
    return [
        Head(name, kind, index)
        for name, attention in attentions.items()
        for kind in kinds(attention)
        for index in range(number_of_heads(attention, kind))
    ]


def kept_heads(attentions: Mapping[str, MixheadAttention], removed: Collection[Head]) -> dict[str, KeptHeads]:
    """Return the heads of every attention that are not in `removed`."""
    kept = {}
    for name, attention in attentions.items():
        by_kind = {
            kind: tuple(i for i in range(number_of_heads(attention, kind)) if Head(name, kind, i) not in removed)
            for kind in kinds(attention)
        }
        kept[name] = KeptHeads(by_kind.get("source", by_kind["mixed"]), by_kind["mixed"])
    return kept


@contextmanager
def gated(attentions: Mapping[str, MixheadAttention], gates: Mapping[str, HeadGates]) -> Iterator[None]:
    """Give the attentions these gates, by name, within the context."""
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
    """Mask the heads `removed` within the context."""
    kept = kept_heads(attentions, removed)
    with gated(attentions, {name: mask(attention, kept[name]) for name, attention in attentions.items()}):
        yield


def points(values: HeadNumbers, kind: str, site: str | None = None) -> Tensor:
    """Return the numbers of all heads of a kind, at one site or everywhere, [heads]."""
    chosen = [w[kind] for name, w in values.items() if kind in w and (not site or where(name).site == site)]
    return torch.cat(chosen) if chosen else torch.empty(0)


def shown_kinds(values: HeadNumbers) -> dict[str, str]:
    """Return the kinds of heads in `values` with their titles: 'heads' alone if no heads mix."""
    if not any("source" in by_kind for by_kind in values.values()):
        return {"mixed": "heads"}
    return KINDS


def table(values: HeadNumbers, form: str = ".3g") -> str:
    lines = []
    for name, by_kind in values.items():
        for kind, numbers in by_kind.items():
            title = f"{where(name)}, {KINDS[kind]}" if len(by_kind) > 1 else str(where(name))
            lines.append(f"  {title:30s} " + " ".join(f"{format(x, form):>8s}" for x in numbers.tolist()))
    return "\n".join(lines)


def as_json(values: HeadNumbers) -> list[dict[str, Any]]:
    return [{"name": n, "place": where(n).site, "layer": where(n).layer, **by_kind} for n, by_kind in values.items()]


def heat_maps(values: HeadNumbers, label: str, colours: str = figures.SEQUENTIAL) -> Any:
    """Draw `values`, layer by head: a row of panels for each site, and a column for each kind of head."""
    sites = {site: [values[name] for name in names] for site, names in by_site(values).items()}
    kinds = shown_kinds(values)
    panels: list[list[tuple[str, Any] | None]] = []
    for site, layers in sites.items():
        title = KINDS["mixed"] if any("source" in layer for layer in layers) else "heads"
        titles = {**KINDS, "mixed": title}
        matrices = {kind: [layer[kind].tolist() for layer in layers if kind in layer] for kind in kinds}
        panels.append([(f"{site}, {titles[kind]}", m) if m else None for kind, m in matrices.items()])
    heads = max(len(w) for by_kind in values.values() for w in by_kind.values())
    narrowest = 2.6 if len(kinds) > 1 else 3.3  # wide enough for the title beside the colour bar
    width = min(max(1.4 + 0.2 * heads, narrowest), 4.5)
    height = min(max(1.1 + 0.25 * max(map(len, sites.values())), 1.7), 6.0)
    with figures.style():
        figure = figures.heat_maps(panels, (width, height), "", colours, xlabel="head", ylabel="layer")
        figure.suptitle(label, fontsize=10)  # as a label of the colour bar, one row of panels would cut it off
    return figure
