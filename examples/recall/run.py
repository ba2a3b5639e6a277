#!/usr/bin/env python
"""Multi-query associative recall (Arora et al. 2023, 'Zoology').

Name the value that stood behind a key.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from synthetic import Batch, Task, attention, main

from mixhead_plugin.ops import attention as attend

WORDS = 64  # keys, and as many values; token 0 is a blank
WIDTH = 64
TOKENS = 1024  # of a batch
POWER = 0.1  # distances follow the power law of Zoology's data: small ones are frequent


def draw(length: int, generator: torch.Generator) -> Batch:
    """Draw tokens [B, N] and answers [B, N], -1 where none is due.

    A row begins with N / 4 pairs of a key and its value; no key comes twice. Each key comes once
    more later, between blanks. There the answer is the number of its value.
    """
    rows = TOKENS // length
    pairs = length // 4
    keys = torch.rand(rows, WORDS, generator=generator).topk(pairs).indices + 1  # [B, K], from 1 on
    answers = torch.randint(WORDS, (rows, pairs), generator=generator)  # [B, K]
    tokens = torch.zeros(rows, length, dtype=torch.long)  # [B, N]
    due = torch.full_like(tokens, -1)  # [B, N]
    tokens[:, : 2 * pairs : 2] = keys
    tokens[:, 1 : 2 * pairs : 2] = answers + WORDS + 1

    # The largest of `likely` plus Gumbel noise are places drawn one after the other, without
    # putting any back.
    slots = (length - 2 * pairs) // 2
    likely = (POWER - 1) * torch.arange(1, slots + 1).log()
    gumbel = -torch.log(-torch.log(torch.rand(rows, slots, generator=generator)))
    places = 2 * pairs + 2 * (likely + gumbel).topk(pairs).indices  # [B, K]
    return tokens.scatter(1, places, keys), due.scatter(1, places, answers)


class WideAttention(nn.Module):
    """Causal softmax attention whose queries and keys, or values, are larger than a head.

    It shows which half of the low-rank bottleneck a task feels. The size of a head says no more
    than the number of heads.

    Args:
        heads: number of heads H
        query_size: size of a head's queries and keys
        value_size: size of a head's values
    """

    batch_first = True  # nn.TransformerEncoderLayer asks for these two
    in_proj_bias = None

    def __init__(self, heads: int, query_size: int, value_size: int):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(WIDTH, heads * query_size)
        self.k_proj = nn.Linear(WIDTH, heads * query_size)
        self.v_proj = nn.Linear(WIDTH, heads * value_size)
        self.out_proj = nn.Linear(heads * value_size, WIDTH)

        # Every weight starts as large as in the other contenders, whose projections are [WIDTH,
        # WIDTH]. Then scores and outputs start as large as theirs, too.
        bound = (6 / (2 * WIDTH)) ** 0.5 * 2**-0.5
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.uniform_(projection.weight, -bound, bound)
            nn.init.zeros_(projection.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, **masks: Any
    ) -> tuple[Tensor, None]:
        """Return the output [B, N, E] of inputs [B, N, E], and no weights.

        The mask is causal; those of the call are the same and are not read.
        """
        q = self.q_proj(query).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, Dq]
        k = self.k_proj(key).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, Dq]
        v = self.v_proj(value).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, N, Dv]
        out = attend(q, k, v, causal=True)  # [B, H, N, Dv]
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


def attention_of(name: str, head_size: int) -> nn.Module:
    """Return one of ATTENTIONS."""
    heads = WIDTH // head_size
    if name == "wide-values":
        return WideAttention(heads, head_size, WIDTH)
    if name == "wide-queries":
        return WideAttention(heads, WIDTH, head_size)
    return attention(name, WIDTH, heads, causal=True)


class Model(nn.Module):
    """A causal Transformer of two layers without positions. Each token also sees the one before it.

    Without this, a first layer must learn to look one token back before a second one can learn to
    recall.
    """

    def __init__(self, name: str, head_size: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(2 * WORDS + 1, WIDTH)
        self.before = nn.Embedding(2 * WORDS + 1, WIDTH)
        heads = WIDTH // head_size
        layer = partial(
            nn.TransformerEncoderLayer, WIDTH, heads, WIDTH, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.ModuleList([layer(), layer()])
        for each in self.layers:
            each.self_attn = attention_of(name, head_size)
        self.norm = nn.LayerNorm(WIDTH)
        self.answer = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the states [B, N, E] of tokens [B, N]."""
        x = self.tokens(tokens) + self.before(F.pad(tokens, (1, 0))[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def measure(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the cross-entropy of the answers in nats, and their accuracy."""
    tokens, due = batch
    states = model(tokens)[due >= 0]  # [answers, E]
    scores = model.answer(states)  # [answers, words]
    right = due[due >= 0]  # [answers]
    return {
        "nats an answer": F.cross_entropy(scores, right),
        "accuracy": (scores.argmax(-1) == right).float().mean(),
    }


def problem(head_size: int, length: int) -> str:
    """Return why there is no such model or no such row, or an empty text."""
    if head_size < 1 or WIDTH % head_size != 0:
        return f"--head-size {head_size}: must divide {WIDTH}, the width of the model"
    if not 4 <= length <= 4 * WORDS:
        return (
            f"--length {length}: must be from 4 to {4 * WORDS}, a fourth of it are keys, and no "
            "key comes twice"
        )
    return ""


# 'wide-values' and 'wide-queries' are softmax with heads whose values, or queries and keys, have
# the model's width
ATTENTIONS = ("softmax", "A", "B", "average", "uniform", "wide-values", "wide-queries")
TASK = Task(
    name="recall",
    attentions=ATTENTIONS,
    axis="length",
    size=64,
    steps=300,
    rate=0.01,
    model=Model,
    batch=draw,
    measure=measure,
    problem=problem,
)

if __name__ == "__main__":
    main(TASK)
