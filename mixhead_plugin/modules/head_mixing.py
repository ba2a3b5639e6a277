"""Define the mixing matrix M: each value of --head-mixing is one row of HEAD_MIXINGS.

M[..., j, i] is the weight of source head j in mixed head i. The number of mixed heads, H', equals the number of source
heads, H, unless pruning removed some.

Mixhead A is the post-softmax projection of talking-heads attention (Shazeer et al. 2020). Position-wise mixing,
Mixhead B, has a forerunner in the dynamic projections of mesh-tensorflow's talking-heads code.
"""

from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from mixhead_plugin.modules.heads import Axis


class HeadMixing(nn.Module):
    """Map the projected, unscaled query [B, H, Nq, D] to M; base class of all head mixings."""

    def identity(self) -> Dict[str, Tensor]:
        """Return the state in which a trained mixing does nothing; empty for a frozen one."""
        return {}

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """Complete a checkpoint without mixing: a trained matrix becomes the identity, a frozen one stays."""
        for key, value in {**self.state_dict(), **self.identity()}.items():
            state_dict.setdefault(f"{name}.{key}", value)


class PositionIndependentMixing(HeadMixing):
    """Train one M for all positions (mixhead eq. 12); it starts as the identity (section 3.2)."""

    def __init__(self, num_heads: int, head_dim: int, mixed_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(num_heads, mixed_heads))  # [H, H']

    def identity(self) -> Dict[str, Tensor]:
        return {"weight": torch.eye(*self.weight.shape)}

    def forward(self, query: Tensor) -> Tensor:
        return self.weight  # [H, H']


class PositionWiseMixing(HeadMixing):
    """Compute M_t[j, i] = q_{t,j} . W[:, i] + B[j, i] (mixhead section 3.1); start with W = 0, B = I (section 3.2)."""

    def __init__(self, num_heads: int, head_dim: int, mixed_heads: int):
        super().__init__()
        self.query_weight = nn.Parameter(torch.zeros(head_dim, mixed_heads))  # [D, H']
        self.bias = nn.Parameter(torch.eye(num_heads, mixed_heads))  # [H, H']

    def identity(self) -> Dict[str, Tensor]:
        return {"query_weight": torch.zeros(self.query_weight.shape), "bias": torch.eye(*self.bias.shape)}

    def forward(self, query: Tensor) -> Tensor:
        return torch.matmul(query.transpose(1, 2), self.query_weight) + self.bias  # [B, Nq, H, H']


class FrozenMixing(HeadMixing):
    """Keep a constant M (ablations of mixhead table 7) in a buffer, so that checkpoints contain it."""

    def __init__(self, matrix: Tensor):
        super().__init__()
        self.register_buffer("weight", matrix)  # [H, H']

    def forward(self, query: Tensor) -> Tensor:
        return self.weight  # [H, H']


def random_mixing(num_heads: int, head_dim: int, mixed_heads: int) -> FrozenMixing:
    """Return normal entries (mixhead section 4.4.2); each column is scaled to sum to 1, as a softmax row does."""
    # Drawn on the CPU: the loop looks at values, which the device `meta` does not have.
    matrix = torch.randn(num_heads, mixed_heads, dtype=torch.float64, device="cpu")
    # A column sum near 0, within a tenth of its deviation, would make large entries: draw such columns again.
    while (small := matrix.sum(0).abs() < 0.1 * num_heads**0.5).any():
        matrix[:, small] = torch.randn(num_heads, int(small.sum()), dtype=torch.float64, device="cpu")
    return FrozenMixing((matrix / matrix.sum(0)).float().to(torch.get_default_device()))


def average_mixing(num_heads: int, head_dim: int, mixed_heads: int) -> FrozenMixing:
    """Return 1 / H everywhere: each mixed head is the mean head (mixhead section 4.4.2)."""
    return FrozenMixing(torch.full((num_heads, mixed_heads), 1 / num_heads))


class MixingKind(NamedTuple):
    """Describe one value of the flag --head-mixing."""

    build: Optional[Callable[[int, int, int], HeadMixing]]  # called with source heads, head size, mixed heads
    formula: str
    source: str
    parameters: Dict[str, Tuple[Axis, ...]]  # its parameters and buffers, and the dimensions that go by heads
    trained: bool = False
    reads_query: bool = False
    loads_without: bool = True  # whether a checkpoint trained without mixing loads


_MATRIX = (Axis(0, "source"), Axis(1, "mixed"))  # M [H, H']

HEAD_MIXINGS = {
    "none": MixingKind(None, "identity, not computed", "", {}),
    "position-independent": MixingKind(
        PositionIndependentMixing,
        "one [H, H] matrix per attention",
        "Mixhead A, mixhead eq. 12",
        {"weight": _MATRIX},
        trained=True,
    ),
    "position-wise": MixingKind(
        PositionWiseMixing,
        "M_t[j, i] = q_{t,j} . W[:, i] + B[j, i]",
        "Mixhead B, mixhead section 3.1",
        {"query_weight": (Axis(1, "mixed"),), "bias": _MATRIX},
        trained=True,
        reads_query=True,
    ),
    "random": MixingKind(
        random_mixing,
        "normal, columns scaled to sum to 1, frozen",
        "ablation, mixhead section 4.4",
        {"weight": _MATRIX},
    ),
    "average": MixingKind(average_mixing, "1 / H, frozen", "ablation, mixhead section 4.4", {"weight": _MATRIX}),
}
