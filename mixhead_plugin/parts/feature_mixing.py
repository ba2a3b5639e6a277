"""Define what mixes the features of heads.

Each value of --feature-mixing is one row of FEATURE_MIXINGS.

Features are the queries, keys, values or outputs of heads. A mixing is linear in them and no
position depends on another. So any kernel serves what is mixed, and a trained mixing folds into the
projections.

    FeatureMixing                  what attentions and penalties call; no parameters
    |-- ProjectionMixing           a matrix each for queries, keys and values: query, key, value
    |   |-- MixingOfHeads          A [H, H]: a head becomes a sum of heads
    |   '-- MixingInsideHeads      T [D, D]: a feature becomes a sum of features of its head
    '-- OutputMixing               left, right: U V^T on the outputs of heads
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixhead_plugin.ops.precision import finer_matmul
from mixhead_plugin.ops.transforms import exporting
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, Part, PartKind
from mixhead_plugin.parts.plain_linear import is_plain
from mixhead_plugin.parts.random_numbers import forked_rng

OUTPUT_RANK = 4  # R, the columns of U and V


class FeatureMixing(Part):
    """Mix queries, keys, values or outputs of heads; they start as they are.

    `forward(features, name)` returns the mixed features, in the dtype of `features`. Those of
    "query", "key" or "value" are [..., H * D], those of "output" [..., H', Dv]. What a kind does
    not mix stays.
    """

    def matrices(self) -> list[Tensor]:
        """Return every matrix that multiplies features, [H, H] or [D, D]."""
        raise NotImplementedError

    @torch.jit.unused
    def project(self, linear: Any, x: Tensor, name: str) -> Tensor:
        """Return the mixed features [..., H * D] of a projection of x [..., C].

        Args:
            linear: the projection
            x: its input
            name: "query", "key" or "value"
        """
        return self(linear(x), name)

    def fold(self, tensors: dict[str, list[Tensor]]) -> None:
        """Multiply the mixing into projections in place, in float64, and become the identity.

        Args:
            tensors: for "query", "key" and "value" the weight [H * D, C] and, where there is one,
                the bias [H * D]; for "output" the weight [C, H' * Dv]
        """
        raise NotImplementedError


class ProjectionMixing(FeatureMixing):
    """Mix queries, keys and values by a trained matrix each; all start as the identity.

    Args:
        lengths: the lengths of the rows of the matrix for "query", "key" and "value"
        mixed_features: which of them have a matrix, letters of "qkv"
    """

    def __init__(self, lengths: dict[str, int], mixed_features: str):
        super().__init__()
        for name, length in lengths.items():
            matrix = None
            if name[0] in mixed_features:
                matrix = nn.Parameter(torch.empty(length, length))
            self.register_parameter(name, matrix)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in ("query", "key", "value"):
            matrix = getattr(self, name)
            if matrix is not None:
                nn.init.eye_(matrix)

    def identity(self) -> dict[str, Tensor]:
        return {name: torch.eye(len(matrix)) for name, matrix in self.named_parameters()}

    def matrices(self) -> list[Tensor]:
        return list(self.parameters())

    def mixed(self, features: Tensor, matrix: Tensor) -> Tensor:
        """Return features [..., H * D], mixed by one of the matrices.

        They have the finer dtype of `features` and `matrix`.
        """
        raise NotImplementedError

    def of_weight(self, weight: Tensor, matrix: Tensor) -> Tensor:
        """Return the weight [H * D, C], or the bias [H * D], of a projection to the mixed features.

        It has the finer dtype of `weight` and `matrix`.

        Args:
            weight: the weight or the bias of a projection to features that are not mixed
            matrix: one of the matrices
        """
        raise NotImplementedError

    def forward(self, features: Tensor, name: str) -> Tensor:
        # TorchScript: no attribute by a name in a variable (ops/torchscript.md).
        if name == "query":
            matrix = self.query
        elif name == "key":
            matrix = self.key
        else:
            matrix = self.value
        if matrix is None or name == "output":
            return features
        return self.mixed(features, matrix).to(features.dtype)  # type: ignore[arg-type]

    @torch.jit.unused
    def project(self, linear: Any, x: Tensor, name: str) -> Tensor:
        """Return the mixed features [..., H * D] of a projection, as in `FeatureMixing`.

        With more tokens than C, it costs less to mix the weight of the projection than its outputs.
        """
        matrix = getattr(self, name)
        tokens = x.numel() // x.size(-1)
        few_tokens = tokens <= x.size(-1)
        # An exported program has to serve inputs of other lengths, too.
        if matrix is None or exporting() or few_tokens:
            return self(linear(x), name)
        # Mixing the weight goes around `linear`, so it must do nothing else. A weight on another
        # device is one that a hook would fetch.
        if not is_plain(linear) or linear.weight.device != x.device:
            return self(linear(x), name)

        weight = self.of_weight(linear.weight, matrix).to(linear.weight.dtype)
        bias = None
        if linear.bias is not None:
            bias = self.of_weight(linear.bias, matrix).to(linear.bias.dtype)
        return F.linear(x, weight, bias)

    def fold(self, tensors: dict[str, list[Tensor]]) -> None:
        with torch.no_grad():
            for name, matrix in self.named_parameters():
                for tensor in tensors[name]:
                    tensor.copy_(self.of_weight(tensor.double(), matrix.double()))
        self.load_state_dict(self.identity())


class MixingOfHeads(ProjectionMixing):
    """Make of head h the sum of A[j, h] times head j, A [H, H].

    This is Interleaved Head Attention with one pseudo-head.

    Args:
        sizes: the sizes of the attention
        mixed_features: which of queries, keys and values have a matrix, letters of "qkv"
    """

    def __init__(self, sizes: AttentionSizes, mixed_features: str = "qkv"):
        # Heads of queries that share keys and values have fewer of them.
        key_heads = sizes.key_heads or sizes.num_heads
        value_heads = sizes.key_heads or sizes.mixed_heads
        lengths = {"query": sizes.num_heads, "key": key_heads, "value": value_heads}
        super().__init__(lengths, mixed_features)

    def mixed(self, features: Tensor, matrix: Tensor) -> Tensor:
        by_head = features.unflatten(-1, [matrix.size(0), -1])  # [..., H, D]
        return finer_matmul(matrix.t(), by_head).flatten(-2)

    def of_weight(self, weight: Tensor, matrix: Tensor) -> Tensor:
        by_head = weight.reshape(matrix.size(0), -1)  # [H, D * C]: a single product serves
        return finer_matmul(matrix.t(), by_head).view(weight.shape)


class MixingInsideHeads(ProjectionMixing):
    """Multiply each head by the same T [D, D] (Knocking-Heads Attention).

    Args:
        sizes: the sizes of the attention
        mixed_features: which of queries, keys and values have a matrix, letters of "qkv"
    """

    def __init__(self, sizes: AttentionSizes, mixed_features: str = "qkv"):
        # Values that heads of queries share have the size of keys.
        value_dim = sizes.head_dim if sizes.key_heads else sizes.value_dim
        lengths = {"query": sizes.head_dim, "key": sizes.head_dim, "value": value_dim}
        super().__init__(lengths, mixed_features)

    def mixed(self, features: Tensor, matrix: Tensor) -> Tensor:
        by_head = features.unflatten(-1, [-1, matrix.size(0)])  # [..., H, D]
        return finer_matmul(by_head, matrix).flatten(-2)

    def of_weight(self, weight: Tensor, matrix: Tensor) -> Tensor:
        return self.mixed(weight.t(), matrix).t()


class OutputMixing(FeatureMixing):
    """Add sum_j (U V^T)[j, h] O_j to the output of head h; V starts as 0.

    This is the postmix of Virtual Head Attention. U is `left`, and V is `right`.
    """

    def __init__(self, sizes: AttentionSizes):
        super().__init__()
        self.left = nn.Parameter(torch.empty(sizes.mixed_heads, OUTPUT_RANK))  # U [H', R]
        self.right = nn.Parameter(torch.empty(sizes.mixed_heads, OUTPUT_RANK))  # V [H', R]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad(), forked_rng():
            self.left.copy_(torch.randn(self.left.shape, device="cpu") * self.left.size(0) ** -0.5)
            self.right.zero_()

    def identity(self) -> dict[str, Tensor]:
        return {"right": torch.zeros(self.right.shape)}

    def matrices(self) -> list[Tensor]:
        eye = torch.eye(self.left.size(0), dtype=self.left.dtype, device=self.left.device)
        return [eye + torch.matmul(self.left, self.right.t())]  # [H', H']

    def forward(self, features: Tensor, name: str) -> Tensor:
        if name != "output":
            return features
        added = finer_matmul(torch.matmul(self.right, self.left.t()), features)
        return (features + added).to(features.dtype)

    def fold(self, tensors: dict[str, list[Tensor]]) -> None:
        with torch.no_grad():
            # Not by `matrices`: in bfloat16, I + U V^T has no digits for a small U V^T.
            added = torch.matmul(self.left.double(), self.right.double().t())  # [H', H']
            for tensor in tensors["output"]:
                by_head = tensor.double().unflatten(-1, [self.left.size(0), -1])  # [C, H', Dv]
                tensor.copy_((by_head + torch.matmul(added, by_head)).flatten(-2))
        self.load_state_dict(self.identity(), strict=False)


_MATRICES: dict[str, tuple[Axis, ...]] = {"query": (), "key": (), "value": ()}

FEATURE_MIXINGS = {
    "none": PartKind(build=None, formula="", source="", parameters={}),
    "heads": PartKind(
        build=MixingOfHeads,
        formula="W_h becomes sum_j A[j, h] W_j, A [H, H]; biases too",
        source="Interleaved Head Attention 2026, one pseudo-head",
        parameters=_MATRICES,
        options=("mixed_features",),
        orthogonal=True,
        why_not_cut="each head is a sum of all",
    ),
    "shared": PartKind(
        build=MixingInsideHeads,
        formula="q_h T, k_h T, v_h T, T [D, D], before any rotation",
        source="Knocking-Heads Attention 2025",
        parameters=_MATRICES,
        options=("mixed_features",),
        orthogonal=True,
    ),
    "output": PartKind(
        build=OutputMixing,
        formula=f"O_h + sum_j (U V^T)[j, h] O_j, U and V [H, {OUTPUT_RANK}]",
        source="VHA 2026, its mixing after the attention",
        parameters={"left": (), "right": ()},
        orthogonal=True,
        why_not_cut="each head's output is a sum of all",
    ),
}
