"""A number for each head of a model: as heat maps, as text, and in JSON files and back."""

import json
from typing import Any, Dict, List, Mapping

import torch
from matplotlib.figure import Figure
from torch import nn

from mixhead_plugin.analysis import figures
from mixhead_plugin.analysis.attentions import by_place, where
from mixhead_plugin.analysis.heads import KINDS, kinds
from mixhead_plugin.analysis.weighing import HeadNumbers
from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.pruning import number_of_heads

SIDE_BY_SIDE = 12  # heads at most where panels of several places share a row


def heat_maps(model: nn.Module, values: HeadNumbers, label: str, worse: str = "") -> Figure:
    """Layer by head, a column of panels for each place and a row for each kind of head, all in one scale of colours.

    With many heads the panels are wide: then a row for each place and a column for each kind.

    Args:
        model: whose heads they are
        values: by attention and kind; attentions that are not in it stay out
        label: what the numbers are, with their unit
        worse: "high" or "low" if the numbers are changes, white for none and red for the worse; empty for amounts
    """
    sites = {
        site: [name for _, name in sorted(layers.items()) if name in values] for site, layers in by_place(model).items()
    }
    sites = {site: names for site, names in sites.items() if names}
    shown = [kind for kind in KINDS if any(kind in by_kind for by_kind in values.values())]
    numbers = torch.cat([w for by_kind in values.values() for w in by_kind.values()])
    low, high = float(numbers.min()), float(numbers.max())
    if worse:
        high = max(-low, high, 1e-9)
        low = -high
    heads = max(len(w) for by_kind in values.values() for w in by_kind.values())
    layers = max(map(len, sites.values()))
    narrowest = 2.6 if len(sites) > 1 else 3.3  # wide enough for its title beside the colour bar
    size = (min(max(1.4 + 0.2 * heads, narrowest), 6.0), min(max(1.1 + 0.25 * layers, 1.7), 6.0))
    with figures.style():
        if heads > SIDE_BY_SIDE and len(sites) > 1:
            figure, axes = figures.subplots(len(sites), len(shown), size)
            rows = axes.T  # [kinds, places]
        else:
            figure, axes = figures.subplots(len(shown), len(sites), size)
            rows = axes
        for row, kind in zip(rows, shown):
            for panel, (site, names) in zip(row, sites.items()):
                present = [values[name][kind] for name in names if kind in values[name]]
                if not present:
                    panel.axis("off")
                    continue
                of_place = {name: values[name] for name in names}
                title = site if len(shown) == 1 else f"{site}, {kind_title(of_place, kind)}"
                image = figures.heat_map(
                    panel,
                    figures.ragged([w.tolist() for w in present]),
                    low=low,
                    high=high,
                    diverging=bool(worse),
                    title=title,
                    xlabel="head",
                    ylabel="layer",
                )
                if worse == "low":
                    image.set_cmap("RdBu")
        figure.colorbar(image, ax=axes.ravel().tolist())
        figure.suptitle(label, fontsize=10)  # beside the colours of one low row it would be cut off
    return figure


def kind_title(values: HeadNumbers, kind: str) -> str:
    """What the heads of one kind are called; just heads where no heads mix."""
    return KINDS[kind] if any("source" in by_kind for by_kind in values.values()) else "heads"


def table(values: HeadNumbers, form: str = "{:.3g}") -> str:
    """A line for each attention and kind."""
    lines = []
    for name, by_kind in values.items():
        for kind, numbers in by_kind.items():
            title = f"{where(name)}{', ' + KINDS[kind] if len(by_kind) > 1 else ''}"
            lines.append(f"  {title:30s} " + " ".join(f"{form.format(x):>8s}" for x in numbers.tolist()))
    return "\n".join(lines)


def as_json(values: HeadNumbers) -> List[Dict[str, Any]]:
    """What `from_json` takes, one entry for each attention."""
    return [
        {
            "name": name,
            "place": where(name).site,
            "layer": where(name).layer,
            **{kind: numbers.tolist() for kind, numbers in by_kind.items()},
        }
        for name, by_kind in values.items()
    ]


def from_json(entries: Any, found: Mapping[str, MixheadAttention]) -> HeadNumbers:
    """The numbers that `as_json` wrote, for the attentions `found`, [H] float64; entries of others are left out.

    Raises:
        ValueError: says what does not fit
    """
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and isinstance(e.get("name"), str) for e in entries
    ):
        raise ValueError("has no list of attentions with their names")
    by_name = {entry["name"]: entry for entry in entries}
    values: HeadNumbers = {}
    for name, attention in found.items():
        if name not in by_name:
            raise ValueError(f"says nothing of {name}")
        values[name] = {}
        for kind in kinds(attention):
            numbers = by_name[name].get(kind)
            heads = number_of_heads(attention, kind)
            if not isinstance(numbers, list) or not all(isinstance(x, (int, float)) for x in numbers):
                raise ValueError(f"has no numbers of the {KINDS[kind]} of {name}")
            if len(numbers) != heads:
                raise ValueError(f"has {len(numbers)} {KINDS[kind]} of {name}, this model {heads}")
            values[name][kind] = torch.tensor(numbers, dtype=torch.float64)
    return values


def read_importance(file: str, found: Mapping[str, MixheadAttention]) -> HeadNumbers:
    """The importances that the command `importance` wrote, of the first of its sets.

    Raises:
        OptionError: no such file, or it is of another model
    """
    try:
        with open(file, encoding="utf-8") as opened:
            content = json.load(opened)
        return from_json(content["sets"][0]["attentions"], found)
    except OSError as error:
        raise OptionError(f"--importance {file}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise OptionError(f"--importance {file}: is not what the command importance writes") from error
    except ValueError as error:
        raise OptionError(f"--importance {file}: {error}") from error
