"""Define gates on the outputs of heads.

Each value of --attention-gate is one row of ATTENTION_GATES.
"""

from functools import partial

import torch
from torch import Tensor, nn

from mixhead_plugin.ops.precision import finer_matmul
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, Part, PartKind


class AttentionGate(Part):
    """Scale O by 2 sigmoid(x W + c), with x the attention's query input.

    W and c start as 0, so the gates start as 1.

    Args:
        sizes: the sizes of the attention
        by_number: whether each number of a head has its own gate, or each head one
    """

    def __init__(self, sizes: AttentionSizes, by_number: bool):
        super().__init__()
        gates = sizes.mixed_heads * sizes.value_dim if by_number else sizes.mixed_heads
        self.weight = nn.Parameter(torch.empty(sizes.embed_dim, gates))  # [C, H'] or [C, H' * Dv]
        self.bias = nn.Parameter(torch.empty(gates))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def identity(self) -> dict[str, Tensor]:
        return {name: torch.zeros(parameter.shape) for name, parameter in self.named_parameters()}

    def forward(self, out: Tensor, x: Tensor) -> Tensor:
        """Return O [B, Nq, H', Dv] with the gates of x [B, Nq, C], in the dtype of O."""
        gate = 2 * torch.sigmoid(finer_matmul(x, self.weight) + self.bias)
        by_head = gate.view(out.size(0), out.size(1), out.size(2), gate.size(2) // out.size(2))
        return (out * by_head).to(out.dtype)  # gates are [B, Nq, H', 1 or Dv]


ATTENTION_GATES = {
    "none": PartKind(build=None, formula="", source="", parameters={}),
    "head": PartKind(
        build=partial(AttentionGate, by_number=False),
        formula="O_h times 2 sigmoid(x W + c), one gate a head",
        source="Qiu et al. 2025; theirs has no factor 2",
        parameters={"weight": (Axis(1, "mixed"),), "bias": (Axis(0, "mixed"),)},
        reads="input",
    ),
    "element": PartKind(
        build=partial(AttentionGate, by_number=True),
        formula="the same, one gate a number",
        source="Qiu et al. 2025; theirs has no factor 2",
        parameters={
            "weight": (Axis(1, "mixed", size="value_dim"),),
            "bias": (Axis(0, "mixed", size="value_dim"),),
        },
        reads="input",
    ),
}
