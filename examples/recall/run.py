#!/usr/bin/env python
"""Multi-query associative recall (Arora et al. 2023, 'Zoology'): name the value that stood behind a key."""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.extend(str(Path(__file__).resolve().parents[2] / folder) for folder in ("examples", "."))

from synthetic import Batch, Task, attention, main

WORDS = 64  # keys, and as many values; token 0 is a blank
WIDTH = 64
TOKENS = 1024  # of a batch
POWER = 0.1  # distances follow the power law of Zoology's data: small ones are frequent


def draw(length: int, generator: torch.Generator) -> Batch:
    """Draw tokens [B, N] and answers [B, N], -1 where none is due.

    A row begins with N / 4 pairs of a key and its value; no key comes twice. Each key comes once more later, between
    blanks. There the answer is the number of its value.
    """
    rows, pairs = TOKENS // length, length // 4
    keys = torch.rand(rows, WORDS, generator=generator).topk(pairs).indices + 1  # [B, K], from 1 on
    answers = torch.randint(WORDS, (rows, pairs), generator=generator)  # [B, K]
    tokens = torch.zeros(rows, length, dtype=torch.long)  # [B, N]
    due = torch.full_like(tokens, -1)  # [B, N]
    tokens[:, : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, answers + WORDS + 1
    slots = (length - 2 * pairs) // 2
    likely = (POWER - 1) * torch.arange(1, slots + 1).log()
    gumbel = -torch.rand(rows, slots, generator=generator).log_().neg_().log_()
    places = 2 * pairs + 2 * (likely + gumbel).topk(pairs).indices  # [B, K], drawn one after the other
    return tokens.scatter(1, places, keys), due.scatter(1, places, answers)


class Model(nn.Module):
    """A causal Transformer of two layers without positions. Each token also sees the one before it.

    Without this, a first layer must learn to look one token back before a second one can learn to recall.
    """

    def __init__(self, arm: str, head_size: int, length: int):
        super().__init__()
        self.tokens, self.before = (nn.Embedding(2 * WORDS + 1, WIDTH) for _ in range(2))
        heads = WIDTH // head_size
        layer = partial(nn.TransformerEncoderLayer, WIDTH, heads, WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList([layer(), layer()])
        for each in self.layers:
            each.self_attn = attention(arm, WIDTH, heads, causal=True)
        self.norm, self.answer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the states [B, N, E] of tokens [B, N]."""
        x = self.tokens(tokens) + self.before(F.pad(tokens, (1, 0))[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def measure(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the cross-entropy of the answers in nats, and their accuracy."""
    tokens, due = batch
    scores, right = model.answer(model(tokens)[due >= 0]), due[due >= 0]  # [answers, words], [answers]
    return {"nats an answer": F.cross_entropy(scores, right), "accuracy": (scores.argmax(-1) == right).float().mean()}


TASK = Task("recall", ("softmax", "B", "average", "uniform"), "length", 64, 300, 0.01, Model, draw, measure)

if __name__ == "__main__":
    main(TASK)
