"""The forward pass of one block of queries, and the steps that the backward pass repeats.

    Q [b, h, n, D]  x  K [b, h, k, D]    ->  S     scores            [b * h, n, k]
    S    normalizer, row by row          ->  P     weights           [b * h, n, k]
    P    M mixes the heads               ->  Pbar  mixed weights     [b * h', n, k]
    Pbar, some dropped  x  V [b, h', k, Dv]   ->   O   output        [b * h', n, Dv]

for b sentences, h heads before and h' after mixing, n queries and k keys of one block.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.block import Block
from mixhead_plugin.ops.blockwise.buffers import Buffers
from mixhead_plugin.ops.blockwise.mixing import ByHead, ByQuery, HeadMatrices
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.blockwise.products import product
from mixhead_plugin.ops.blockwise.threads import parallel_for, threads_for
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.normalizers import NORMALIZERS


def forward(plan: Plan, output: Tensor, kept: Tensor | None) -> None:
    """Write O = dropout(Pbar) V into `output`.

    Args:
        plan: the blocks of the call
        output: [B, H', Nq, Dv]; it holds zeros unless `plan.has_every_query`
        kept: memory of `plan.kept_numbers` for what the backward pass reads again, or None
    """

    def work(share: Iterator[tuple[Block, AttentionInputs, Tensor]]) -> None:
        """Go through a thread's share of the blocks, with buffers of its own."""
        steps = Steps(plan, kept)
        for block, part, out in share:
            with_sink = steps.scores_and_weights(block, part).weights
            weights = steps.without_sink(with_sink, part, "P without sink")  # [b * h, n, k]
            with_gain = steps.apply_gain(weights, block, part.gain)
            mixed = steps.mixed(with_gain, part).weights  # [b * h', n, k]
            dropped = steps.drop(mixed, steps.dropout_mask(block, mixed.shape))
            attended = product(dropped, part.value, steps.dropout_scale)  # [b * h', n, Dv]
            out.copy_(attended.view(out.shape))

    items = []
    for block in plan.by_group(threads_for(output.device)):
        items.append((block, inputs_of_block(plan, block), block.part("output", output)))
    parallel_for(work, items, output.device)


def inputs_of_block(plan: Plan, block: Block) -> AttentionInputs:
    """Return the block's part of the inputs, shaped for products of matrices; masks stay whole.

    The caller makes all of these views before threads start, because a thread that makes one may
    have to wait until another one lets Python go. Their shapes:

        query           [b * h, n, D]
        key             [b * h, k, D]
        value           [b * h', k, Dv]
        mixing          [H, H'] or [b, n, H, H']
        score_mixing    [H, H] or [b, n, H, H]
        mixing_left     [b, n, H, R], and so mixing_right
        mixing_diagonal [b, n, H]
        relative_query  [h, b * n, R]
        relative_key    [h, n + k - 1, R]
        gain            [h, n + k - 1]
        sink            [h]
    """
    parts = {}
    for name, tensor in plan.operands.items():
        if name in ("query", "key", "value"):
            parts[name] = block.matrices(name, tensor)
        else:
            parts[name] = block.part(name, tensor)
    if "relative_query" in parts:
        by_head = parts["relative_query"].transpose(0, 1)  # [h, b, n, R]
        parts["relative_query"] = by_head.flatten(1, 2)
    return plan.inputs.with_tensors(parts)


class Scored(NamedTuple):
    """The scores and weights of a block; with a sink [b * h, n, k + 1], else [b * h, n, k]."""

    scores: Tensor  # S; the memory of P where the normalizer's gradient does not read it
    weights: Tensor  # P
    unmixed: Tensor | None  # where scores are mixed: scale * Q K^T before, [b * h, n, k]


class Mixed(NamedTuple):
    """The mixed weights of a block, and what their gradient reads again."""

    weights: Tensor  # Pbar, [b * h', n, k]
    arranged: Tensor | None  # P as the matrices that M multiplies; None if heads do not mix
    combined: Tensor | None  # where M has factors: C_r = sum_j left[j, r] P_j, [b * n, R, k]


class Steps:
    """The steps of both passes, with buffers that serve one block after the other.

    Sentences and heads are one dimension, [b * h, n, k], except where heads mix.

    Args:
        plan: the blocks of the call
        kept: memory of `plan.kept_numbers` for what the backward pass reads again; None: it
            computes all of it again
        written: whether `kept` holds it already, so that this is the backward pass
    """

    def __init__(self, plan: Plan, kept: Tensor | None = None, written: bool = False):
        self.plan = plan
        self.scale = plan.inputs.scale
        self.normalizer = NORMALIZERS[plan.inputs.normalizer]
        self.kept = kept
        self.written = written
        self.buffers = Buffers(plan.inputs.query, plan.largest)

        # Factors of M lie by query, too.
        self.by_query = ByQuery(self.buffers)
        self.matrices = self._matrices_for(plan.inputs.mixing)
        self.score_matrices = self._matrices_for(plan.inputs.score_mixing)

        p = plan.inputs.dropout_p
        self.dropout_p = p
        self.dropout_scale = 1 / (1 - p) if p < 1 else 0.0  # of the weights that stay
        if p > 0:
            device = plan.inputs.query.device
            assert plan.inputs.seed is not None
            self.seed = int(plan.inputs.seed)
            self.generator = torch.Generator(device)
            # 16 random bits for each weight; 32 where that would round the probability noticeably
            self.bits_dtype = torch.int16 if 0.01 <= p <= 0.9 else torch.int32
            self.draws_per_word = 8 // self.bits_dtype.itemsize  # in one 64-bit number
            words = math.ceil(plan.largest / self.draws_per_word)
            self.bits = torch.empty(words, dtype=torch.int64, device=device)

    def _matrices_for(self, mixing: Tensor | None) -> HeadMatrices:
        """Return the matrices that a mixing multiplies; any if there is none."""
        if mixing is not None and mixing.dim() == 2:
            return ByHead(self.buffers)
        return self.by_query

    # ---- weights -------------------------------------------------------------------------------

    def lasting(self, name: str, block: Block, shape: tuple[int, ...]) -> Tensor:
        """Return memory for one of `plan.keeps`: the call's own if it keeps weights, or a buffer.

        In `kept` each block has a stretch, with room of the same length for each name.
        """
        if self.kept is None:
            return self.buffers.get(name, shape)
        start = self.plan.kept_at(name, block)
        return self.kept[start : start + math.prod(shape)].view(shape)

    def scores_and_weights(self, block: Block, part: AttentionInputs) -> Scored:
        """Return S and P, which were kept, or compute them.

        Where the normalizer's gradient reads no scores, P overwrites them: both are one tensor.

        Args:
            block: the block
            part: the block's part of the inputs, as `inputs_of_block` shapes it
        """
        b, h, n, k = block.shape
        width = k if part.sink is None else k + 1
        weights = self.lasting("P", block, (b * h, n, width))
        scores = weights
        if self.normalizer.grad_reads_scores:
            scores = self.lasting("S", block, weights.shape)
        unmixed = None
        if part.score_mixing is not None:
            unmixed = self.lasting("QK^T", block, (b * h, n, k))
        if self.kept is not None and self.written:
            return Scored(scores, weights, unmixed)

        # scale * Q K^T, mixed
        of_keys = scores[..., :k]
        if part.score_mixing is None:
            product(part.query, part.key.transpose(1, 2), self.scale, of_keys)
        else:
            assert unmixed is not None
            product(part.query, part.key.transpose(1, 2), self.scale, unmixed)
            arranged = self.score_matrices.arrange(unmixed, h, "QK^T, arranged")
            of_keys.copy_(self.score_matrices.mix(arranged, part.score_mixing, n, "mixed QK^T"))

        # One more column, which no mask and no bias reaches
        if part.sink is not None:
            scores.view(b, h, n, k + 1)[..., k] = part.sink[:, None]

        # Relative scores, biases and masks
        by_head = of_keys.view(b, h, n, k)
        if part.relative_query is not None and part.relative_key is not None:
            distances, by_key = self.memory_by_distance(block, b)
            torch.bmm(part.relative_query, part.relative_key.transpose(1, 2), out=distances)
            by_head.add_(by_key)
        self.plan.masks.add_to(by_head, block)

        weights = self.normalizer.weights(scores, self.plan.masks.every_query_sees_a_key, weights)
        return Scored(scores, weights, unmixed)

    def without_sink(self, weights: Tensor, part: AttentionInputs, name: str) -> Tensor:
        """Return P, or dS, [b * h, n, k] in one piece of memory, without the column of a sink.

        Args:
            weights: P or dS
            part: the block's part of the inputs
            name: name of the buffer for a copy, which is made if there is a sink
        """
        if part.sink is None:
            return weights
        weights = weights[..., :-1]
        return self.buffers.get(name, weights.shape).copy_(weights)

    # ---- what depends on distances -------------------------------------------------------------

    def memory_by_distance(self, block: Block, b: int) -> tuple[Tensor, Tensor]:
        """Return memory by distance, [h, b * n, n + k - 1], and a view of it by key, [b, h, n, k].

        It is one buffer for scores, gains and gradients by distance, because each step that takes
        it reads at once what it has written there.

        A query's row holds every distance. Its keys lie side by side in it, one number further left
        than for the query before. For n = 3 queries and k = 4 keys the places of the keys are

            query 0    .  .  0  1  2  3
            query 1    .  0  1  2  3  .
            query 2    0  1  2  3  .  .

        so from one query to the next the view steps n + k - 2 numbers.
        """
        _, h, n, k = block.shape
        width = n + k - 1
        distances = self.buffers.get("distances", (h, b * n, width), self.plan.most_distances)
        shape = (b, h, n, k)
        strides = (n * width, b * n * width, width - 1, 1)
        place_of_key_0 = distances.storage_offset() + n - 1
        return distances, distances.as_strided(shape, strides, place_of_key_0)

    def gain_by_key(self, block: Block, gain: Tensor) -> Tensor:
        """Return the gain [h, n + k - 1] of each query's keys, [1, h, n, k]."""
        distances, by_key = self.memory_by_distance(block, 1)
        distances.copy_(gain[:, None].expand_as(distances))
        return by_key

    def apply_gain(self, weights: Tensor, block: Block, gain: Tensor | None) -> Tensor:
        """Return P [b * h, n, k] times the gain of each key's distance."""
        if gain is None:
            return weights
        with_gain = self.buffers.get("P with gain", weights.shape)
        by_key = self.gain_by_key(block, gain)
        torch.mul(weights.view(block.shape), by_key, out=with_gain.view(block.shape))
        return with_gain

    # ---- mixing --------------------------------------------------------------------------------

    def mixed(self, weights: Tensor, part: AttentionInputs) -> Mixed:
        """Return Pbar [b * h', n, k] of P [b * h, n, k], by M or by its factors."""
        n = weights.shape[1]
        if part.mixing is not None:
            heads = part.mixing.shape[-2]
            arranged = self.matrices.arrange(weights, heads, "P, arranged")
            mixed = self.matrices.mix(arranged, part.mixing, n, "Pbar")
            return Mixed(mixed, arranged, None)

        factors = part.factors()
        if factors is not None:
            heads = factors.left.shape[2]
            arranged = self.by_query.arrange(weights, heads, "P, arranged")
            combined = self.by_query.combine(arranged, factors.left, "C")
            mixed = self.by_query.distribute(
                arranged, combined, factors.right, factors.diagonal, "Pbar"
            )
            return Mixed(mixed, arranged, combined)

        return Mixed(weights, None, None)

    # ---- dropout -------------------------------------------------------------------------------

    def drop(self, weights: Tensor, mask: Tensor | None) -> Tensor:
        """Return the weights that dropout leaves, in the memory of its mask.

        Not in place, because these may be the weights that are kept, and be read again.

        Args:
            weights: [b * h', n, k]
            mask: what `dropout_mask` has returned, of the same shape; None to drop nothing
        """
        return weights if mask is None else torch.mul(weights, mask, out=mask)

    def dropout_mask(self, block: Block, shape: tuple[int, ...]) -> Tensor | None:
        """Return dropout's ones and zeros for the block, the same in both passes; None without it.

        A weight stays if its draw, an integer of 16 or 32 bits, is at least as large as the share p
        of all of them.
        """
        if self.dropout_p == 0:
            return None
        mask = self.buffers.get("dropout mask", shape)
        values = torch.iinfo(self.bits_dtype)
        drop = round(self.dropout_p * (values.max - values.min + 1))
        if drop > values.max - values.min:  # p is 1, or nearly: `values.min + drop` is no integer
            return mask.zero_()
        self.generator.manual_seed((self.seed + block.number) % 2**63)
        # Several draws in one number take a fifth of the time of bernoulli_.
        drawn = self.bits[: math.ceil(mask.numel() / self.draws_per_word)]
        drawn.random_(-(2**63), None, generator=self.generator)
        # The same memory, read as numbers of 16 or 32 bits.
        bits = self.bits.view(self.bits_dtype)[: mask.numel()].view(shape)
        return torch.ge(bits, values.min + drop, out=mask)
