"""Define the matrices that mix heads.

Each value of --head-mixing and of --score-mixing is one row of a table.

M[..., j, i] is the weight of source head j in mixed head i. There are as many mixed heads, H', as
source heads, H, unless pruning removed some or heads mix in groups. The modules need torch alone.

Mixhead A is the post-softmax projection of talking-heads attention (Shazeer et al. 2020), score
mixing the pre-softmax one. Mixhead B has a forerunner in the dynamic projections of
mesh-tensorflow's talking-heads code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixhead_plugin.ops.low_rank import LowRank
from mixhead_plugin.ops.precision import upcast
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, Part, PartKind


class HeadMixing(Part):
    """Compute M, whose entry M[..., j, i] is the weight of source head j in mixed head i.

    `forward(query, x)` takes the projected, unscaled query [B, H, Nq, D] and the attention's query
    input [B, Nq, C]. It returns [H, H'] for all positions, or [B, Nq, H, H'], or a `LowRank` with
    the factors of such a matrix.
    """


@contextmanager
def own_numbers() -> Iterator[None]:
    """Let parts draw random numbers that leave those of all other weights as they are.

    With a seed, the projections of a model with the part then start as those of the model without
    it, because the generator is put back afterwards:

        generator of the CPU    q k v | seed, put back | q k v of the next attention
        part                          seed, a b c

    Two attentions that are built one after the other draw different numbers, because their
    projections have moved the generator in between.

    Parts must draw on the CPU. The generators of other devices are not touched.
    """
    with torch.random.fork_rng(devices=[]):
        seed = int(torch.randint(2**62, (), device="cpu"))
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed the GPUs, too
        yield


def _random_start(heads: int, mixed_heads: int) -> Tensor:
    with own_numbers():
        # On the CPU also for other devices, so that a seed means the same M everywhere.
        return torch.randn(heads, mixed_heads, device="cpu") * heads**-0.5


def _uniform_start(heads: int, mixed_heads: int) -> Tensor:
    return torch.full((heads, mixed_heads), 1 / heads)


# What M [H, H'] starts as, by the value of --mixing-start. The paper compares the three (section
# 3.2), but does not say how wide its random and uniform numbers are. Here `random` keeps the size
# of a mixed head, because the squares in a column sum to about 1; `uniform` makes each mixed head
# the mean head, as section 4.4.2 uses the word.
MIXING_STARTS: dict[str, Callable[[int, int], Tensor]] = {
    "identity": torch.eye,
    "random": _random_start,
    "uniform": _uniform_start,
}


class PositionIndependentMixing(HeadMixing):
    """Train one M for all positions (mixhead eq. 12).

    Args:
        sizes: of the attention
        mixing_start: what M starts as, a key of MIXING_STARTS (section 3.2)
    """

    def __init__(self, sizes: AttentionSizes, mixing_start: str = "identity"):
        super().__init__()
        self.start = mixing_start
        self.weight = nn.Parameter(torch.empty(sizes.num_heads, sizes.mixed_heads))  # [H, H']
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(MIXING_STARTS[self.start](*self.weight.shape))

    def identity(self) -> dict[str, Tensor]:
        return {"weight": torch.eye(*self.weight.shape)}

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        return self.weight  # [H, H']


class PositionWiseMixing(HeadMixing):
    """Compute M_t[j, i] = q_{t,j} . W[:, i] + b[j, i] (mixhead section 3.1); W starts as 0.

    Args:
        sizes: of the attention
        mixing_start: what b starts as, a key of MIXING_STARTS (section 3.2)
    """

    def __init__(self, sizes: AttentionSizes, mixing_start: str = "identity"):
        super().__init__()
        self.start = mixing_start
        self.query_weight = nn.Parameter(torch.empty(sizes.head_dim, sizes.mixed_heads))  # [D, H']
        self.bias = nn.Parameter(torch.empty(sizes.num_heads, sizes.mixed_heads))  # [H, H']
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.query_weight.zero_()
            self.bias.copy_(MIXING_STARTS[self.start](*self.bias.shape))

    def identity(self) -> dict[str, Tensor]:
        return {
            "query_weight": torch.zeros(self.query_weight.shape),
            "bias": torch.eye(*self.bias.shape),
        }

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        return torch.matmul(query.transpose(1, 2), self.query_weight) + self.bias  # [B, Nq, H, H']


class LowRankMixing(HeadMixing):
    """Compute the factors of M_t = I + U_t V_t^T + diag(tanh(x_t W_g)).

    This is the query-wise branch of DCMHA after the softmax.

    U_t and V_t, [H, R], are parts of gelu(x_t W_1) W_2; U_t is divided by sqrt(1e-6 + its mean
    square over the heads). W_1 has 2 R H columns, as in DCMHA's code for one branch. V_t and W_g
    start as 0, so M starts as I.

    Args:
        sizes: of the attention
        mixing_rank: R
    """

    def __init__(self, sizes: AttentionSizes, mixing_rank: int = 2):
        super().__init__()
        self.rank = mixing_rank
        heads = sizes.num_heads
        hidden = 2 * mixing_rank * heads
        self.hidden_weight = nn.Parameter(torch.empty(sizes.embed_dim, hidden))  # W_1
        self.left_weight = nn.Parameter(torch.empty(hidden, heads * mixing_rank))  # W_2 of U
        self.right_weight = nn.Parameter(torch.empty(hidden, heads * mixing_rank))  # W_2 of V
        self.diagonal_weight = nn.Parameter(torch.empty(sizes.embed_dim, heads))  # W_g
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad(), own_numbers():
            for weight in (self.hidden_weight, self.left_weight):
                weight.copy_(torch.randn(weight.shape, device="cpu") * weight.size(0) ** -0.5)
            self.right_weight.zero_()
            self.diagonal_weight.zero_()

    def identity(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros(self.get_parameter(name).shape)
            for name in ("right_weight", "diagonal_weight")
        }

    def forward(self, query: Tensor, x: Tensor) -> LowRank:
        hidden = F.gelu(torch.matmul(x, self.hidden_weight))  # [B, Nq, 2 R H]

        left = upcast(torch.matmul(hidden, self.left_weight))
        left = left.unflatten(-1, [-1, self.rank])  # U, [B, Nq, H, R]
        left = left * torch.rsqrt(left.square().mean(-2, keepdim=True) + 1e-6)

        right = upcast(torch.matmul(hidden, self.right_weight))
        right = right.unflatten(-1, [-1, self.rank])  # V, [B, Nq, H, R]

        diagonal = torch.tanh(upcast(torch.matmul(x, self.diagonal_weight)))  # [B, Nq, H]
        return LowRank(left, right, diagonal)


class DifferentialMixing(HeadMixing):
    """Subtract head i + H / 2 from head i, times sigmoid(x_t w_i) (Differential Transformer V2).

    It starts with w = 0, so the factor starts at 0.5. M is [H, H / 2], and a mixed head's values
    have twice the head size.
    """

    def __init__(self, sizes: AttentionSizes):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes.embed_dim, sizes.mixed_heads))  # [C, H / 2]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        share = torch.sigmoid(torch.matmul(x, self.weight))  # [B, Nq, H / 2]

        # The first H / 2 rows of M take each head i once, the others subtract head i + H / 2.
        first = torch.eye(share.size(-1), dtype=share.dtype, device=share.device)
        first = first.expand(share.size(0), share.size(1), -1, -1)
        second = -torch.diag_embed(share)  # [B, Nq, H / 2, H / 2]
        return torch.cat([first, second], dim=-2)


class FrozenMixing(HeadMixing):
    """Keep a constant M (ablations of mixhead table 7).

    It is a buffer, so checkpoints contain it, and no optimizer changes it.

    Args:
        sizes: of the attention
        start: maps H and H' to M [H, H']
    """

    def __init__(self, sizes: AttentionSizes, start: Callable[[int, int], Tensor]):
        super().__init__()
        self.start = start
        self.weight = nn.Buffer(torch.empty(sizes.num_heads, sizes.mixed_heads))  # [H, H']
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.weight.copy_(self.start(*self.weight.shape))

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        return self.weight  # [H, H']


def _normal_columns(heads: int, mixed_heads: int) -> Tensor:
    """Return normal entries, each column scaled to sum to 1 (after mixhead section 4.4.2).

    The paper's entries are normal and fixed, and it says no more. Two changes: columns are scaled,
    as in the authors' code, so that a mixed row of weights sums to 1 as a row of softmax does; and
    columns whose sum is near 0 are drawn again, which is ours.
    """
    # A column sum near 0, within a tenth of its deviation, would make large entries.
    near_0 = 0.1 * heads**0.5
    with own_numbers():
        # On the CPU: the loop looks at values, which the device `meta` does not have.
        matrix = torch.randn(heads, mixed_heads, dtype=torch.float64, device="cpu")
        small = matrix.sum(0).abs() < near_0
        while small.any():
            columns = int(small.sum())
            matrix[:, small] = torch.randn(heads, columns, dtype=torch.float64, device="cpu")
            small = matrix.sum(0).abs() < near_0
    return (matrix / matrix.sum(0)).float()


_MATRIX = (Axis(0, "source"), Axis(1, "mixed"))  # M [H, H']
_UNMIXED = PartKind(None, "identity, not computed", "", {})

HEAD_MIXINGS = {
    "none": _UNMIXED,
    "position-independent": PartKind(
        PositionIndependentMixing,
        "one [H, H] matrix per attention",
        "Mixhead A, mixhead eq. 12; talking heads, 2020",
        {"weight": _MATRIX},
        orthogonal=True,
        options=("mixing_start",),
    ),
    "position-wise": PartKind(
        PositionWiseMixing,
        "M_t[j, i] = q_{t,j} . W[:, i] + b[j, i]",
        "Mixhead B, mixhead section 3.1",
        {"query_weight": (Axis(1, "mixed"),), "bias": _MATRIX},
        orthogonal=True,
        options=("mixing_start",),
        reads="query",
    ),
    "low-rank": PartKind(
        LowRankMixing,
        "M_t = I + U_t V_t^T + diag(tanh(x_t W_g)), U_t and V_t [H, R]",
        "DCMHA 2024, the query-wise branch after the softmax",
        dict.fromkeys(("hidden_weight", "left_weight", "right_weight", "diagonal_weight"), ()),
        options=("mixing_rank",),
        orthogonal=True,
        reads="input",
        uncut="U is divided by its root mean square over all heads",
    ),
    "differential": PartKind(
        DifferentialMixing,
        "Pbar_i = P_i - sigmoid(x_t w_i) P_{i + H/2}, values of size 2D",
        "Differential Transformer V2",
        {"weight": ()},
        loads_without=False,
        reads="input",
        heads_per_mixed=2,
        uncut="its source heads come in pairs",
    ),
    "random": PartKind(
        partial(FrozenMixing, start=_normal_columns),
        "normal, columns scaled to sum to 1, frozen",
        "ablation, mixhead section 4.4.2; it scales columns in its code alone, and redraws none",
        {"weight": _MATRIX},
        frozen=True,
    ),
    "average": PartKind(
        # each mixed head is the mean head, mixhead section 4.4.2
        partial(FrozenMixing, start=_uniform_start),
        "1 / H, frozen",
        "ablation, mixhead section 4.4",
        {"weight": _MATRIX},
        frozen=True,
    ),
}

# L mixes scores as M mixes weights. Head j of queries and keys then feeds every head of weights.
_UNCUT = "each of its query and key heads feeds the scores of all"

SCORE_MIXINGS = {
    "none": _UNMIXED,
    "position-independent": PartKind(
        PositionIndependentMixing,
        "Sbar_i = sum_j L[j, i] S_j, before masks and biases",
        "talking heads, 2020",
        {"weight": ()},
        uncut=_UNCUT,
    ),
    "position-wise": PartKind(
        PositionWiseMixing,
        "the same, L_t[j, i] = q_{t,j} . W[:, i] + b[j, i]",
        "mesh-tensorflow's dynamic projections, 2020",
        {"query_weight": (), "bias": ()},
        reads="query",
        uncut=_UNCUT,
    ),
}
