"""Define relative positions: each value of --relative-position is one row of RELATIVE_POSITIONS.

Query t is at the position of key t + (Nk - Nq), as in step-by-step decoding, where the cache has
the keys before it.
"""

import math

import torch
from torch import Tensor, nn

from mixhead_plugin.ops.precision import upcast
from mixhead_plugin.ops.relative import RelativeScores
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, Part, PartError, PartKind


class RotaryPosition(Part):
    """Rotate each pair of features (d, d + D / 2) of queries and keys by angles (RoPE).

    The angles grow with the position, so products of rotated vectors depend on the distance alone
    (Su et al. 2021, 'RoFormer', eq. 34).

    Args:
        sizes: the sizes of the attention

    Raises:
        PartError: an odd size of heads
    """

    def __init__(self, sizes: AttentionSizes):
        super().__init__()
        self.head_dim = sizes.head_dim
        if self.head_dim % 2 != 0:
            raise PartError.of(
                "relative_position", "rotary", f"needs an even head size, not {self.head_dim}"
            )
        # of the frequencies of two neighbouring pairs
        self.log_ratio = -2.0 * math.log(10000.0) / self.head_dim

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, RelativeScores | None]:
        """Return rotated queries [B, H, Nq, D] and keys [B, H, Nk, D].

        Nothing is added to the scores.
        """
        return self._rotate(q, k.size(2)), self._rotate(k, k.size(2)), None

    def _rotate(self, x: Tensor, end: int) -> Tensor:
        """Rotate features [B, H, N, D] of the N positions before `end`."""
        first, second = upcast(x).chunk(2, -1)  # [B, H, N, D / 2] each
        dtype = first.dtype

        pairs = torch.arange(self.head_dim // 2, dtype=dtype, device=x.device)
        frequency = torch.exp(pairs * self.log_ratio)  # [D / 2]
        positions = torch.arange(end - x.size(2), end, dtype=dtype, device=x.device)
        angles = positions[:, None] * frequency  # [N, D / 2]

        cos = angles.cos()
        sin = angles.sin()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.to(x.dtype)


def all_offsets(n_queries: int, n_keys: int, like: Tensor) -> Tensor:
    """Return the offsets of keys from queries, key - query, in ascending order: int64 [P].

    The first is that of the first key from the last query, -(n_keys - 1). There are
    P = n_queries + n_keys - 1 of them, on the device of `like`.
    """
    # Without queries and keys P would be -1.
    number = max(0, n_queries + n_keys - 1)
    return torch.arange(number, device=like.device) - (n_keys - 1)


class BucketedBias(Part):
    """Add a learned bias to the score, one for each head and bucket of distances (T5).

    Raffel et al. 2020, section 2.1: half of the buckets hold one distance each. The others grow
    with its logarithm up to 128, and the last one holds all larger distances. T5 shares biases
    among layers; here each attention has its own. Biases start at 0. With l2 weights and equal
    inputs everywhere, training could not move them from 0.
    """

    def __init__(self, sizes: AttentionSizes):
        super().__init__()
        self.causal = sizes.causal
        self.num_buckets = 32  # as in T5
        self.farthest = 128  # as in T5
        self.weight = nn.Parameter(torch.empty(self.num_buckets, sizes.num_heads))  # [buckets, H]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def identity(self) -> dict[str, Tensor]:
        return {"weight": torch.zeros(self.weight.shape)}

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, RelativeScores | None]:
        """Return queries and keys unchanged, and the biases to add to the scores.

        Queries are [B, H, Nq, D], keys [B, H, Nk, D].
        """
        n_queries = q.size(2)
        n_keys = k.size(2)
        offsets = all_offsets(n_queries, n_keys, k)
        bias = self.weight.to(q.dtype)[self.buckets(offsets)]  # [P, H]

        # As products of relative queries and keys of size 1, because every kernel adds those.
        ones = torch.ones([1, 1, 1, 1], dtype=q.dtype, device=q.device)
        queries = ones.expand(q.size(0), q.size(1), n_queries, 1)  # [B, H, Nq, 1]
        keys = bias.t()[:, :, None]  # [H, P, 1]
        return q, k, RelativeScores(queries, keys)

    def buckets(self, offsets: Tensor) -> Tensor:
        """Return the bucket of each offset, key - query; int64 of any shape."""
        buckets = self.num_buckets
        base = torch.zeros_like(offsets)
        distances = -offsets
        if self.causal:
            distances = distances.clamp(min=0)
        else:  # half of the buckets are for later keys
            buckets = buckets // 2
            base = base + (offsets > 0).to(offsets.dtype) * buckets
            distances = distances.abs()
        exact = buckets // 2
        growth = (buckets - exact) / math.log(self.farthest / exact)
        far = exact + (torch.log(distances.clamp(min=1).float() / exact) * growth).to(offsets.dtype)
        return base + torch.where(distances < exact, distances, far.clamp(max=buckets - 1))


RELATIVE_POSITIONS = {
    "none": PartKind(build=None, formula="", source="", parameters={}),
    "rotary": PartKind(
        build=RotaryPosition,
        formula="queries and keys turned by angles that grow with their position",
        source="Su et al. 2021, RoPE",
        parameters={},
        loads_without=False,
    ),
    "t5": PartKind(
        build=BucketedBias,
        formula="s + a learned number for each head and bucket of distances",
        source="Raffel et al. 2020, section 2.1",
        parameters={"weight": (Axis(1, "source"),)},
    ),
}


class DistanceGain(Part):
    """Multiply the weight of key j for query i by a learned c_{i-j}, in each head another one.

    All c start as 1 (l2 essay, 'Preliminary Solution', after Luo et al. 2022).

    Args:
        num_heads: H
        clip: the farthest distance, in tokens, that has a factor of its own; farther ones share it
    """

    def __init__(self, num_heads: int, clip: int):
        super().__init__()
        self.clip = clip
        self.weight = nn.Parameter(torch.empty(num_heads, 2 * clip + 1))  # [H, distances]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def identity(self) -> dict[str, Tensor]:
        return {"weight": torch.ones(self.weight.shape)}

    def forward(self, n_queries: int, n_keys: int) -> Tensor:
        """Return the gain of `ops.attention`, [H, Nq + Nk - 1]."""
        offsets = all_offsets(n_queries, n_keys, self.weight)
        return self.weight[:, offsets.clamp(-self.clip, self.clip) + self.clip]
