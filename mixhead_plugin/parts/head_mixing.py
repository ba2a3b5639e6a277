"""Define the matrices that mix heads.

Each value of --head-mixing and of --score-mixing is one row of a table.

M[..., j, i] is the weight of source head j in mixed head i. There are as many mixed heads, H', as
source heads, H, unless pruning removed some or heads mix in groups. The modules need torch alone.

Mixhead A is the post-softmax projection of talking-heads attention (Shazeer et al. 2020), score
mixing the pre-softmax one. Mixhead B has a forerunner in the dynamic projections of
mesh-tensorflow's talking-heads code.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixhead_plugin.ops.low_rank import LowRank
from mixhead_plugin.ops.precision import finer_matmul, upcast
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, Part, PartKind
from mixhead_plugin.parts.random_numbers import forked_rng


class HeadMixing(Part):
    """Compute M, whose entry M[..., j, i] is the weight of source head j in mixed head i.

    The same classes compute the matrix of --score-mixing, by which scores mix as weights do by M.

    `forward(query, x)` takes the projected, unscaled query [B, H, Nq, D] and the attention's query
    input [B, Nq, C]. It returns [H, H'] for all positions, or [B, Nq, H, H'], or a `LowRank` with
    the factors of such a matrix.
    """


def _random_start(heads: int, mixed_heads: int) -> Tensor:
    with forked_rng():
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


def _initial_matrix(mixing_start: str, matrix: Tensor) -> Tensor:
    """Return what M starts as, of the shape [H, H'] of `matrix`."""
    start = MIXING_STARTS[mixing_start]
    heads, mixed_heads = matrix.shape
    return start(heads, mixed_heads)


class PositionIndependentMixing(HeadMixing):
    """Train one M for all positions (mixhead eq. 12).

    Args:
        sizes: the sizes of the attention
        mixing_start: what M starts as, a key of MIXING_STARTS (section 3.2)
    """

    def __init__(self, sizes: AttentionSizes, mixing_start: str = "identity"):
        super().__init__()
        self.mixing_start = mixing_start
        self.weight = nn.Parameter(torch.empty(sizes.num_heads, sizes.mixed_heads))  # [H, H']
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(_initial_matrix(self.mixing_start, self.weight))

    def identity(self) -> dict[str, Tensor]:
        return {"weight": torch.eye(*self.weight.shape)}

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        return self.weight  # [H, H']


class PositionWiseMixing(HeadMixing):
    """Compute M_t[j, i] = q_{t,j} . W[:, i] + b[j, i] (mixhead section 3.1); W starts as 0.

    W [D, H'] is `query_weight`, and b [H, H'] is `bias`.

    Args:
        sizes: the sizes of the attention
        mixing_start: what b starts as, a key of MIXING_STARTS (section 3.2)
    """

    def __init__(self, sizes: AttentionSizes, mixing_start: str = "identity"):
        super().__init__()
        self.mixing_start = mixing_start
        self.query_weight = nn.Parameter(torch.empty(sizes.head_dim, sizes.mixed_heads))  # [D, H']
        self.bias = nn.Parameter(torch.empty(sizes.num_heads, sizes.mixed_heads))  # [H, H']
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.query_weight.zero_()
            self.bias.copy_(_initial_matrix(self.mixing_start, self.bias))

    def identity(self) -> dict[str, Tensor]:
        return {
            "query_weight": torch.zeros(self.query_weight.shape),
            "bias": torch.eye(*self.bias.shape),
        }

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        return finer_matmul(query.transpose(1, 2), self.query_weight) + self.bias  # [B, Nq, H, H']


class LowRankMixing(HeadMixing):
    """Compute the factors of M_t = I + U_t V_t^T + diag(tanh(x_t W_g)).

    This is one branch of Dynamically Composable Multi-Head Attention (DCMHA, 2024): the query-wise
    one after the softmax.

    U_t and V_t, [H, R], are parts of gelu(x_t W_1) W_2; U_t is divided by sqrt(1e-6 + its mean
    square over the heads). W_1 has 2 R H columns, as in DCMHA's code for one branch. V_t and W_g
    start as 0, so M starts as I.

        hidden_weight      W_1                        [C, 2 R H]
        left_weight        the columns of W_2 for U   [2 R H, H R]
        right_weight       the columns of W_2 for V   [2 R H, H R]
        diagonal_weight    W_g                        [C, H]

    Args:
        sizes: the sizes of the attention
        mixing_rank: R
    """

    def __init__(self, sizes: AttentionSizes, mixing_rank: int = 2):
        super().__init__()
        self.rank = mixing_rank
        heads = sizes.num_heads
        hidden = 2 * mixing_rank * heads
        self.hidden_weight = nn.Parameter(torch.empty(sizes.embed_dim, hidden))
        self.left_weight = nn.Parameter(torch.empty(hidden, heads * mixing_rank))
        self.right_weight = nn.Parameter(torch.empty(hidden, heads * mixing_rank))
        self.diagonal_weight = nn.Parameter(torch.empty(sizes.embed_dim, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad(), forked_rng():
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
        hidden = F.gelu(finer_matmul(x, self.hidden_weight))  # [B, Nq, 2 R H]

        left = upcast(finer_matmul(hidden, self.left_weight))
        left = left.unflatten(-1, [-1, self.rank])  # U, [B, Nq, H, R]
        left = left * torch.rsqrt(left.square().mean(-2, keepdim=True) + 1e-6)

        right = upcast(finer_matmul(hidden, self.right_weight))
        right = right.unflatten(-1, [-1, self.rank])  # V, [B, Nq, H, R]

        diagonal = torch.tanh(upcast(finer_matmul(x, self.diagonal_weight)))  # [B, Nq, H]
        return LowRank(left, right, diagonal)


class DifferentialMixing(HeadMixing):
    """Let mixed head i have the weights P_i - sigmoid(x_t w_i) P_{i + H / 2}, at position t.

    This is Differential Transformer V2. It starts with w = 0, so the factor starts at 0.5. M is
    [H, H / 2], and a mixed head's values have twice the head size.

    It has no `identity`, because no w gives the outputs of an attention without it.
    """

    def __init__(self, sizes: AttentionSizes):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes.embed_dim, sizes.mixed_heads))  # [C, H / 2]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, query: Tensor, x: Tensor) -> Tensor:
        share = torch.sigmoid(finer_matmul(x, self.weight))  # [B, Nq, H / 2]

        # The first H / 2 rows of M take each head i once, the others subtract head i + H / 2.
        first = torch.eye(share.size(-1), dtype=share.dtype, device=share.device)
        first = first.expand(share.size(0), share.size(1), -1, -1)
        second = -torch.diag_embed(share)  # [B, Nq, H / 2, H / 2]
        return torch.cat([first, second], dim=-2)


class FrozenMixing(HeadMixing):
    """Keep a constant M (ablations of mixhead table 7).

    It is a buffer, so checkpoints contain it, and no optimizer changes it.

    Args:
        sizes: the sizes of the attention
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


def _draw_columns(heads: int, mixed_heads: int) -> Tensor:
    """Draw normal entries, each column scaled to sum to 1 (after mixhead section 4.4.2).

    The paper's entries are normal and fixed, and it says no more. Two changes: columns are scaled,
    as in the authors' code, so that a mixed row of weights sums to 1 as a row of softmax does; and
    columns whose sum is near 0 are drawn again, which is ours.
    """
    # A column sum near 0, within a tenth of its deviation, would make large entries.
    near_0 = 0.1 * heads**0.5
    with forked_rng():
        # On the CPU: the loop looks at values, which the device `meta` does not have.
        matrix = torch.randn(heads, mixed_heads, dtype=torch.float64, device="cpu")
        small = matrix.sum(0).abs() < near_0
        while small.any():
            columns = int(small.sum())
            matrix[:, small] = torch.randn(heads, columns, dtype=torch.float64, device="cpu")
            small = matrix.sum(0).abs() < near_0
    return (matrix / matrix.sum(0)).float()


_MATRIX = (Axis(0, "source"), Axis(1, "mixed"))  # M [H, H']
_NOT_MIXED = PartKind(build=None, formula="identity, not computed", source="", parameters={})

HEAD_MIXINGS = {
    "none": _NOT_MIXED,
    "position-independent": PartKind(
        build=PositionIndependentMixing,
        formula="one [H, H] matrix per attention",
        source="Mixhead A, mixhead eq. 12; talking heads, 2020",
        parameters={"weight": _MATRIX},
        orthogonal=True,
        options=("mixing_start",),
    ),
    "position-wise": PartKind(
        build=PositionWiseMixing,
        formula="M_t[j, i] = q_{t,j} . W[:, i] + b[j, i]",
        source="Mixhead B, mixhead section 3.1",
        parameters={"query_weight": (Axis(1, "mixed"),), "bias": _MATRIX},
        orthogonal=True,
        options=("mixing_start",),
        reads="query",
    ),
    "low-rank": PartKind(
        build=LowRankMixing,
        formula="M_t = I + U_t V_t^T + diag(tanh(x_t W_g)), U_t and V_t [H, R]",
        source="DCMHA 2024, the query-wise branch after the softmax",
        # No dimensions go by heads, because none can be cut off.
        parameters={
            "hidden_weight": (),
            "left_weight": (),
            "right_weight": (),
            "diagonal_weight": (),
        },
        options=("mixing_rank",),
        orthogonal=True,
        reads="input",
        why_not_cut="U is divided by its root mean square over all heads",
    ),
    "differential": PartKind(
        build=DifferentialMixing,
        formula="Pbar_i = P_i - sigmoid(x_t w_i) P_{i + H/2}, values of size 2D",
        source="Differential Transformer V2",
        parameters={"weight": ()},
        loads_without=False,
        reads="input",
        heads_per_mixed=2,
        why_not_cut="its source heads come in pairs",
    ),
    "random": PartKind(
        build=partial(FrozenMixing, start=_draw_columns),
        formula="normal, columns scaled to sum to 1, frozen",
        source="ablation, mixhead section 4.4.2; the scale is that of the authors' code",
        parameters={"weight": _MATRIX},
        frozen=True,
    ),
    "average": PartKind(
        # Each mixed head is the mean head, mixhead section 4.4.2.
        build=partial(FrozenMixing, start=_uniform_start),
        formula="1 / H, frozen",
        source="ablation, mixhead section 4.4",
        parameters={"weight": _MATRIX},
        frozen=True,
    ),
}

# What the paper calls two of them; a message explains the letters to whoever asks for one.
LETTERS = {"A": "position-independent", "B": "position-wise"}

# L mixes scores as M mixes weights. Head j of queries and keys then feeds every head of weights, so
# no head of queries can be removed alone.
_FEEDS_ALL = "each of its query and key heads feeds the scores of all"

SCORE_MIXINGS = {
    "none": _NOT_MIXED,
    "position-independent": PartKind(
        build=PositionIndependentMixing,
        formula="Sbar_i = sum_j L[j, i] S_j, before masks and biases",
        source="talking heads, 2020",
        parameters={"weight": ()},
        why_not_cut=_FEEDS_ALL,
    ),
    "position-wise": PartKind(
        build=PositionWiseMixing,
        formula="the same, L_t[j, i] = q_{t,j} . W[:, i] + b[j, i]",
        source="mesh-tensorflow's dynamic projections, 2020",
        parameters={"query_weight": (), "bias": ()},
        reads="query",
        why_not_cut=_FEEDS_ALL,
    ),
}
