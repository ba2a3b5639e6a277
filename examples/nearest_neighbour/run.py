#!/usr/bin/env python
"""Nearest neighbour (Amsel, Yehudai, Bruna 2025): find the point of a set next to a query."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from synthetic import Batch, Task, attention, main

DIMENSION = 16
POINTS = 16
QUERIES = 16
ROWS = 32  # of a batch


def draw(width: int, generator: torch.Generator) -> Batch:
    """Draw points and queries on the sphere, and the point next to each query.

    They are [B, N, d], [B, Q, d] and [B, Q, d].
    """
    both = torch.randn(ROWS, POINTS + QUERIES, DIMENSION, generator=generator)
    points, queries = F.normalize(both, dim=-1).split((POINTS, QUERIES), 1)
    nearest = torch.matmul(queries, points.transpose(1, 2)).argmax(-1)  # [B, Q]
    return points, queries, points.take_along_dim(nearest[..., None], 1)


class Model(nn.Module):
    """One attention from the queries to the points."""

    def __init__(self, name: str, head_size: int, width: int):
        super().__init__()
        self.attention = attention(
            name, DIMENSION, width // head_size, bias=False, head_dim=head_size
        )

    def forward(self, points: Tensor, queries: Tensor) -> Tensor:
        return self.attention(queries, points, points, need_weights=False)[0]  # [B, Q, d]


def measure(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the mean squared distance from the nearest point; the zero vector has 1."""
    points, queries, nearest = batch
    return {"mean squared error": (model(points, queries) - nearest).square().sum(-1).mean()}


def problem(head_size: int, width: int) -> str:
    """Return why there is no such model, or an empty text."""
    if width < 1:
        return f"--width {width}: must be at least 1"
    if head_size < 1 or width % head_size != 0:
        return f"--head-size {head_size}: must divide --width {width}"
    return ""


ATTENTIONS = ("softmax", "A", "B", "average", "uniform")
TASK = Task(
    name="nearest_neighbour",
    attentions=ATTENTIONS,
    axis="width",
    size=DIMENSION,
    steps=500,
    rate=0.03,
    model=Model,
    batch=draw,
    measure=measure,
    problem=problem,
)

if __name__ == "__main__":
    main(TASK)
