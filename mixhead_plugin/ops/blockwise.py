"""Exact attention with mixed heads in linear memory: one block of queries after the other; see blockwise.md.

A block holds all heads, because mixing needs them together, and all keys that its queries may see, because normalizing
does. Nothing of it is kept: the backward pass computes the weights again, dropout's zeros from the same seed.
"""

import math
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mixhead_plugin.ops.forward_mode import refuse_forward_mode
from mixhead_plugin.ops.masks import Block, BlockMasks
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.reference import upcast
from mixhead_plugin.ops.relative import RelativeScores
from mixhead_plugin.ops.workers import share

# Scores in one block: on a CPU what stays in the cache of one core, elsewhere enough to fill the device.
_BLOCK = {"cpu": 2**18}
_BLOCK_ELSEWHERE = 2**24
_MIN_QUERIES = 20  # fewer make slow matrix products


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str,
    mixing: Optional[Tensor],
    causal: bool,
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    relative: Optional[RelativeScores],
    gain: Optional[Tensor],
    dropout_p: float,
    scale: float,
) -> Tensor:
    """`ops.attention` by blocks: the same values in memory linear in Nq + Nk; arguments as there."""
    refuse_forward_mode("blockwise", query, key, value, mixing, gain, relative)
    seed = None
    if dropout_p > 0:
        # From torch's own generator, on the CPU: it repeats with torch.manual_seed and under activation checkpointing.
        seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu")
    relative_query, relative_key = (None, None) if relative is None else relative
    return torch.ops.mixhead_plugin.blockwise(
        query,
        key,
        value,
        mixing,
        attn_mask,
        key_padding_mask,
        relative_query,
        relative_key,
        gain,
        seed,
        normalizer,
        causal,
        dropout_p,
        scale,
    )


class _Call:
    """One call of the attention: its tensors in the dtype of the computation, and its blocks."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mixing: Optional[Tensor],
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        relative_query: Optional[Tensor],
        relative_key: Optional[Tensor],
        gain: Optional[Tensor],
        seed: Optional[Tensor],
        normalizer: str,
        causal: bool,
        dropout_p: float,
        scale: float,
        learned_mask: bool = False,
    ):
        n_queries, n_keys = query.shape[2], key.shape[2]
        self.mixed_heads = slice(0, value.shape[1])
        self.query, self.key, self.value = upcast(query), upcast(key), upcast(value)
        self.dtype, self.device = self.query.dtype, query.device
        self.mixing = None if mixing is None else mixing.to(self.dtype)
        self.relative = None
        if relative_query is not None:
            missing = max(0, n_queries + n_keys - 1 - relative_key.shape[1])  # of keys after their queries
            self.relative = RelativeScores(upcast(relative_query), F.pad(upcast(relative_key), [0, 0, 0, missing]))
        self.distance_gain = None if gain is None else gain.to(self.dtype)
        self.normalizer = NORMALIZERS[normalizer]
        self.dropout_p, self.seed = dropout_p, 0 if seed is None else int(seed)
        self.kept_gain = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0  # of what dropout keeps
        self.scale = scale
        cuts = _cut(query.shape, n_keys, mixing is not None, self.device)
        self.masks = BlockMasks(causal, attn_mask, key_padding_mask, n_queries, n_keys, *cuts, self.query, learned_mask)
        self.blocks = [block for block in self.masks.blocks if block.keys.start < block.keys.stop]
        # numbers in the largest block of scores or of mixed weights
        more = max(1.0, value.shape[1] / max(1, query.shape[1]))
        self.largest = math.ceil(more * max((_size(block) for block in self.blocks), default=0))
        self.most_distances = max(
            (_size(block) // _length(block.keys) * _distances(block) for block in self.blocks), default=0
        )

    def of_queries(self, tensor: Tensor, block: Block) -> Tensor:
        """What a tensor [B, H, Nq, D] holds of the block, [b, h, n, D]"""
        return tensor[block.sentences, block.heads, block.queries]

    def of_keys(self, tensor: Tensor, block: Block) -> Tensor:
        """What a tensor [B, H, Nk, D] holds of the block, [b, h, k, D]"""
        return tensor[block.sentences, block.heads, block.keys]

    def of_values(self, tensor: Tensor, block: Block) -> Tensor:
        """What a tensor [B, H', Nk, Dv] holds of the block, [b, h', k, Dv]"""
        return tensor[block.sentences, self.heads_of_values(block), block.keys]

    def of_output(self, tensor: Tensor, block: Block) -> Tensor:
        """What a tensor [B, H', Nq, Dv] holds of the block, [b, h', n, Dv]"""
        return tensor[block.sentences, self.heads_of_values(block), block.queries]

    def heads_of_values(self, block: Block) -> slice:
        return block.heads if self.mixing is None else self.mixed_heads

    def of_distances(self, tensor: Tensor, block: Block) -> Tensor:
        """What a tensor [H, P, ...] holds of the distances in the block, [h, n + k - 1, ...]"""
        first = block.keys.start - block.queries.stop + self.query.shape[2]
        return tensor[block.heads, first : first + _distances(block)]

    def of_mixing(self, tensor: Optional[Tensor], block: Block) -> Optional[Tensor]:
        """What M or its gradient holds of the block, [H, H] or [b, n, H, H]"""
        return tensor if tensor is None or tensor.dim() == 2 else tensor[block.sentences, block.queries]


class _Views(NamedTuple):
    """What the call's inputs hold of one block.

    Views are cheap, but not while another thread is in Python: all of them are made before the threads start.
    """

    number: int
    block: Block
    query: Tensor  # [b * h, n, D]
    key: Tensor  # [b * h, k, D]
    value: Tensor  # [b * h', k, Dv]
    mixing: Optional[Tensor]  # [H, H'] or [b, n, H, H']
    relative: Optional[RelativeScores]  # query [h, b * n, D], key [h, n + k - 1, D]
    gain: Optional[Tensor]  # [h, n + k - 1]


def _views(call: _Call, number: int, block: Block) -> _Views:
    relative = None
    if call.relative is not None:
        by_head = call.of_queries(call.relative.query, block).transpose(0, 1)  # [h, b, n, D]
        relative = RelativeScores(by_head.flatten(1, 2), call.of_distances(call.relative.key, block))
    return _Views(
        number,
        block,
        call.of_queries(call.query, block).flatten(0, 1),
        call.of_keys(call.key, block).flatten(0, 1),
        call.of_values(call.value, block).flatten(0, 1),
        call.of_mixing(call.mixing, block),
        relative,
        None if call.distance_gain is None else call.of_distances(call.distance_gain, block),
    )


class _Worker:
    """The steps that both passes share, with buffers that serve one block after the other.

    Sentences and heads are one dimension, [b * h, n, k], except where heads mix.
    """

    def __init__(self, call: _Call):
        self.call = call
        self.memory: Dict[str, Tensor] = {}
        self.shaped: Dict[Tuple[Any, ...], Tensor] = {}
        # Scores that no gradient will ask for make room.
        self.mixed = "mixed" if call.normalizer.grad_reads_scores else "scores"
        self.generator = self.bits = None
        if call.dropout_p > 0:
            self.generator = torch.Generator(call.device)
            # 16 bits for each weight, and 32 where that would round the probability noticeably
            self.draw = torch.int16 if 0.01 <= call.dropout_p <= 0.9 else torch.int32
            self.draws = 8 // self.draw.itemsize  # in one 64-bit number
            self.bits = torch.empty(math.ceil(call.largest / self.draws), dtype=torch.int64, device=call.device)

    def buffer(self, name: str, shape: Tuple[int, ...]) -> Tensor:
        """Memory for one tensor of each block: fresh pages from the system would cost as much as the sums in them."""
        view = self.shaped.get((name, shape))
        if view is None:
            if name not in self.memory:
                size = self.call.most_distances if name == "distances" else self.call.largest
                self.memory[name] = torch.empty(size, dtype=self.call.dtype, device=self.call.device)
            view = self.shaped[name, shape] = self.memory[name][: math.prod(shape)].view(shape)
        return view

    def weights(self, views: _Views) -> Tuple[Tensor, Tensor]:
        """Scores and P, [b * h, n, k]"""
        call, block = self.call, views.block
        shape = (len(views.query), views.query.shape[1], views.key.shape[1])
        scores = self.buffer("scores", shape)
        torch.baddbmm(scores, views.query, views.key.transpose(1, 2), beta=0, alpha=call.scale, out=scores)
        by_head = scores.view(-1, _length(block.heads), *shape[1:])  # [b, h, n, k]
        if views.relative is not None:
            distances, shifted = self.distances(views, len(by_head))
            torch.bmm(views.relative.query, views.relative.key.transpose(1, 2), out=distances)
            by_head.add_(shifted)
        call.masks.add_to(by_head, block)
        return scores, call.normalizer.weights(scores, call.masks.seen, self.buffer("weights", shape))

    def distances(self, views: _Views, b: int = 1) -> Tuple[Tensor, Tensor]:
        """Memory for a number for each query and distance, [h, b * n, n + k - 1], and what of it is each key's.

        The latter is a view [b, h, n, k]: a query's keys stand side by side, one place further on than the next one's.
        """
        h, n, k = (_length(part) for part in (views.block.heads, views.block.queries, views.block.keys))
        width = n + k - 1
        distances = self.buffer("distances", (h, b * n, width))
        shape, strides = (b, h, n, k), (n * width, b * n * width, width - 1, 1)
        return distances, distances.as_strided(shape, strides, distances.storage_offset() + n - 1)

    def gained(self, weights: Tensor, views: _Views) -> Tensor:
        """P [b * h, n, k] times the gain of each key's distance"""
        if views.gain is None:
            return weights
        distances, shifted = self.distances(views)
        distances.copy_(views.gain[:, None].expand_as(distances))
        by_head = weights.view(-1, *shifted.shape[1:])  # [b, h, n, k]
        gained = self.buffer("gained", weights.shape)
        torch.mul(by_head, shifted, out=gained.view(by_head.shape))
        return gained

    def gain_grads(self, weights: Tensor, d_gained: Tensor, views: _Views) -> Tuple[Tensor, Tensor]:
        """dP [b * h, n, k], in the memory of d_gained, and the gain's [h, n + k - 1]"""
        distances, shifted = self.distances(views)
        by_head = weights.view(-1, *shifted.shape[1:])  # [b, h, n, k]
        distances.zero_()
        torch.sum(by_head * d_gained.view(by_head.shape), 0, keepdim=True, out=shifted)
        d_gain = distances.sum(1)
        distances.copy_(views.gain[:, None].expand_as(distances))
        d_gained.view(by_head.shape).mul_(shifted)
        return d_gained, d_gain

    def relative_grads(self, views: _Views, d_scores: Tensor) -> Tuple[Tensor, Tensor]:
        """d query [h, b * n, D] and d key [h, n + k - 1, D] of the relative scores, from d_scores [b * h, n, k]"""
        d_distances, shifted = self.distances(views, len(d_scores) // _length(views.block.heads))
        d_distances.zero_()
        shifted.copy_(d_scores.view(shifted.shape))
        relative = views.relative
        return torch.bmm(d_distances, relative.key), torch.bmm(d_distances.transpose(1, 2), relative.query)

    def mix(self, weights: Tensor, mixing: Tensor) -> Tensor:
        """sum_j M[j, i] P_j, [b * h', n, k], of weights P [b * h, n, k], with M [H, H'] or [b, n, H, H']"""
        (rows, n, k), (sources, heads) = weights.shape, mixing.shape[-2:]
        b = rows // sources
        if mixing.dim() == 2:
            mixed = self.buffer(self.mixed, (b, heads, n * k))
            torch.bmm(mixing.t().expand(b, heads, sources), weights.view(b, sources, n * k), out=mixed)
            return mixed.view(b * heads, n, k)
        mixed = self.buffer(self.mixed, (b * n, heads, k))
        by_query = weights.view(b, sources, n, k).transpose(1, 2).flatten(0, 1)  # [b * n, H, k], a copy if b > 1
        torch.bmm(mixing.transpose(2, 3).flatten(0, 1), by_query, out=mixed)
        return mixed.view(b, n, heads, k).transpose(1, 2).flatten(0, 1)

    def mixing_grad(self, weights: Tensor, d_mixed: Tensor, mixing: Tensor) -> Tensor:
        """dM[j, i] = sum_k P_j dPbar_i, summed further to [H, H'] where M is shared"""
        sources, heads = mixing.shape[-2:]
        weights, d_mixed = weights.unflatten(0, (-1, sources)), d_mixed.unflatten(0, (-1, heads))  # [b, H, n, k]
        if mixing.dim() == 2:
            return torch.bmm(weights.flatten(2), d_mixed.flatten(2).transpose(1, 2)).sum(0)
        by_query, d_by_query = weights.transpose(1, 2).flatten(0, 1), d_mixed.transpose(1, 2).flatten(0, 1)
        return torch.bmm(by_query, d_by_query.transpose(1, 2)).view(mixing.shape)  # [b, n, H, H']

    def keep(self, number: int, shape: Tuple[int, ...]) -> Tensor:
        """Dropout's ones and zeros for the block of this number, the same in both passes."""
        keep = self.buffer("keep", shape)
        values = torch.iinfo(self.draw)
        drop = round(self.call.dropout_p * (values.max - values.min + 1))
        if drop > values.max - values.min:
            return keep.zero_()
        self.generator.manual_seed((self.call.seed + number) % 2**63)
        # Several draws in one number: a fifth of the time of bernoulli_.
        self.bits[: math.ceil(keep.numel() / self.draws)].random_(-(2**63), None, generator=self.generator)
        bits = self.bits.view(self.draw)[: keep.numel()].view(shape)
        return torch.ge(bits, values.min + drop, out=keep)


class _Turns:
    """Lets blocks add to the same memory one after the other, in a fixed order: sums of floats depend on it.

    A block waits only for blocks of a lower number, which a thread has taken before: so no two wait for one another.
    """

    def __init__(self, n_blocks: int):
        self.over = [threading.Event() for _ in range(n_blocks)]

    @contextmanager
    def turn(self, number: int, after: int) -> Iterator[None]:
        """The turn of block `number`, which comes after that of block `after`; a negative one is over at once."""
        if after >= 0:
            self.over[after].wait()
        try:
            yield
        finally:
            self.over[number].set()


def _for_each(call: _Call, work: Callable[[_Worker, Any], None], items: Sequence[Any]) -> None:
    def go_through(some: Iterator[Any]) -> None:
        worker = _Worker(call)
        for item in some:
            work(worker, item)

    share(go_through, items, call.device)


def _attend(call: _Call, output: Tensor) -> None:
    """O = dropout(Pbar) V into `output` [B, H', Nq, Dv], which holds zeros"""

    def work(worker: _Worker, item: Tuple[_Views, Tensor]) -> None:
        views, out = item
        _, weights = worker.weights(views)  # [b * h, n, k]
        mixed = worker.gained(weights, views)
        if views.mixing is not None:
            mixed = worker.mix(mixed, views.mixing)  # [b * h', n, k]
        if call.dropout_p > 0:
            mixed = mixed.mul_(worker.keep(views.number, mixed.shape))
        rows = torch.bmm(mixed, views.value)  # [b * h, n, Dv]
        torch.mul(rows.view(out.shape), call.kept_gain, out=out)

    items = [(_views(call, i, block), call.of_output(output, block)) for i, block in enumerate(call.blocks)]
    _for_each(call, work, items)


class _GradViews(NamedTuple):
    """What the gradients hold of one block."""

    output: Tensor  # [b * h', n, Dv]
    query: Tensor  # [b, h, n, D]
    key: Tensor  # [b, h, k, D]
    value: Tensor  # [b, h', k, Dv]
    mixing: Optional[Tensor]  # [H, H'], of this block alone, or [b, n, H, H']
    relative: Optional[RelativeScores]  # query [b, h, n, D], key [h, n + k - 1, D]
    gain: Optional[Tensor]  # [h, n + k - 1]
    before: int  # the number of the last block before it that adds to the same keys, -1 for none


class _Gradients:
    """The gradients of one call, in the dtype of the computation, from that of its output [B, H', Nq, Dv]."""

    def __init__(self, call: _Call, d_output: Tensor, learned_mask: bool):
        self.call = call
        n = len(call.blocks)
        self.value_turns, self.key_turns, self.mask_turns = _Turns(n), _Turns(n), _Turns(n)
        self.gain_turns, self.relative_turns = _Turns(n), _Turns(n)
        self.turns = (self.value_turns, self.key_turns, self.mask_turns, self.gain_turns, self.relative_turns)
        self.query, self.key, self.value = (torch.zeros_like(t) for t in (call.query, call.key, call.value))
        self.attn_mask = None
        if learned_mask:
            self.attn_mask = torch.zeros_like(call.masks.attn_mask, dtype=call.dtype)
        self.relative = None
        if call.relative is not None:
            self.relative = RelativeScores(*(torch.zeros_like(tensor) for tensor in call.relative))
        self.gain = None if call.distance_gain is None else torch.zeros_like(call.distance_gain)
        self.mixing = shares = None
        if call.mixing is not None and call.mixing.dim() == 4:
            self.mixing = torch.zeros_like(call.mixing)
        elif call.mixing is not None:
            shares = call.mixing.new_zeros(n, *call.mixing.shape)

        d_output = d_output.to(call.dtype)
        before = _before(call.blocks)
        items = []
        for i, block in enumerate(call.blocks):
            grads = _GradViews(
                call.of_output(d_output, block).flatten(0, 1),
                call.of_queries(self.query, block),
                call.of_keys(self.key, block),
                call.of_values(self.value, block),
                call.of_mixing(self.mixing, block) if shares is None else shares[i],
                self._of_relative(block),
                None if self.gain is None else call.of_distances(self.gain, block),
                before[i],
            )
            items.append((_views(call, i, block), grads))
        _for_each(call, self._work, items)
        if shares is not None:
            self.mixing = torch.empty_like(call.mixing).copy_(shares.sum(0))  # in the order of M's memory

    def _of_relative(self, block: Block) -> Optional[RelativeScores]:
        if self.relative is None:
            return None
        query, key = self.relative
        return RelativeScores(self.call.of_queries(query, block), self.call.of_distances(key, block))

    def _work(self, worker: _Worker, item: Tuple[_Views, _GradViews]) -> None:
        views, grads = item
        try:
            self._add(worker, views, grads)
        except BaseException:  # the call fails, and nobody may wait for this block
            for turns in self.turns:
                turns.over[views.number].set()
            raise

    def _add(self, worker: _Worker, views: _Views, grads: _GradViews) -> None:
        call = self.call
        scores, weights = worker.weights(views)  # [b * h, n, k]
        gained = mixed = worker.gained(weights, views)
        if views.mixing is not None:
            mixed = worker.mix(gained, views.mixing)  # [b * h', n, k]
        d_rows = grads.output * call.kept_gain  # [b * h', n, Dv]
        d_mixed = worker.buffer("d_mixed", mixed.shape)
        torch.bmm(d_rows, views.value.transpose(1, 2), out=d_mixed)
        if call.dropout_p > 0:
            keep = worker.keep(views.number, mixed.shape)
            mixed = mixed * keep if views.mixing is None else mixed.mul_(keep)
            d_mixed.mul_(keep)

        with self.value_turns.turn(views.number, grads.before):
            _add_products(grads.value, mixed, d_rows, 1.0)
        d_weights = d_mixed
        if views.mixing is not None:
            grads.mixing.copy_(worker.mixing_grad(gained, d_mixed, views.mixing))
            d_weights = worker.mix(d_mixed, views.mixing.transpose(-2, -1))
        if grads.gain is not None:
            d_weights, d_gain = worker.gain_grads(weights, d_weights, views)
            with self.gain_turns.turn(views.number, views.number - 1):
                grads.gain.add_(d_gain)
        out = worker.buffer("d_scores" if views.mixing is None else "d_mixed", weights.shape)
        d_scores = call.normalizer.grad(scores, weights, d_weights, out)  # [b * h, n, k]
        if self.attn_mask is not None:
            with self.mask_turns.turn(views.number, views.number - 1):
                call.masks.add_grad(
                    self.attn_mask, d_scores.view(*grads.query.shape[:2], *d_scores.shape[1:]), views.block
                )
        if grads.relative is not None:
            d_query, d_key = worker.relative_grads(views, d_scores)
            grads.relative.query.copy_(d_query.unflatten(1, (-1, weights.shape[1])).transpose(0, 1))
            with self.relative_turns.turn(views.number, views.number - 1):
                grads.relative.key.add_(d_key)
        d_query = torch.bmm(d_scores, views.key)  # [b * h, n, D]
        torch.mul(d_query.view(grads.query.shape), call.scale, out=grads.query)
        with self.key_turns.turn(views.number, grads.before):
            _add_products(grads.key, d_scores, views.query, call.scale)


def _before(blocks: List[Block]) -> List[int]:
    """For each block the last one before it that has the same sentences and heads, -1 for none."""
    latest: Dict[Tuple[int, int], int] = {}
    before = []
    for number, block in enumerate(blocks):
        place = (block.sentences.start, block.heads.start)
        before.append(latest.get(place, -1))
        latest[place] = number
    return before


def _add_products(total: Tensor, d_weights: Tensor, rows: Tensor, factor: float) -> None:
    """total [b, H, k, D] += factor * W^T R, with W [b * h, n, k] and R [b * h, n, D]"""
    if len(total) == 1:
        total[0].baddbmm_(d_weights.transpose(1, 2), rows, alpha=factor)
    else:  # many small products: at once, then added
        products = torch.bmm(d_weights.transpose(1, 2), rows)
        total.add_(products.unflatten(0, total.shape[:2]), alpha=factor)


def _length(part: slice) -> int:
    return part.stop - part.start


def _size(block: Block) -> int:
    """The number of its scores"""
    return math.prod(_length(part) for part in (block.sentences, block.heads, block.queries, block.keys))


def _distances(block: Block) -> int:
    """The number of different distances between its queries and its keys"""
    return _length(block.queries) + _length(block.keys) - 1


def _cut(
    shape: torch.Size, n_keys: int, mixing: bool, device: torch.device
) -> Tuple[List[slice], List[slice], List[slice]]:
    """Slices of the batch, the heads and the queries [B, H, Nq, D] for blocks of the size that suits the device."""
    batch, heads, n_queries, _ = shape
    room = _BLOCK.get(device.type, _BLOCK_ELSEWHERE) // max(1, n_keys)
    together = max(1, heads if mixing else min(heads, room // _MIN_QUERIES))
    rows = max(1, min(n_queries, max(_MIN_QUERIES, room // together)))
    some = max(1, min(batch, room // (together * rows))) if together == heads else 1
    return _slices(batch, some), _slices(heads, together), _slices(n_queries, rows)


def _slices(n: int, size: int) -> List[slice]:
    return [slice(start, min(n, start + size)) for start in range(0, n, size)]


def _output_like(query: Tensor, value: Tensor) -> Tensor:
    """Zeros [B, H', Nq, Dv] that lie in memory in the order of `query`, so that reshaping them needs no copy."""
    order = sorted(range(4), key=query.stride, reverse=True)
    shape = [query.shape[0], value.shape[1], query.shape[2], value.shape[3]]
    return query.new_zeros([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    relative_query: Optional[Tensor],
    relative_key: Optional[Tensor],
    gain: Optional[Tensor],
    seed: Optional[Tensor],
    normalizer: str,
    causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    tensors = (query, key, value, mixing, attn_mask, key_padding_mask, relative_query, relative_key, gain, seed)
    output = _output_like(upcast(query), value)
    _attend(_Call(*tensors, normalizer, causal, dropout_p, scale), output)
    return output.to(value.dtype)


def _forward_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return _output_like(query, value)


def _backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    relative_query: Optional[Tensor],
    relative_key: Optional[Tensor],
    gain: Optional[Tensor],
    seed: Optional[Tensor],
    normalizer: str,
    causal: bool,
    dropout_p: float,
    scale: float,
    learned_mask: bool,
) -> List[Tensor]:
    """Gradients of query, key, value, then of mixing and of the relative scores if given, of attn_mask if asked for."""
    tensors = (query, key, value, mixing, attn_mask, key_padding_mask, relative_query, relative_key, gain, seed)
    grads = _Gradients(_Call(*tensors, normalizer, causal, dropout_p, scale, learned_mask), d_output, learned_mask)
    found = [(grads.query, query), (grads.key, key), (grads.value, value)]
    if mixing is not None:
        found.append((grads.mixing, mixing))
    if relative_query is not None:
        d_key = torch.empty_like(relative_key, dtype=grads.relative.key.dtype)  # likewise
        d_key.copy_(grads.relative.key[:, : relative_key.shape[1]])
        found += [(grads.relative.query, relative_query), (d_key, relative_key)]
    if gain is not None:
        found.append((grads.gain, gain))
    if learned_mask:
        found.append((grads.attn_mask.view(attn_mask.shape), attn_mask))
    return [grad.to(tensor.dtype) for grad, tensor in found]


def _backward_fake(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    relative_query: Optional[Tensor],
    relative_key: Optional[Tensor],
    gain: Optional[Tensor],
    *rest: Any,
) -> List[Tensor]:
    found = [query, key, value, *(t for t in (mixing, relative_query, relative_key, gain) if t is not None)]
    if rest[-1]:
        found.append(attn_mask)
    return [torch.empty_like(tensor) for tensor in found]


def _save(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:10])
    ctx.options = inputs[10:]


def _differentiate(ctx: Any, d_output: Tensor) -> Tuple[Optional[Tensor], ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing computes them when asked, and hands them out once
    mixing, attn_mask, _, relative_query, _, gain = saved[3:9]
    learned_mask = attn_mask is not None and ctx.needs_input_grad[4]
    grads = torch.ops.mixhead_plugin.blockwise_backward(d_output, *saved, *ctx.options, learned_mask)
    rest = iter(grads[3:])
    d_mixing = next(rest) if mixing is not None else None
    d_relative = (next(rest), next(rest)) if relative_query is not None else (None, None)
    d_gain = next(rest) if gain is not None else None
    d_attn_mask = next(rest) if learned_mask else None
    return (*grads[:3], d_mixing, d_attn_mask, None, *d_relative, d_gain, None, None, None, None, None)


def _register(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Make an operator of torch, which torch.compile takes as a whole; `fake` gives its results' shapes and strides."""
    # Not by torch.library.custom_op: its first call loads the compiler, a second and 35 MiB for who does not compile.
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "default", function)
    torch.library.register_fake(name, fake)


def _no_second_derivative(ctx: Any, *d_grads: Any) -> None:
    raise NotImplementedError("impl 'blockwise' has no second derivative; impl 'reference' has")


_register("mixhead_plugin::blockwise", _forward, _forward_fake)
_register("mixhead_plugin::blockwise_backward", _backward, _backward_fake)
torch.library.register_autograd("mixhead_plugin::blockwise", _differentiate, setup_context=_save)
torch.library.register_autograd("mixhead_plugin::blockwise_backward", _no_second_derivative)
