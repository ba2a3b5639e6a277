"""Define attention sinks.

Each value of --attention-sink is one row of ATTENTION_SINKS.

A sink is a key without a value that every row sees. Its weight is lost, so a row may attend to
nothing.
"""

from functools import partial

import torch
from torch import Tensor, nn

from mixhead_plugin.parts.kinds import AttentionSizes, Axis, Part, PartKind


class AttentionSink(Part):
    """Give the sink a score in each head.

    Args:
        sizes: the sizes of the attention
        trained: whether the scores are trained, from 0 on, or stay 0
    """

    def __init__(self, sizes: AttentionSizes, trained: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes.num_heads)) if trained else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.zeros_(self.weight)

    def forward(self, q: Tensor) -> Tensor:
        """Return the scores [H] for queries [B, H, Nq, D]."""
        return q.new_zeros(q.size(1)) if self.weight is None else self.weight


ATTENTION_SINKS = {
    "none": PartKind(build=None, formula="", source="", parameters={}),
    "zero": PartKind(
        build=partial(AttentionSink, trained=False),
        formula="one more key in each row, of score 0 and value 0; softmax: exp(s) / "
        "(1 + sum exp(s))",
        source="Miller 2023",
        parameters={},
        loads_without=False,
    ),
    "learned": PartKind(
        build=partial(AttentionSink, trained=True),
        formula="the same, of a score learned per head",
        source="gpt-oss 2025",
        parameters={"weight": (Axis(0, "source"),)},
        loads_without=False,
    ),
}
