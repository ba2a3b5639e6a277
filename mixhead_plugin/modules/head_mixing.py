"""Where the mixing matrix M comes from: every head mixing once.

M[..., j, i] is the weight of source head j in mixed head i. There are as many mixed heads, H', as source heads, H,
unless some were cut off.
"""

from typing import Callable, Dict, NamedTuple, Optional

import torch
from torch import Tensor, nn


class HeadMixing(nn.Module):
    """What all head mixings share; called with the projected query [B, H, Nq, D], before scaling, they return M."""

    def identity(self) -> Dict[str, Tensor]:
        """The state in which the trained mixing does nothing; empty for a mixing that is not trained."""
        return {}

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """A checkpoint without mixing acts as the identity; one without this module's constants keeps them."""
        for key, value in {**self.state_dict(), **self.identity()}.items():
            state_dict.setdefault(f"{name}.{key}", value)


class PositionIndependentMixing(HeadMixing):
    """One trained M for all positions, Mixhead A (mixhead eq. 12); starts as the identity (section 3.2)."""

    def __init__(self, num_heads: int, head_dim: int, mixed_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(num_heads, mixed_heads))  # [H, H']

    def identity(self) -> Dict[str, Tensor]:
        return {"weight": torch.eye(*self.weight.shape)}

    def forward(self, query: Tensor) -> Tensor:
        return self.weight  # [H, H']


class PositionWiseMixing(HeadMixing):
    """M_t[j, i] = q_{t,j} . W[:, i] + B[j, i], Mixhead B (mixhead section 3.1).

    Starts with W = 0, B = I (section 3.2).
    """

    def __init__(self, num_heads: int, head_dim: int, mixed_heads: int):
        super().__init__()
        self.query_weight = nn.Parameter(torch.zeros(head_dim, mixed_heads))  # [D, H']
        self.bias = nn.Parameter(torch.eye(num_heads, mixed_heads))  # [H, H']

    def identity(self) -> Dict[str, Tensor]:
        return {"query_weight": torch.zeros(self.query_weight.shape), "bias": torch.eye(*self.bias.shape)}

    def forward(self, query: Tensor) -> Tensor:
        return torch.matmul(query.transpose(1, 2), self.query_weight) + self.bias  # [B, Nq, H, H']


class FrozenMixing(HeadMixing):
    """A constant M, the ablations of mixhead table 7; a buffer, so that a checkpoint keeps the matrix that acted."""

    def __init__(self, matrix: Tensor):
        super().__init__()
        self.register_buffer("weight", matrix)  # [H, H']

    def forward(self, query: Tensor) -> Tensor:
        return self.weight  # [H, H']


def random_mixing(num_heads: int, head_dim: int, mixed_heads: int) -> FrozenMixing:
    """Normal entries (mixhead section 4.4.2); columns scaled to sum to 1, like the heads' own rows under softmax."""
    matrix = torch.randn(num_heads, mixed_heads, dtype=torch.float64)
    # A column sum near 0, within a tenth of its deviation, would blow the column up: draw such columns again.
    while (small := matrix.sum(0).abs() < 0.1 * num_heads**0.5).any():
        matrix[:, small] = torch.randn(num_heads, int(small.sum()), dtype=torch.float64)
    return FrozenMixing((matrix / matrix.sum(0)).float())


def average_mixing(num_heads: int, head_dim: int, mixed_heads: int) -> FrozenMixing:
    """1 / H everywhere: all mixed heads are the mean head (mixhead section 4.4.2)."""
    return FrozenMixing(torch.full((num_heads, mixed_heads), 1 / num_heads))


class MixingKind(NamedTuple):
    """One entry of the flag ``--head-mixing``."""

    build: Optional[Callable[[int, int, int], HeadMixing]]  # source heads, head size, mixed heads
    trained: bool
    formula: str
    source: str
    reads_query: bool = False  # M differs between positions


HEAD_MIXINGS = {
    "none": MixingKind(None, False, "identity, not computed", ""),
    "position-independent": MixingKind(
        PositionIndependentMixing, True, "one [H, H] matrix per attention", "Mixhead A, mixhead eq. 12"
    ),
    "position-wise": MixingKind(
        PositionWiseMixing, True, "M_t[j, i] = q_{t,j} . W[:, i] + B[j, i]", "Mixhead B, mixhead section 3.1", True
    ),
    "random": MixingKind(
        random_mixing, False, "normal, columns scaled to sum to 1, frozen", "ablation, mixhead section 4.4"
    ),
    "average": MixingKind(average_mixing, False, "1 / H, frozen", "ablation, mixhead section 4.4"),
}
