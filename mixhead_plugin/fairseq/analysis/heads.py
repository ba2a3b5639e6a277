"""Find the attentions of a model; list, see and mask their heads, and show a number for each."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.attention import HeadGates, Heads, MixheadAttention
from mixhead_plugin.fairseq.options import SCOPES
from mixhead_plugin.heads import figures

SITES = SCOPES["all"]
KINDS = {"source": "source heads", "mixed": "mixed heads"}
# By attention, then by kind of head: one number for each head, [H].
HeadNumbers = dict[str, dict[str, Tensor]]


class Where(NamedTuple):
    """The position of an attention in its model."""

    site: str  # one of SITES
    layer: int  # from 0, as in the names of the parameters

    def __str__(self) -> str:
        return f"{self.site} {self.layer}"


def attentions(model: nn.Module) -> dict[str, MixheadAttention]:
    """Return the plugin's attentions in `model` by name; refuse a model without one."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MixheadAttention)
    }
    if not found:
        raise OptionError(f"model {type(model).__name__}: has no attention of mixhead_plugin")
    return found


def where(name: str) -> Where:
    """Return the position of the attention `name`, such as 'decoder.layers.3.encoder_attn'."""
    layer = re.search(r"\blayers\.(\d+)\b", name)
    parts = name.split(".")
    side = "decoder-self" if "decoder" in parts else "encoder-self"
    return Where("cross" if parts[-1] == "encoder_attn" else side, int(layer[1]))


def by_site(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names of attentions by site; the sites are in the order of SITES, the names in that of
    the layers.
    """
    sites: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (SITES.index(where(name).site), where(name).layer)):
        sites.setdefault(where(name).site, []).append(name)
    return sites


@contextmanager
def _with(
    attentions: Mapping[str, MixheadAttention], attribute: str, values: Mapping[str, Any]
) -> Iterator[None]:
    """Set an attribute of the attentions, by name, within the context."""
    before = {name: getattr(attention, attribute) for name, attention in attentions.items()}
    try:
        for name, attention in attentions.items():
            setattr(attention, attribute, values[name])
        yield
    finally:
        for name, attention in attentions.items():
            setattr(attention, attribute, before[name])


def hooked(
    model: nn.Module, see: Callable[[str, MixheadAttention, Heads], None]
) -> AbstractContextManager[None]:
    """Call `see(name, attention, heads)` in each forward pass of each attention, within the
    context.
    """

    def hook(name: str, attention: MixheadAttention, out: Tensor, heads: Heads) -> Tensor:
        see(name, attention, heads)
        return out

    found = attentions(model)
    return _with(found, "hook", {name: partial(hook, name) for name in found})


class KeptHeads(NamedTuple):
    """The heads of one attention that stay, ascending; without mixing both are the same."""

    source: tuple[int, ...]
    mixed: tuple[int, ...]


def number_of_heads(attention: MixheadAttention, kind: str) -> int:
    """Return the number of source or mixed heads; `kind` is a field of KeptHeads."""
    return attention.num_heads if kind == "source" else attention.num_mixed_heads


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


def kept_heads(
    attentions: Mapping[str, MixheadAttention], removed: Collection[Head]
) -> dict[str, KeptHeads]:
    """Return the heads of every attention that are not in `removed`."""

    def stay(name: str, attention: MixheadAttention, kind: str) -> tuple[int, ...]:
        of = kind if kind in kinds(attention) else "mixed"
        return tuple(
            i for i in range(number_of_heads(attention, kind)) if Head(name, of, i) not in removed
        )

    return {
        name: KeptHeads(*(stay(name, one, kind) for kind in KINDS))
        for name, one in attentions.items()
    }


def mask(attention: MixheadAttention, kept: KeptHeads) -> HeadGates:
    """Return gates that silence all heads but `kept`: the outputs are those after pruning."""
    gates = HeadGates()
    for kind in kinds(attention):
        stay, number = getattr(kept, kind), number_of_heads(attention, kind)
        if len(stay) < number:
            gate = next(attention.parameters()).new_zeros(number)
            gate[list(stay)] = 1
            gates = gates._replace(**{kind: gate})
    return gates


def gated(
    attentions: Mapping[str, MixheadAttention], gates: Mapping[str, HeadGates]
) -> AbstractContextManager[None]:
    """Give the attentions these gates, by name, within the context."""
    return _with(attentions, "gates", gates)


def without(
    attentions: Mapping[str, MixheadAttention], removed: Collection[Head]
) -> AbstractContextManager[None]:
    """Mask the heads `removed` within the context."""
    kept = kept_heads(attentions, removed)
    return gated(
        attentions, {name: mask(attention, kept[name]) for name, attention in attentions.items()}
    )


def points(values: HeadNumbers, kind: str, site: str | None = None) -> Tensor:
    """Return the numbers of all heads of a kind, at one site or everywhere, [heads]."""
    chosen = [
        w[kind]
        for name, w in values.items()
        if kind in w and (not site or where(name).site == site)
    ]
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
            lines.append(
                f"  {title:30s} " + " ".join(f"{format(x, form):>8s}" for x in numbers.tolist())
            )
    return "\n".join(lines)


def as_json(values: HeadNumbers) -> list[dict[str, Any]]:
    return [
        {"name": n, "place": where(n).site, "layer": where(n).layer, **by_kind}
        for n, by_kind in values.items()
    ]


def heat_maps(values: HeadNumbers, label: str, colours: str = figures.SEQUENTIAL) -> Any:
    """Draw `values`, layer by head: a row of panels for each site, and a column for each kind of
    head.
    """
    sites = {site: [values[name] for name in names] for site, names in by_site(values).items()}
    kinds = shown_kinds(values)
    panels: list[list[tuple[str, Any] | None]] = []
    for site, layers in sites.items():
        titles = KINDS if any("source" in layer for layer in layers) else {"mixed": "heads"}
        matrices = {
            kind: [layer[kind].tolist() for layer in layers if kind in layer] for kind in kinds
        }
        panels.append(
            [(f"{site}, {titles[kind]}", m) if m else None for kind, m in matrices.items()]
        )
    heads = max(len(w) for by_kind in values.values() for w in by_kind.values())
    narrowest = 2.6 if len(kinds) > 1 else 3.3  # wide enough for the title beside the colour bar
    width = min(max(1.4 + 0.2 * heads, narrowest), 4.5)
    height = min(max(1.1 + 0.25 * max(map(len, sites.values())), 1.7), 6.0)
    with figures.style():
        figure = figures.heat_maps(
            panels, (width, height), "", colours, xlabel="head", ylabel="layer"
        )
        # as a label of the colour bar, one row of panels would cut it off
        figure.suptitle(label, fontsize=10)
    return figure
