"""A number for each head of a model: as a table, as JSON and as a picture."""

from typing import Any

import torch
from torch import Tensor

from mixhead_plugin.heads import figures
from mixhead_plugin.heads.attention import STAGES, HeadNumbers
from mixhead_plugin.heads.sites import by_site, where


def points(values: HeadNumbers, stage: str, site: str | None = None) -> Tensor:
    """Return the numbers of all heads of a stage, at one site or everywhere, [heads]."""
    chosen = []
    for name, by_stage in values.items():
        if stage in by_stage and site in (None, where(name).site):
            chosen.append(by_stage[stage])
    return torch.cat(chosen) if chosen else torch.empty(0)


def shown_stages(values: HeadNumbers) -> dict[str, str]:
    """Return the stages in `values` with their titles: 'heads' alone if no heads mix."""
    if not any("source" in by_stage for by_stage in values.values()):
        return {"mixed": "heads"}
    return STAGES


def table(values: HeadNumbers, form: str = ".3g") -> str:
    """Return a line for each attention and stage; `form` is the format of a number."""
    lines = []
    for name, by_stage in values.items():
        for stage, numbers in by_stage.items():
            title = str(where(name))
            if len(by_stage) > 1:
                title += f", {STAGES[stage]}"
            cells = " ".join(f"{format(number, form):>8s}" for number in numbers.tolist())
            lines.append(f"  {title:30s} {cells}")
    return "\n".join(lines)


def as_json(values: HeadNumbers) -> list[dict[str, Any]]:
    entries = []
    for name, by_stage in values.items():
        site, layer = where(name)
        entries.append({"name": name, "place": site, "layer": layer, **by_stage})
    return entries


def heat_maps(values: HeadNumbers, label: str, colours: str = figures.SEQUENTIAL) -> Any:
    """Draw `values`, layer by head: a row of panels for each site, and a column for each stage."""
    stages = shown_stages(values)
    panels: list[list[tuple[str, Any] | None]] = []
    most_layers = 0
    for site, names in by_site(values).items():
        most_layers = max(most_layers, len(names))
        mixes = any("source" in values[name] for name in names)
        row: list[tuple[str, Any] | None] = []
        for stage in stages:
            matrix = [values[name][stage].tolist() for name in names if stage in values[name]]
            title = f"{site}, {STAGES[stage] if mixes else 'heads'}"
            row.append((title, matrix) if matrix else None)
        panels.append(row)

    most_heads = max(len(w) for by_stage in values.values() for w in by_stage.values())
    narrowest = 2.6 if len(stages) > 1 else 3.3  # wide enough for the title beside the colour bar
    width = min(max(1.4 + 0.2 * most_heads, narrowest), 4.5)
    height = min(max(1.1 + 0.25 * most_layers, 1.7), 6.0)
    with figures.style():
        figure = figures.heat_maps(
            panels, (width, height), "", colours, xlabel="head", ylabel="layer"
        )
        # as a label of the colour bar, one row of panels would cut it off
        figure.suptitle(label, fontsize=10)
    return figure
