"""Define what mixes the features of heads, with torch alone.

Each value of --feature-mixing is one row of FEATURE_MIXINGS.

Features are the queries, keys, values or outputs of heads. A mixing is linear in them and no
position depends on another. So any kernel serves what is mixed, and a trained mixing folds into the
projections.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

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
    """Return whether a call of `linear` is certainly weight times input plus bias, no more.

    LoRA tools patch `forward` or add modules, quantisation changes the weight's type, offloading
    and pruning add hooks, and so does whoever reads or changes inputs, outputs and gradients, of
    one module or of all. A mode of torch may look for the product with this weight.
    """
    # Another class, or a program that replaced methods of nn.Linear itself.
    if type(linear) is not nn.Linear:
        return False
    if nn.Linear.forward is not _FORWARD or nn.Linear.__call__ is not _CALL:
        return False
    if has_hooks_on_all_modules() or torch._C._len_torch_function_stack() > 0:
        return False

    # Own attributes, child modules, or hooks.
    state = vars(linear)
    if state.keys() != _ATTRIBUTES:
        return False
    if any(state[name] != table for name, table in _TABLES.items()):
        return False

    # Weights of a type of their own, as of quantisation.
    if linear._parameters.keys() != {"weight", "bias"}:
        return False
    return all(
        tensor is None or type(tensor) in (Tensor, nn.Parameter)
        for tensor in linear._parameters.values()
    )


def has_hooks_on_all_modules() -> bool:
    """Return whether a hook acts on the calls of every module.

    torch has a function for this, `_has_any_global_hook`, but torch 2.6 does not have it yet.
    """
    return bool(
        torch_modules._global_forward_pre_hooks
        or torch_modules._global_forward_hooks
        or torch_modules._global_backward_pre_hooks
        or torch_modules._global_backward_hooks
    )


class FeatureMixing(Part):
    """Mix queries, keys and values by a trained matrix each; all start as the identity.

    Args:
        sizes: of the attention
        of_heads: True: head h becomes the sum of A[j, h] times head j (Interleaved Head Attention
            with one pseudo-head). False: each head is multiplied by the same T [D, D]
            (Knocking-Heads Attention).
        mixed_features: which of them have a matrix, letters of "qkv"
    """

    def __init__(self, sizes: AttentionSizes, of_heads: bool, mixed_features: str = "qkv"):
        super().__init__()
        self.of_heads = of_heads

        # Heads of queries that share keys and values have fewer of them, of size head_dim.
        if sizes.key_heads:
            key_heads = value_heads = sizes.key_heads
            value_dim = sizes.head_dim
        else:
            key_heads = sizes.num_heads
            value_heads = sizes.mixed_heads
            value_dim = sizes.value_dim

        if of_heads:  # A [H, H]
            lengths = {"query": sizes.num_heads, "key": key_heads, "value": value_heads}
        else:  # T [D, D]
            lengths = {"query": sizes.head_dim, "key": sizes.head_dim, "value": value_dim}

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
        """Return every matrix that multiplies features, [H, H] or [D, D]."""
        return list(self.parameters())

    def forward(self, features: Tensor, name: str) -> Tensor:
        """Return the mixed features.

        Those of "query", "key" or "value" are [..., H * D], those of "output" [..., H', Dv].
        """
        # TorchScript looks up no attribute by a name that varies.
        if name == "query":
            matrix = self.query
        elif name == "key":
            matrix = self.key
        else:
            matrix = self.value
        if matrix is None or name == "output":
            return features
        return self._mixed(features, matrix)  # type: ignore[arg-type]

    def _mixed(self, features: Tensor, matrix: Tensor) -> Tensor:
        """Return features [..., H * D], mixed by A [H, H] or T [D, D]."""
        if self.of_heads:
            by_head = features.unflatten(-1, [matrix.size(0), -1])  # [..., H, D]
            return torch.matmul(matrix.t(), by_head).flatten(-2)
        by_head = features.unflatten(-1, [-1, matrix.size(0)])  # [..., H, D]
        return torch.matmul(by_head, matrix).flatten(-2)

    def of_weight(self, weight: Tensor, matrix: Tensor) -> Tensor:
        """Return the weight [H * D, C], or the bias [H * D], of a projection to the mixed features.

        Args:
            weight: the weight or the bias of a projection to features that are not mixed
            matrix: A [H, H] or T [D, D]
        """
        if self.of_heads:
            by_head = weight.reshape(matrix.size(0), -1)  # [H, D * C]: a single product serves
            return torch.matmul(matrix.t(), by_head).view(weight.shape)
        return self._mixed(weight.t(), matrix).t()

    @torch.jit.unused
    def project(self, linear: Any, x: Tensor, name: str) -> Tensor:
        """Return the mixed features [..., H * D] of a projection of x [..., C].

        With more tokens than C, it costs less to mix the weight of the projection than its outputs.

        Args:
            linear: the projection
            x: its input
            name: "query", "key" or "value"
        """
        matrix = getattr(self, name)
        few_tokens = x.numel() <= x.size(-1) ** 2
        # An exported program has to serve inputs of other lengths, too.
        if matrix is None or exporting() or few_tokens:
            return self(linear(x), name)
        # Mixing the weight goes around `linear`, so it must do nothing else. A weight on another
        # device is one that a hook would fetch.
        if not is_plain(linear) or linear.weight.device != x.device:
            return self(linear(x), name)

        weight = self.of_weight(linear.weight, matrix)
        bias = None if linear.bias is None else self.of_weight(linear.bias, matrix)
        return F.linear(x, weight, bias)

    def fold(self, tensors: dict[str, list[Tensor]]) -> None:
        """Multiply the mixing into projections in place, in float64, and become the identity.

        Args:
            tensors: for "query", "key" and "value" the weight [H * D, C] and, where there is one,
                the bias [H * D]; for "output" the weight [C, H' * Dv]
        """
        with torch.no_grad():
            for name, matrix in self.named_parameters():
                for tensor in tensors[name]:
                    tensor.copy_(self.of_weight(tensor.double(), matrix.double()))
        self.load_state_dict(self.identity())


class OutputMixing(FeatureMixing):
    """Add sum_j (U V^T)[j, h] O_j to the output of head h; V starts as 0.

    This is the postmix of Virtual Head Attention.
    """

    def __init__(self, sizes: AttentionSizes):
        super().__init__(sizes, of_heads=True, mixed_features="")
        self.left = nn.Parameter(torch.empty(sizes.mixed_heads, OUTPUT_RANK))  # U
        self.right = nn.Parameter(torch.empty(sizes.mixed_heads, OUTPUT_RANK))  # V
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not hasattr(self, "right"):  # the __init__ of the class above calls this too early
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
    "none": PartKind(build=None, formula="", source="", parameters={}),
    "heads": PartKind(
        build=partial(FeatureMixing, of_heads=True),
        formula="W_h becomes sum_j A[j, h] W_j, A [H, H]; biases too",
        source="Interleaved Head Attention 2026, one pseudo-head",
        parameters=_MATRICES,
        options=("mixed_features",),
        orthogonal=True,
        why_not_cut="each head is a sum of all",
    ),
    "shared": PartKind(
        build=partial(FeatureMixing, of_heads=False),
        formula="q_h T, k_h T, v_h T, T [D, D], before any rotation",
        source="Knocking-Heads Attention 2025",
        parameters=_MATRICES,
        options=("mixed_features",),
        orthogonal=True,
    ),
    "output": PartKind(
        build=OutputMixing,
        formula="O_h + sum_j (U V^T)[j, h] O_j, U and V [H, 4]",
        source="VHA 2026, its mixing after the attention",
        parameters={"left": (), "right": ()},
        orthogonal=True,
        why_not_cut="each head's output is a sum of all",
    ),
}
