"""The forward pass of one block of queries after the other, and the steps that the backward pass
repeats.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.masks import NARROW, Block
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.blockwise.threads import parallel_for
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.normalizers import NORMALIZERS


def forward(plan: Plan, output: Tensor) -> None:
    """Write O = dropout(Pbar) V into `output` [B, H', Nq, Dv], which holds zeros unless
    `plan.complete`.
    """

    def work(items: Iterator[tuple[Block, AttentionInputs, Tensor]]) -> None:
        steps = Steps(plan)
        for block, part, out in items:
            weights = steps.without_sink(steps.weights(block, part)[1], part)  # [b * h, n, k]
            # [b * h', n, k]
            mixed = steps.mix(steps.apply_gain(weights, block, part.gain), part.mixing)
            if steps.dropout_p > 0:
                mixed = mixed.mul_(steps.dropout_mask(block, mixed.shape))
            rows = product(mixed, part.value, steps.dropout_scale)  # [b * h', n, Dv]
            out.copy_(rows.view(out.shape))

    items = [(block, inputs_of(plan, block), block.part("output", output)) for block in plan.blocks]
    parallel_for(work, items, output.device)


def product(a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return alpha A B, [batch, m, n], for A [batch, m, k] and B [batch, k, n]; narrow ones as (B^T
    A^T)^T.
    """
    if a.is_cpu and b.shape[2] < NARROW <= a.shape[1]:
        found = product(b.transpose(1, 2), a.transpose(1, 2), alpha).transpose(1, 2)
        return found if out is None else out.copy_(found)
    if out is None:
        out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)


def inputs_of(plan: Plan, block: Block) -> AttentionInputs:
    """Return the block's part of the inputs, shaped for products of matrices; masks stay whole.

    Shapes: query [b * h, n, D], key [b * h, k, D], value [b * h', k, Dv], mixing [H, H'] or [b, n,
    H, H'], relative_query [h, b * n, R], relative_key [h, n + k - 1, R], gain [h, n + k - 1], sink
    [h], score_mixing as mixing.

    Views are cheap, but not while another thread runs Python. The caller makes all of them before
    threads start.
    """
    parts = {name: block.part(name, tensor) for name, tensor in plan.inputs.given().items()}
    for name in ("query", "key", "value"):
        parts[name] = parts[name].flatten(0, 1)
    if "relative_query" in parts:
        parts["relative_query"] = parts["relative_query"].transpose(0, 1).flatten(1, 2)
    return plan.inputs.with_tensors(parts)


class Steps:
    """The steps of both passes, with buffers that serve one block after the other.

    Sentences and heads are one dimension, [b * h, n, k], except where heads mix.
    """

    def __init__(self, plan: Plan):
        self.plan, self.scale = plan, plan.inputs.scale
        self.normalizer = NORMALIZERS[plan.inputs.normalizer]
        self.memory: dict[str, Tensor] = {}
        self.shaped: dict[tuple[Any, ...], Tensor] = {}
        # Mixed weights may overwrite scores that no gradient will read.
        self.mixed = "mixed" if self.normalizer.grad_reads_scores else "scores"
        self.dropout_p = p = plan.inputs.dropout_p
        self.dropout_scale = 1 / (1 - p) if p < 1 else 0.0  # of the weights that stay
        if p > 0:
            device = plan.inputs.query.device
            assert plan.inputs.seed is not None
            self.seed, self.generator = int(plan.inputs.seed), torch.Generator(device)
            # 16 random bits for each weight; 32 where that would round the probability noticeably
            self.draw = torch.int16 if 0.01 <= p <= 0.9 else torch.int32
            self.draws = 8 // self.draw.itemsize  # in one 64-bit number
            self.bits = torch.empty(
                math.ceil(plan.largest / self.draws), dtype=torch.int64, device=device
            )

    def buffer(self, name: str, shape: tuple[int, ...], most: int | None = None) -> Tensor:
        """Return memory that every block reuses: fresh pages of the system cost as much as the sums
        in them.

        `most` is its size in the largest block; None for that of the scores.
        """
        view = self.shaped.get((name, shape))
        if view is None:
            if name not in self.memory:
                self.memory[name] = self.plan.inputs.query.new_empty(most or self.plan.largest)
            view = self.shaped[name, shape] = self.memory[name][: math.prod(shape)].view(shape)
        return view

    def weights(self, block: Block, part: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return the scores and P, [b * h, n, k];
        with a sink one more column, [b * h, n, k + 1].
        """
        b, h, n, k = block.shape
        scores = self.buffer("scores", (b * h, n, k if part.sink is None else k + 1))
        of_keys = scores[..., :k]
        products = of_keys if part.score_mixing is None else self.buffer("products", (b * h, n, k))
        product(part.query, part.key.transpose(1, 2), self.scale, products)
        if part.score_mixing is not None:
            of_keys.copy_(self.mix(products, part.score_mixing, "mixed products"))
        if part.sink is not None:
            scores.view(b, h, n, k + 1)[..., k] = part.sink[:, None]
        by_head = of_keys.view(b, h, n, k)
        if part.relative_query is not None and part.relative_key is not None:
            distances, shifted = self.distances(block, b)
            torch.bmm(part.relative_query, part.relative_key.transpose(1, 2), out=distances)
            by_head.add_(shifted)
        self.plan.masks.add_to(by_head, block)
        return scores, self.normalizer.weights(
            scores, self.plan.masks.seen, self.buffer("weights", scores.shape)
        )

    def without_sink(self, weights: Tensor, part: AttentionInputs) -> Tensor:
        """Return P [b * h, n, k] in one piece of memory, without the column of the sink if there is
        one.
        """
        if part.sink is None:
            return weights
        weights = weights[..., :-1]
        return self.buffer("without sink", weights.shape).copy_(weights)

    def distances(self, block: Block, b: int) -> tuple[Tensor, Tensor]:
        """Return memory by distance, [h, b * n, n + k - 1], and a view of it by key, [b, h, n, k].

        The memory of a query holds its keys side by side, one number further left than for the
        query before.
        """
        _, h, n, k = block.shape
        width = n + k - 1
        distances = self.buffer("distances", (h, b * n, width), self.plan.most_distances)
        shape, strides = (b, h, n, k), (n * width, b * n * width, width - 1, 1)
        return distances, distances.as_strided(shape, strides, distances.storage_offset() + n - 1)

    def gain_by_key(self, block: Block, gain: Tensor) -> Tensor:
        """Return the gain [h, n + k - 1] of each query's keys, [1, h, n, k]."""
        distances, shifted = self.distances(block, 1)
        distances.copy_(gain[:, None].expand_as(distances))
        return shifted

    def apply_gain(self, weights: Tensor, block: Block, gain: Tensor | None) -> Tensor:
        """Return P [b * h, n, k] times the gain of each key's distance."""
        if gain is None:
            return weights
        with_gain = self.buffer("with gain", weights.shape)
        torch.mul(
            weights.view(block.shape),
            self.gain_by_key(block, gain),
            out=with_gain.view(block.shape),
        )
        return with_gain

    def arranged(self, weights: Tensor, mixing: Tensor, name: str) -> Tensor:
        """Return P [b * h, n, k] as matrices that M [H, H'] or [b, n, H, H'] mixes: [b, h, n * k]
        or [b * n, h, k].

        `name` is that of the buffer for a copy, which several batch elements with an M for each
        query need.
        """
        by_element = weights.unflatten(
            0, (len(mixing) if mixing.dim() == 4 else -1, mixing.shape[-2])
        )
        if mixing.dim() == 2:
            return by_element.flatten(2)
        by_query = by_element.transpose(1, 2)  # [b, n, h, k]
        if len(by_query) > 1:
            by_query = self.buffer(name, by_query.shape).copy_(by_query)
        return by_query.flatten(0, 1)

    def mix(self, weights: Tensor, mixing: Tensor | None, name: str = "") -> Tensor:
        """Return sum_j M[j, i] P_j, [b * h', n, k], for P [b * h, n, k] and M [H, H'] or [b, n, H,
        H'].

        `name` is that of the buffer; by default it is the one for mixed weights.
        """
        if mixing is None:
            return weights
        return self.mix_arranged(
            self.arranged(weights, mixing, "by query"), mixing, weights.shape[1], name
        )

    def mix_arranged(self, weights: Tensor, mixing: Tensor, n: int, name: str = "") -> Tensor:
        """Return the same for weights that are `arranged`."""
        name, heads = name or self.mixed, mixing.shape[-1]
        if mixing.dim() == 2:
            mixed = self.buffer(name, (len(weights), heads, weights.shape[2]))
            torch.bmm(mixing.t().expand(len(weights), -1, -1), weights, out=mixed)
            return mixed.view(len(weights) * heads, n, -1)
        several = len(mixing) > 1
        mixed = self.buffer(
            "mixed by query" if several else name, (len(weights), heads, weights.shape[2])
        )
        product(mixing.transpose(2, 3).flatten(0, 1), weights, out=mixed)
        mixed = mixed.unflatten(0, (-1, n)).transpose(1, 2)  # [b, h', n, k]
        return (self.buffer(name, mixed.shape).copy_(mixed) if several else mixed).flatten(0, 1)

    def dropout_mask(self, block: Block, shape: tuple[int, ...]) -> Tensor:
        """Return dropout's ones and zeros for the block, the same in both passes."""
        mask = self.buffer("dropout mask", shape)
        values = torch.iinfo(self.draw)
        drop = round(self.dropout_p * (values.max - values.min + 1))
        if drop > values.max - values.min:
            return mask.zero_()
        self.generator.manual_seed((self.seed + block.number) % 2**63)
        # Several draws in one number take a fifth of the time of bernoulli_.
        self.bits[: math.ceil(mask.numel() / self.draws)].random_(
            -(2**63), None, generator=self.generator
        )
        bits = self.bits.view(self.draw)[: mask.numel()].view(shape)
        return torch.ge(bits, values.min + drop, out=mask)
