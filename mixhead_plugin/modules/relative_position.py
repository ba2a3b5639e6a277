"""How an attention comes to know how far a key lies from its query: every relative position once.

Query t stands at the place of key t + (Nk - Nq), as in step-by-step decoding, where the cache has the keys before it.
"""

import math
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor, nn

from mixhead_plugin.ops.reference import upcast
from mixhead_plugin.ops.relative import RelativeScores


class RotaryPosition(nn.Module):
    """Turns each pair of features (d, d + D / 2) of queries and keys by an angle that grows with the place (RoPE).

    Su et al. 2021, 'RoFormer', eq. 34: products of turned vectors depend on the distance alone.
    """

    def __init__(self, num_heads: int, head_dim: int, causal: bool):
        super().__init__()
        if head_dim % 2 != 0:
            raise ValueError(f"rotary positions turn pairs of features, and the head size {head_dim} is odd")
        self.head_dim = head_dim
        self.log_ratio = -2.0 * math.log(10000.0) / head_dim  # from the speed of one pair to the next one's

    def forward(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor, Optional[RelativeScores]]:
        """Queries [B, H, Nq, D] and keys [B, H, Nk, D], turned; what is added to the scores"""
        n_keys, dtype = k.size(2), upcast(k).dtype
        speed = torch.exp(torch.arange(self.head_dim // 2, dtype=dtype, device=k.device) * self.log_ratio)
        angles = torch.arange(n_keys, dtype=dtype, device=k.device)[:, None] * speed  # [Nk, D / 2]
        return self._turn(q, angles[n_keys - q.size(2) :]), self._turn(k, angles), None

    def _turn(self, x: Tensor, angles: Tensor) -> Tensor:
        cos, sin = angles.cos(), angles.sin()
        first, second = upcast(x).chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class BucketedBias(nn.Module):
    """A learned number for each head and distance, added to the score; far distances share one (T5).

    Raffel et al. 2020, section 2.1: half of the buckets are a distance each, the other half grow with its logarithm up
    to 128, beyond which all is one. T5 shares them among its layers; here each attention has its own. They start at 0,
    which only where all inputs are the same is a place that l2 weights cannot leave by gradients.
    """

    def __init__(self, num_heads: int, head_dim: int, causal: bool):
        super().__init__()
        self.causal = causal
        self.num_buckets, self.farthest = 32, 128  # as in T5
        self.weight = nn.Parameter(torch.zeros(self.num_buckets, num_heads))  # [buckets, H]

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """A checkpoint without biases has biases of 0."""
        state_dict.setdefault(f"{name}.weight", torch.zeros(self.weight.shape))

    def forward(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor, Optional[RelativeScores]]:
        """Queries [B, H, Nq, D] and keys [B, H, Nk, D]; what is added to the scores"""
        n_queries, n_keys = q.size(2), k.size(2)
        offsets = torch.arange(n_queries + n_keys - 1, device=k.device) - (n_keys - 1)  # key - query, [P]
        bias = self.weight.to(q.dtype)[self.buckets(offsets)]  # [P, H]
        ones = torch.ones([1, 1, 1, 1], dtype=q.dtype, device=q.device)
        return q, k, RelativeScores(ones.expand(q.size(0), q.size(1), n_queries, 1), bias.t()[:, :, None])

    def buckets(self, offsets: Tensor) -> Tensor:
        """The bucket of each offset of a key from its query, int64 of any shape"""
        buckets, base = self.num_buckets, torch.zeros_like(offsets)
        distances = -offsets
        if self.causal:
            distances = distances.clamp(min=0)
        else:  # half of them for the keys that follow
            buckets = buckets // 2
            base = base + (offsets > 0).to(offsets.dtype) * buckets
            distances = distances.abs()
        exact = buckets // 2
        growth = (buckets - exact) / math.log(self.farthest / exact)
        far = exact + (torch.log(distances.clamp(min=1).float() / exact) * growth).to(offsets.dtype)
        return base + torch.where(distances < exact, distances, far.clamp(max=buckets - 1))


class RelativePositionKind(NamedTuple):
    """One entry of the flag ``--relative-position``."""

    build: Optional[Callable[[int, int, bool], nn.Module]]  # number of heads, head size, whether causal
    formula: str
    source: str


RELATIVE_POSITIONS = {
    "none": RelativePositionKind(None, "", ""),
    "rotary": RelativePositionKind(
        RotaryPosition, "queries and keys turned by angles that grow with their place", "Su et al. 2021, RoPE"
    ),
    "t5": RelativePositionKind(
        BucketedBias, "s + a learned number for each head and bucket of distances", "Raffel et al. 2020, section 2.1"
    ),
}


class DistanceGain(nn.Module):
    """c_{i-j} of the weights A * C, one number for each head and distance up to a limit, beyond which all is one.

    l2 essay, 'Preliminary Solution' (after Luo et al. 2022); starts as 1 everywhere, which changes nothing.
    """

    def __init__(self, num_heads: int, clip: int):
        super().__init__()
        self.clip = clip
        self.weight = nn.Parameter(torch.ones(num_heads, 2 * clip + 1))  # [H, distances]

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """A checkpoint without gains has gains of 1."""
        state_dict.setdefault(f"{name}.weight", torch.ones(self.weight.shape))

    def forward(self, n_queries: int, n_keys: int) -> Tensor:
        """The gain of `ops.attention`, [H, Nq + Nk - 1]"""
        offsets = torch.arange(n_queries + n_keys - 1, device=self.weight.device) - (n_keys - 1)  # key - query
        return self.weight[:, offsets.clamp(-self.clip, self.clip) + self.clip]
