"""How far the matrices M that mix the heads are from the identity and from orthogonality.

mixhead section 3.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.heads.sites import where


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
    """The mixing of one attention.

    Where M depends on the position, the numbers are means over the tokens.
    """

    site: str  # one of SITES
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
            site=site,
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


def as_json(mixing: LayerMixing) -> dict[str, Any]:
    """Return what mixing.json has of an attention, where its site is called its place."""
    entry = {"place": mixing.site}
    for name, value in mixing._asdict().items():
        if name != "site" and value is not None:
            entry[name] = value
    return entry
