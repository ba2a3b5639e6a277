"""Define attention sinks: each value of --attention-sink is one row of ATTENTION_SINKS. The modules need torch alone.

A sink is a key without a value that every row sees. Its weight is lost, so a row may attend to nothing.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mixhead_plugin.parts.kinds import AttentionSizes, Axis, PartKind


class ZeroSink(nn.Module):
    """Give the sink the score 0 in every head (Miller 2023: softmax with 1 added to the denominator)."""

    if TYPE_CHECKING:
        weight: Tensor

    def __init__(self, sizes: AttentionSizes):
        super().__init__()
        self.register_buffer("weight", torch.zeros(sizes.num_heads), persistent=False)  # [H]

    def forward(self) -> Tensor:
        return self.weight


class LearnedSink(nn.Module):
    """Train the sink's score in each head; it starts as 0 (gpt-oss)."""

    def __init__(self, sizes: AttentionSizes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sizes.num_heads))  # [H]

    def forward(self) -> Tensor:
        return self.weight


ATTENTION_SINKS = {
    "none": PartKind(None, "", "", {}),
    "zero": PartKind(
        ZeroSink,
        "one more key in each row, of score 0 and value 0; softmax: exp(s) / (1 + sum exp(s))",
        "Miller 2023",
        {},
        loads_without=False,
    ),
    "learned": PartKind(
        LearnedSink,
        "the same, of a score learned per head",
        "gpt-oss 2025",
        {"weight": (Axis(0, "source"),)},
        loads_without=False,
        trained=True,
    ),
}
