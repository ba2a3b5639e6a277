"""Pictures of the matrices M that mix the heads."""

from typing import Any

import torch

from mixhead_plugin.heads import figures
from mixhead_plugin.heads.mixing_statistics import LayerMixing

PANELS_IN_A_ROW = 8


def draw_matrices(sites: dict[str, list[LayerMixing]], spread: bool = False) -> Any:
    """Draw M - I, or the spread of M, of each layer.

    A site has a row of panels for eight of its layers.

    Args:
        sites: the mixings of the layers, by site
        spread: whether to draw the standard deviation of M over the tokens, which only an M has
            that depends on the position
    """
    panels: list[list[tuple[str, Any] | None]] = []
    rectangular = False
    for layers in sites.values():
        for start in range(0, len(layers), PANELS_IN_A_ROW):
            row = layers[start : start + PANELS_IN_A_ROW]
            panels.append([_panel(layer, spread) for layer in row])
        rectangular = rectangular or not all(map(_is_square, layers))

    if spread:
        label = "standard deviation of M[j, i] over tokens"
    elif rectangular:
        label = "(M - I)[j, i]; M[j, i] where the title says M"
    else:
        label = "(M - I)[j, i]"
    return figures.heat_maps(
        panels,
        (2.0, 2.3),
        label,
        figures.SEQUENTIAL if spread else "PuOr",
        square=True,
        xlabel="mixed head i",
        ylabel="source head j",
    )


def _is_square(layer: LayerMixing) -> bool:
    sources, mixed = layer.mixing.shape
    return sources == mixed


def _panel(layer: LayerMixing, spread: bool) -> tuple[str, Any]:
    title = f"{layer.site} {layer.layer}"
    if spread:
        assert layer.spread is not None  # M depends on the position
        return title, layer.spread.tolist()
    if not _is_square(layer):
        return f"{title}: M", layer.mixing.tolist()
    return title, (layer.mixing - torch.eye(len(layer.mixing))).tolist()
