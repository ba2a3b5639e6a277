"""Benchmark a training step of nanoGPT's models, mixed by `nn.mix` and by hand.

By hand means what an owner of such a model would write in its attention: the formula over blocks of
queries (`opponents.loop`), with the same parameters under the same names.
"""

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from nanogpt.model import GPT, CausalSelfAttention

from benchmarks.core import peak_of
from benchmarks.measure import Case, measure, shake
from benchmarks.opponents import loop
from mixhead_plugin.nn import mix
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.parts import parameter_groups

MIXINGS = {"A": "position-independent", "B": "position-wise"}
BLOCK = 128  # queries that the loop computes at a time


class Sizes(NamedTuple):
    """A model and a batch of nanoGPT."""

    batch: int  # texts of an update
    vocabulary: int
    positions: int
    layers: int
    heads: int
    width: int


SIZES = {
    "GPT-2": Sizes(1, 50304, 1024, 12, 12, 768),
    "letters": Sizes(8, 65, 256, 6, 6, 384),  # that of nanoGPT's Shakespeare
}


class Mixing(nn.Module):
    """M as an owner would write it: [H, H] for A, [B, N, H, H] for B."""

    def __init__(self, letter: str, heads: int, head_dim: int):
        super().__init__()
        self.letter = letter
        if letter == "A":
            self.weight = nn.Parameter(torch.eye(heads))
        else:
            self.query_weight = nn.Parameter(torch.zeros(head_dim, heads))
            self.bias = nn.Parameter(torch.eye(heads))

    def forward(self, query: Tensor) -> Tensor:
        if self.letter == "A":
            return self.weight
        return query.transpose(1, 2) @ self.query_weight + self.bias


class ByHand(CausalSelfAttention):
    """nanoGPT's attention with mixing written into it."""

    def __init__(self, letter: str, width: int, heads: int, checkpointed: bool):
        super().__init__(width, heads)
        self.head_mixing = Mixing(letter, heads, width // heads)
        self.checkpointed = checkpointed

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        call = AttentionInputs(
            query=query,
            key=key,
            value=value,
            mixing=self.head_mixing(query),
            causal=True,
            scale=query.size(3) ** -0.5,
        )
        return loop(call, BLOCK, self.checkpointed)


class Contender(NamedTuple):
    """One way to have the model.

    Args:
        letter: A or B; None for the model as it is
        by_hand: whether the mixing is written into the attention; else `nn.mix` adds it
        checkpointed: whether the loop computes its weights again in the backward pass
    """

    letter: str | None = None
    by_hand: bool = False
    checkpointed: bool = False


CONTENDERS = {"torch's attention, not mixed": Contender()}
for letter in MIXINGS:
    CONTENDERS[f"Mixhead {letter}"] = Contender(letter)
    CONTENDERS[f"loop {BLOCK}: Mixhead {letter}"] = Contender(letter, by_hand=True)
    CONTENDERS[f"loop {BLOCK}, checkpointed: Mixhead {letter}"] = Contender(
        letter, by_hand=True, checkpointed=True
    )


def model_of(name: str, sizes: Sizes) -> GPT:
    """Return the model of a contender; all have the same weights."""
    contender = CONTENDERS[name]
    torch.manual_seed(1)
    model = GPT(*sizes[1:])
    if contender.letter is None:
        return model
    if not contender.by_hand:
        example = torch.zeros(1, 8, dtype=torch.long)
        return mix(model, MIXINGS[contender.letter], example=(example,))
    for block in model.h:
        attention = ByHand(contender.letter, sizes.width, sizes.heads, contender.checkpointed)
        attention.load_state_dict(block.attn.state_dict(), strict=False)
        block.attn = attention
    return model


def tokens_of(sizes: Sizes) -> Tensor:
    return torch.randint(sizes.vocabulary, (sizes.batch, sizes.positions + 1))


def check(sizes: Sizes) -> None:
    """End the command if a loop has another loss or another gradient than the model of `nn.mix`.

    Each is a model of one layer with a short vocabulary, in float64, whose M has moved.
    """
    small = sizes._replace(batch=2, layers=1, vocabulary=65)
    tokens = tokens_of(small)

    def found(name: str) -> dict[str, Tensor]:
        model = model_of(name, small)
        shake(model)
        model.double()
        loss = model.loss(tokens)
        loss.backward()
        # a loop that forgets a parameter has no gradient of it
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }
        return {"loss": loss.detach(), **gradients}

    for name, contender in CONTENDERS.items():
        if not contender.by_hand:
            continue
        by_loop = found(name)
        for part, expected in found(f"Mixhead {contender.letter}").items():
            if not torch.allclose(by_loop[part], expected, rtol=1e-9, atol=1e-12):
                sys.exit(f"{name}: {part} differs from nn.mix; nothing is timed")


def step(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """Train for one update; on a GPU in bfloat16, as nanoGPT does."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        loss = model.loss(tokens)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def stepping(name: str, sizes: Sizes, device: str = "cpu") -> Callable[[Tensor], None]:
    """Return what trains the model of a contender on a batch of tokens of the device."""
    model = model_of(name, sizes).to(device)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=1e-4)
    return functools.partial(step, model, optimizer)


def peak(name: str, sizes: Sizes) -> float:
    """Return the peak memory of an update, in MiB.

    Weights, gradients and the state of AdamW do not count. It has to run in a fresh process.
    """
    tokens = tokens_of(sizes)
    update = stepping(name, sizes)
    # Libraries load, threads start, and gradients and AdamW get their memory.
    update(tokens[:, :65])
    return peak_of(functools.partial(update, tokens))


def table(title: str, rounds: int, clock: str) -> list[dict[str, Any]]:
    """Return a row for each contender: time of an update, and its memory."""
    sizes = SIZES[title]
    check(sizes)
    tokens = tokens_of(sizes)
    contenders = {name: functools.partial(stepping(name, sizes), tokens) for name in CONTENDERS}
    shown = f"{title}: {sizes.layers} layers, d {sizes.width}, {sizes.heads} heads, "
    shown += f"{sizes.batch} x {sizes.positions} tokens"
    rows = measure(Case("nanogpt", shown, contenders), rounds, "cpu", clock)
    del contenders

    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for row in rows:
            row["peak_mib"] = pool.submit(peak, row["name"], sizes).result()
    return rows
