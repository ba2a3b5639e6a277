"""Define what mixes the features of heads: each value of --feature-mixing is one row of
FEATURE_MIXINGS; torch alone.

Features are the queries, keys, values or outputs of heads. A mixing is linear in them and no
position depends on another. So any kernel serves what is mixed, and a trained mixing folds into the
projections.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mixhead_plugin.ops.normalizers import exporting
from mixhead_plugin.parts.head_mixing import own_numbers
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, Part, PartKind

OUTPUT_RANK = 4  # of U V^T

# What a plain projection is made of: a module's own tables, all empty, and two sizes. Whatever has
# more, or has any of them filled, may compute something else.
_TABLES = {
    name: table
    for name, table in vars(nn.Module()).items()
    if name not in ("training", "_parameters")
}
_ATTRIBUTES = {*vars(nn.Module()), "in_features", "out_features"}
_FORWARD = nn.Linear.forward
_CALL = nn.Linear.__call__


def is_plain(linear: Any) -> bool:
    """Return whether a call of `linear` is certainly its weight times the input plus its bias, and
    nothing else.

    LoRA tools patch `forward` or add modules, quantisation changes the weight's type, offloading
    and pruning add hooks, and so does whoever reads or changes inputs, outputs and gradients, of
    one module or of all.
    """
    if (
        type(linear) is not nn.Linear
        or nn.Linear.forward is not _FORWARD
        or nn.Linear.__call__ is not _CALL
    ):
        return False
    if _has_any_global_hook():
        return False
    state = vars(linear)
    if state.keys() != _ATTRIBUTES or any(state[name] != table for name, table in _TABLES.items()):
        return False
    if linear._parameters.keys() != {"weight", "bias"}:
        return False
    return all(
        tensor is None or type(tensor) in (Tensor, nn.Parameter)
        for tensor in linear._parameters.values()
    )


class FeatureMixing(Part):
    """Mix queries, keys and values by a trained matrix each, of those that the sizes name; it
    starts as the identity.

    `of_heads`: head h becomes the sum of A[j, h] times head j (Interleaved Head Attention with one
    pseudo-head); else each head is multiplied by the same T [D, D] (Knocking-Heads Attention).
    """

    def __init__(self, sizes: AttentionSizes, of_heads: bool):
        super().__init__()
        self.of_heads = of_heads
        heads = {"query": sizes.num_heads, "key": sizes.key_heads or sizes.num_heads}
        heads["value"] = sizes.key_heads or sizes.mixed_heads
        value_dim = sizes.head_dim if sizes.key_heads else sizes.value_dim
        for name, number in heads.items():
            size = number if of_heads else value_dim if name == "value" else sizes.head_dim
            mixes = name[0] in sizes.mixed_features
            self.register_parameter(name, nn.Parameter(torch.empty(size, size)) if mixes else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in ("query", "key", "value"):
            matrix = getattr(self, name)
            if matrix is not None:
                nn.init.eye_(matrix)

    def identity(self) -> dict[str, Tensor]:
        return {name: torch.eye(len(matrix)) for name, matrix in self.named_parameters()}

    def matrices(self) -> list[Tensor]:
        """Return every matrix that multiplies features, [H, H] or [D, D]."""
        return list(self.parameters())

    def forward(self, features: Tensor, name: str) -> Tensor:
        """Return the mixed features: of "query", "key" or "value" [..., H * D], of "output" [...,
        H', Dv].
        """
        matrix = self.query if name == "query" else self.key if name == "key" else self.value
        if matrix is None or name == "output":
            return features
        return self._mixed(features, matrix)  # type: ignore[arg-type]

    def _mixed(self, features: Tensor, matrix: Tensor) -> Tensor:
        if self.of_heads:
            return torch.matmul(matrix.t(), features.unflatten(-1, [matrix.size(0), -1])).flatten(
                -2
            )
        return torch.matmul(features.unflatten(-1, [-1, matrix.size(0)]), matrix).flatten(-2)

    def of_weight(self, weight: Tensor, matrix: Tensor) -> Tensor:
        """Return the weight [H * D, C] or the bias [H * D]
        of a projection to the mixed features.
        """
        if self.of_heads:  # one product, [H, H] by [H, D * C]
            return torch.matmul(matrix.t(), weight.reshape(matrix.size(0), -1)).view(weight.shape)
        return self._mixed(weight.t(), matrix).t()

    @torch.jit.unused
    def project(self, linear: Any, x: Tensor, name: str) -> Tensor:
        """Return the mixed features [..., H * D] of a projection of x [..., C].

        If there are more tokens than C, it costs less to mix the weights. That goes around
        `linear`, so it must be plain.
        """
        matrix = getattr(self, name)
        # an exported program is for all sizes
        if matrix is None or exporting() or x.numel() <= x.size(-1) ** 2 or not is_plain(linear):
            return self(linear(x), name)
        if linear.weight.device != x.device:
            return self(linear(x), name)
        bias = None if linear.bias is None else self.of_weight(linear.bias, matrix)
        return F.linear(x, self.of_weight(linear.weight, matrix), bias)

    def fold(self, tensors: dict[str, list[Tensor]]) -> None:
        """Multiply the mixing into projections in place, in float64, and become the identity.

        `query`, `key` and `value` have a weight [H * D, C] and a bias [H * D] each, `output` a
        weight [C, H' * Dv].
        """
        with torch.no_grad():
            for name, matrix in self.named_parameters():
                for tensor in tensors[name]:
                    tensor.copy_(self.of_weight(tensor.double(), matrix.double()))
        self.load_state_dict(self.identity())


class OutputMixing(FeatureMixing):
    """Add sum_j (U V^T)[j, h] O_j to the output of head h; V starts as 0 (Virtual Head Attention,
    its postmix).
    """

    def __init__(self, sizes: AttentionSizes):
        super().__init__(sizes._replace(mixed_features=""), of_heads=True)
        self.left = nn.Parameter(torch.empty(sizes.mixed_heads, OUTPUT_RANK))  # U
        self.right = nn.Parameter(torch.empty(sizes.mixed_heads, OUTPUT_RANK))  # V
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not hasattr(self, "right"):  # the class above calls it before there are any
            return
        with torch.no_grad(), own_numbers():
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
        return features + torch.matmul(torch.matmul(self.right, self.left.t()), features)

    def fold(self, tensors: dict[str, list[Tensor]]) -> None:
        with torch.no_grad():
            for tensor in tensors["output"]:
                by_head = tensor.double().unflatten(-1, [self.left.size(0), -1])  # [C, H', Dv]
                tensor.copy_(torch.matmul(self.matrices()[0].double(), by_head).flatten(-2))
        self.load_state_dict(self.identity(), strict=False)


_MATRICES: dict[str, tuple[Axis, ...]] = {"query": (), "key": (), "value": ()}

FEATURE_MIXINGS = {
    "none": PartKind(None, "", "", {}),
    "heads": PartKind(
        partial(FeatureMixing, of_heads=True),
        "W_h becomes sum_j A[j, h] W_j, A [H, H]; biases too",
        "Interleaved Head Attention 2026, one pseudo-head",
        _MATRICES,
        orthogonal=True,
        uncut="each head is a sum of all",
    ),
    "shared": PartKind(
        partial(FeatureMixing, of_heads=False),
        "q_h T, k_h T, v_h T, T [D, D], before any rotation",
        "Knocking-Heads Attention 2025",
        _MATRICES,
        orthogonal=True,
    ),
    "output": PartKind(
        OutputMixing,
        "O_h + sum_j (U V^T)[j, h] O_j, U and V [H, 4]",
        "VHA 2026, its mixing after the attention",
        {"left": (), "right": ()},
        orthogonal=True,
        uncut="each head's output is a sum of all",
    ),
}
