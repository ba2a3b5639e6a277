"""The matrices M that mix the heads: distances and pictures (mixhead section 3).

The distances are those from the identity and from orthogonality.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.heads import figures
from mixhead_plugin.heads.sites import where

PANELS_IN_A_ROW = 8


def distances(mixing: Tensor) -> Tensor:
    """Return ||M - I|| and ||M^T M - I||, [..., 2], of matrices M [..., H, H'].

    The first is NaN if M is not square.
    """
    sources, mixed = mixing.shape[-2:]
    eye = torch.eye(mixed).to(mixing)
    orthogonal = torch.linalg.matrix_norm(mixing.transpose(-2, -1) @ mixing - eye)
    if sources == mixed:
        identity = torch.linalg.matrix_norm(mixing - eye)
    else:
        identity = torch.full_like(orthogonal, math.nan)
    return torch.stack([identity, orthogonal], -1)


class LayerMixing(NamedTuple):
    """The mixing of one attention, as in mixing.json.

    Where M depends on the position, the numbers are means over the tokens.
    """

    place: str  # its site
    layer: int
    head_mixing: str
    mixing: Tensor  # [H, H']
    from_identity: float
    from_orthogonal: float
    tokens: int | None = None
    spread: Tensor | None = None  # standard deviation of M over the tokens, [H, H']


class MixingSums:
    """Sums over the tokens of one attention, whose M depends on the position."""

    def __init__(self) -> None:
        self.tokens = 0
        self.mixing: Tensor | float = 0.0
        self.squares: Tensor | float = 0.0
        self.distances: Tensor | float = 0.0

    def add(self, mixing: Tensor) -> None:
        """Add the M of some tokens, [tokens, H, H']."""
        mixing = mixing.double().cpu()
        self.tokens += len(mixing)
        self.mixing = self.mixing + mixing.sum(0)
        self.squares = self.squares + mixing.square().sum(0)
        self.distances = self.distances + distances(mixing).sum(0)

    def means(self, name: str, head_mixing: str) -> LayerMixing:
        """Return the means over the tokens of the attention `name`."""
        mean = torch.as_tensor(self.mixing / self.tokens)
        variance = torch.as_tensor(self.squares / self.tokens) - mean.square()
        spread = variance.clamp(min=0).sqrt()
        far = torch.as_tensor(self.distances / self.tokens)  # [2]
        site, layer = where(name)
        return LayerMixing(
            place=site,
            layer=layer,
            head_mixing=head_mixing,
            mixing=mean,
            from_identity=float(far[0]),
            from_orthogonal=float(far[1]),
            tokens=self.tokens,
            spread=spread,
        )


def of_matrix(name: str, head_mixing: str, mixing: Tensor) -> LayerMixing:
    """Return the mixing of the attention `name`, which has one M [H, H'] for all positions."""
    mixing = mixing.detach().double().cpu()
    from_identity, from_orthogonal = distances(mixing).tolist()
    return LayerMixing(*where(name), head_mixing, mixing, from_identity, from_orthogonal)


def draw_matrices(sites: dict[str, list[LayerMixing]], spread: bool = False) -> Any:
    """Draw M - I, or the spread of M, of each layer.

    A site has a row of panels for eight of its layers.
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
    title = f"{layer.place} {layer.layer}"
    if spread:
        assert layer.spread is not None  # M depends on the position
        return title, layer.spread.tolist()
    if not _is_square(layer):
        return f"{title}: M", layer.mixing.tolist()
    return title, (layer.mixing - torch.eye(len(layer.mixing))).tolist()
