"""A number for each head of a model: as a table, as JSON and as a picture."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mixhead_plugin.heads.attention import STAGES, HeadNumbers
from mixhead_plugin.heads.sites import by_site, where


def points(values: HeadNumbers, stage: str, site: str | None = None) -> Tensor:
    """Return the numbers of all heads of a stage, [heads].

    Args:
        values: a number for each head
        stage: a key of STAGES
        site: where the attentions are, as in `sites`; None for everywhere
    """
    chosen = []
    for name, by_stage in values.items():
        is_there = site is None or where(name).site == site
        if is_there and stage in by_stage:
            chosen.append(by_stage[stage])
    return torch.cat(chosen) if chosen else torch.empty(0)


def shown_stages(values: HeadNumbers) -> dict[str, str]:
    """Return the stages in `values` with their titles: 'heads' alone if no heads mix."""
    for by_stage in values.values():
        if "source" in by_stage:
            return STAGES
    return {"mixed": "heads"}


def table(values: HeadNumbers, form: str = ".3g") -> str:
    """Return a line for each attention and stage; `form` is the format of a number."""
    lines = []
    for name, by_stage in values.items():
        for stage, numbers in by_stage.items():
            title = str(where(name))
            if len(by_stage) > 1:
                title += f", {STAGES[stage]}"
            line = f"  {title:30s}"
            for number in numbers.tolist():
                line += f" {format(number, form):>8s}"
            lines.append(line)
    return "\n".join(lines)


def as_json(values: HeadNumbers) -> list[dict[str, Any]]:
    """Return what a JSON file has of each attention, where its site is called its place."""
    entries = []
    for name, by_stage in values.items():
        site, layer = where(name)
        entries.append({"name": name, "place": site, "layer": layer, **by_stage})
    return entries


def heat_maps(values: HeadNumbers, label: str, colour_map: str | None = None) -> Any:
    """Draw `values`, layer by head: a row of panels for each site, and a column for each stage.

    Args:
        values: a number for each head
        label: what the numbers are
        colour_map: as in `figures.heat_maps`; None for its default
    """
    from mixhead_plugin.heads import figures  # needs numpy, which no other function here does

    stages = shown_stages(values)
    panels = [_row(values, site, names, stages) for site, names in by_site(values).items()]

    most_layers = max(len(names) for names in by_site(values).values())
    most_heads = 0
    for by_stage in values.values():
        # Of source heads alone, an attention that does not mix has no numbers.
        for numbers in by_stage.values():
            most_heads = max(most_heads, len(numbers))
    narrowest = 2.6 if len(stages) > 1 else 3.3  # wide enough for the title beside the colour bar
    width = min(max(1.4 + 0.2 * most_heads, narrowest), 4.5)
    height = min(max(1.1 + 0.25 * most_layers, 1.7), 6.0)

    with figures.style():
        figure = figures.heat_maps(
            panels,
            (width, height),
            "",
            colour_map or figures.SEQUENTIAL,
            xlabel="head",
            ylabel="layer",
        )
        # as a label of the colour bar, one row of panels would cut it off
        figure.suptitle(label, fontsize=10)
    return figure


def _row(
    values: HeadNumbers, site: str, names: Sequence[str], stages: Mapping[str, str]
) -> list[tuple[str, Any] | None]:
    """Return the title and the matrix of each stage at a site; None where it has none."""
    mixes = any("source" in values[name] for name in names)
    row: list[tuple[str, Any] | None] = []
    for stage in stages:
        matrix = [values[name][stage].tolist() for name in names if stage in values[name]]
        heads = STAGES[stage] if mixes else "heads"
        row.append((f"{site}, {heads}", matrix) if matrix else None)
    return row
