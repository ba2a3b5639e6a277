"""The forward pass of one block of queries, and the steps that the backward pass repeats.

    Q [b, h, n, D]  x  K [b, h, k, D]    ->  S     scores            [b * h, n, k]
    S    normalizer, row by row          ->  P     weights           [b * h, n, k]
    P    M mixes the heads               ->  Pbar  mixed weights     [b * h', n, k]
    Pbar, some dropped  x  V [b, h', k, Dv]   ->   O   output        [b * h', n, Dv]

for b sentences, h heads before and h' after mixing, n queries and k keys of one block.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.masks import NARROW, Block
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.blockwise.threads import parallel_for, threads_for
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.normalizers import NORMALIZERS


def forward(plan: Plan, output: Tensor, kept: Tensor | None) -> None:
    """Write O = dropout(Pbar) V into `output`.

    Args:
        plan: the blocks of the call
        output: [B, H', Nq, Dv]; it holds zeros unless `plan.complete`
        kept: memory of `plan.kept_numbers` for what the backward pass reads again, or None
    """

    def work(share: Iterator[tuple[Block, AttentionInputs, Tensor]]) -> None:
        """Go through a thread's share of the blocks, with buffers of its own."""
        steps = Steps(plan, kept)
        for block, part, out in share:
            _, with_sink = steps.weights(block, part)
            weights = steps.without_sink(with_sink, part)  # [b * h, n, k]
            with_gain = steps.apply_gain(weights, block, part.gain)
            mixed = steps.mixed(with_gain, part)  # [b * h', n, k]
            if steps.dropout_p > 0:
                # Not in place: these may be the weights that are kept for the backward pass. The
                # mask is not needed any more.
                mask = steps.dropout_mask(block, mixed.shape)
                mixed = torch.mul(mixed, mask, out=mask)
            rows = product(mixed, part.value, steps.dropout_scale)  # [b * h', n, Dv]
            out.copy_(rows.view(out.shape))

    items = []
    for block in plan.by_site(threads_for(output.device)):
        items.append((block, inputs_of_block(plan, block), block.part("output", output)))
    parallel_for(work, items, output.device)


def product(a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return alpha A B, [batch, m, n].

    Args:
        a: A, [batch, m, k]
        b: B, [batch, k, n]
        alpha: a number
        out: memory for the result, of any strides; None for new memory
    """
    if a.is_cpu and b.shape[2] < NARROW <= a.shape[1]:
        # MKL is slow where the result has few columns. (B^T A^T)^T has few rows instead.
        found = product(b.transpose(1, 2), a.transpose(1, 2), alpha).transpose(1, 2)
        return found if out is None else out.copy_(found)
    if out is None:
        out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    # beta = 0: what `out` holds, even NaN, does not count
    return torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)


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
    for name, tensor in plan.given.items():
        if name in ("query", "key", "value"):
            parts[name] = block.matrices(name, tensor)
        else:
            parts[name] = block.part(name, tensor)
    if "relative_query" in parts:
        by_head = parts["relative_query"].transpose(0, 1)  # [h, b, n, R]
        parts["relative_query"] = by_head.flatten(1, 2)
    return plan.inputs.with_tensors(parts)


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
        self.memory: dict[str, Tensor] = {}  # of each buffer, by its name
        self.shaped: dict[tuple[Any, ...], Tensor] = {}  # views of it, by name and shape

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
            most = math.ceil(plan.largest / self.draws_per_word)
            self.bits = torch.empty(most, dtype=torch.int64, device=device)

    # ---- memory --------------------------------------------------------------------------------

    def buffer(self, name: str, shape: tuple[int, ...], most: int | None = None) -> Tensor:
        """Return memory that every block reuses.

        Fresh pages of the system cost as much time as computing what is written to them.

        Args:
            name: of the buffer
            shape: that it has in this block
            most: numbers in the largest block; None for the scores of the largest block
        """
        view = self.shaped.get((name, shape))
        if view is not None:
            return view
        if name not in self.memory:
            self.memory[name] = self.plan.inputs.query.new_empty(most or self.plan.largest)
        view = self.memory[name][: math.prod(shape)].view(shape)
        self.shaped[name, shape] = view
        return view

    def lasting(self, name: str, block: Block, shape: tuple[int, ...]) -> Tensor:
        """Return memory for one of `plan.keeps`: the call's own if it keeps weights, or a buffer.

        In `kept` each block has a stretch, with room of the same length for each name.
        """
        if self.kept is None:
            return self.buffer(name, shape)
        start = self.plan.kept_at(name, block)
        return self.kept[start : start + math.prod(shape)].view(shape)

    # ---- weights -------------------------------------------------------------------------------

    def weights(self, block: Block, part: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return the scores and P, [b * h, n, k]; with a sink one more column, [b * h, n, k + 1].

        Where the normalizer's gradient reads no scores, P overwrites them: both are one tensor.

        Args:
            block: the block
            part: the block's part of the inputs, as `inputs_of_block` shapes it
        """
        b, h, n, k = block.shape
        width = k if part.sink is None else k + 1
        weights = self.lasting("weights", block, (b * h, n, width))
        scores = weights
        if self.normalizer.grad_reads_scores:
            scores = self.lasting("scores", block, weights.shape)
        if self.kept is not None and self.written:
            return scores, weights

        # scale * Q K^T, mixed
        of_keys = scores[..., :k]
        if part.score_mixing is None:
            product(part.query, part.key.transpose(1, 2), self.scale, of_keys)
        else:
            products = self.products(block)
            product(part.query, part.key.transpose(1, 2), self.scale, products)
            of_keys.copy_(self.mix(products, part.score_mixing, "mixed products"))

        # One more column, which no mask and no bias reaches
        if part.sink is not None:
            scores.view(b, h, n, k + 1)[..., k] = part.sink[:, None]

        # Relative scores, biases and masks
        by_head = of_keys.view(b, h, n, k)
        if part.relative_query is not None and part.relative_key is not None:
            distances, shifted = self.distances(block, b)
            torch.bmm(part.relative_query, part.relative_key.transpose(1, 2), out=distances)
            by_head.add_(shifted)
        self.plan.masks.add_to(by_head, block)

        return scores, self.normalizer.weights(scores, self.plan.masks.seen, weights)

    def products(self, block: Block) -> Tensor:
        """Return memory for scale * Q K^T before scores are mixed, [b * h, n, k]."""
        b, h, n, k = block.shape
        return self.lasting("products", block, (b * h, n, k))

    def without_sink(self, weights: Tensor, part: AttentionInputs) -> Tensor:
        """Return P [b * h, n, k] in one piece of memory, without the column of a sink."""
        if part.sink is None:
            return weights
        weights = weights[..., :-1]
        return self.buffer("without sink", weights.shape).copy_(weights)

    # ---- what depends on distances -------------------------------------------------------------

    def distances(self, block: Block, b: int) -> tuple[Tensor, Tensor]:
        """Return memory by distance, [h, b * n, n + k - 1], and a view of it by key, [b, h, n, k].

        A query's row holds every distance. Its keys lie side by side in it, one number further left
        than for the query before. For n = 3 queries and k = 4 keys the places of the keys are

            query 0    .  .  0  1  2  3
            query 1    .  0  1  2  3  .
            query 2    0  1  2  3  .  .

        so from one query to the next the view steps n + k - 2 numbers.
        """
        _, h, n, k = block.shape
        width = n + k - 1
        distances = self.buffer("distances", (h, b * n, width), self.plan.most_distances)
        shape = (b, h, n, k)
        strides = (n * width, b * n * width, width - 1, 1)
        first = distances.storage_offset() + n - 1
        return distances, distances.as_strided(shape, strides, first)

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
        by_key = self.gain_by_key(block, gain)
        torch.mul(weights.view(block.shape), by_key, out=with_gain.view(block.shape))
        return with_gain

    # ---- mixing --------------------------------------------------------------------------------
    #
    # By M:            P  ->  `arranged`  ->  `mix_arranged`  ->  Pbar
    # By its factors:  P  ->  `arranged`  ->  `combine` to C, R sums of heads
    #                                     ->  `distribute` C and P  ->  Pbar

    def mixed(self, weights: Tensor, part: AttentionInputs) -> Tensor:
        """Return the mixed weights [b * h', n, k] of P [b * h, n, k], by M or by its factors."""
        factors = part.factors()
        if factors is None:
            return self.mix(weights, part.mixing)
        arranged = self.arranged(weights, factors.left, "by query")
        combined = self.combine(arranged, factors.left, "combined")
        return self.distribute(arranged, combined, factors.right, factors.diagonal)

    def arranged(self, weights: Tensor, mixing: Tensor, name: str) -> Tensor:
        """Return P [b * h, n, k] as the matrices that M multiplies from the left, one row a head.

        M [H, H'] is shared by all queries, so a matrix holds all of a sentence: [b, h, n * k]. M
        [b, n, H, H'] has a matrix for each query: [b * n, h, k]; so have factors. There one
        sentence needs only other strides, and several need a copy, which goes to the buffer `name`.
        """
        if mixing.dim() == 2:
            return weights.unflatten(0, (-1, mixing.shape[0])).flatten(2)
        by_element = weights.unflatten(0, (mixing.shape[0], mixing.shape[-2]))
        by_query = by_element.transpose(1, 2)  # [b, n, h, k]
        if by_query.shape[0] > 1:
            by_query = self.buffer(name, by_query.shape).copy_(by_query)
        return by_query.flatten(0, 1)

    def mix(self, weights: Tensor, mixing: Tensor | None, name: str = "mixed") -> Tensor:
        """Return sum_j M[j, i] P_j, [b * h', n, k].

        Args:
            weights: P, [b * h, n, k]
            mixing: M, [H, H'] or [b, n, H, H']; None to return the weights as they are
            name: of the buffer for the result
        """
        if mixing is None:
            return weights
        arranged = self.arranged(weights, mixing, "by query")
        return self.mix_arranged(arranged, mixing, weights.shape[1], name)

    def mix_arranged(self, weights: Tensor, mixing: Tensor, n: int, name: str = "mixed") -> Tensor:
        """Return sum_j M[j, i] P_j, [b * h', n, k], for weights that are `arranged`.

        Args:
            weights: P, [b, h, n * k] or [b * n, h, k]
            mixing: M, [H, H'] or [b, n, H, H']
            n: queries of the block
            name: of the buffer for the result
        """
        heads = mixing.shape[-1]
        if mixing.dim() == 2:
            mixed = self.buffer(name, (weights.shape[0], heads, weights.shape[2]))
            torch.bmm(mixing.t().expand(weights.shape[0], -1, -1), weights, out=mixed)
            return mixed.view(weights.shape[0] * heads, n, -1)

        # The products are arranged by query. Of several sentences they are copied to `name`.
        several = mixing.shape[0] > 1
        found_in = "mixed by query" if several else name
        mixed = self.buffer(found_in, (weights.shape[0], heads, weights.shape[2]))
        product(mixing.transpose(2, 3).flatten(0, 1), weights, out=mixed)
        return self._by_head(mixed, n, name if several else "")

    def combine(self, weights: Tensor, factor: Tensor, name: str) -> Tensor:
        """Return C_r = sum_j left[j, r] P_j, [b * n, R, k].

        Args:
            weights: P, `arranged` by query, [b * n, h, k]
            factor: left, [b, n, h, R]; in the backward pass right
            name: of the buffer for the result
        """
        # The largest block has largest / h pairs of a query and a key.
        rank = factor.shape[3]
        most = self.plan.largest // weights.shape[1] * rank
        combined = self.buffer(name, (weights.shape[0], rank, weights.shape[2]), most)
        return product(factor.transpose(2, 3).flatten(0, 1), weights, out=combined)

    def distribute(
        self, weights: Tensor, combined: Tensor, factor: Tensor, diagonal: Tensor
    ) -> Tensor:
        """Return (1 + diagonal_i) P_i + sum_r right[i, r] C_r, [b * h, n, k].

        Args:
            weights: P, `arranged` by query, [b * n, h, k]
            combined: C, [b * n, R, k]
            factor: right, [b, n, h, R]; in the backward pass left
            diagonal: [b, n, h]
        """
        several = factor.shape[0] > 1
        mixed = self.buffer("mixed by query" if several else "mixed", weights.shape)
        torch.mul(weights, (1 + diagonal).flatten(0, 1)[:, :, None], out=mixed)
        mixed.baddbmm_(factor.flatten(0, 1), combined)
        return self._by_head(mixed, diagonal.shape[1], "mixed" if several else "")

    def _by_head(self, mixed: Tensor, n: int, name: str) -> Tensor:
        """Return matrices by query, [b * n, h', k], as [b * h', n, k].

        Args:
            mixed: the matrices
            n: queries of the block
            name: of the buffer for a copy, which several sentences need; empty for one sentence
        """
        mixed = mixed.unflatten(0, (-1, n)).transpose(1, 2)  # [b, h', n, k]
        if name:
            mixed = self.buffer(name, mixed.shape).copy_(mixed)
        return mixed.flatten(0, 1)

    # ---- dropout -------------------------------------------------------------------------------

    def dropout_mask(self, block: Block, shape: tuple[int, ...]) -> Tensor:
        """Return dropout's ones and zeros for the block, the same in both passes.

        A weight stays if its draw, an integer of 16 or 32 bits, is at least as large as the share p
        of all of them.
        """
        mask = self.buffer("dropout mask", shape)
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
