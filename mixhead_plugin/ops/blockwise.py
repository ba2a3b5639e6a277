"""Exact attention with mixed heads in linear memory: one block of queries after the other; see blockwise.md.

A block holds all heads, because mixing needs them together, and all keys that its queries may see, because normalizing
does. Nothing of it is kept: the backward pass computes the weights again, dropout's zeros from the same seed.
"""

import math
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from torch import Tensor

from mixhead_plugin.ops.masks import Block, BlockMasks
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.reference import upcast
from mixhead_plugin.ops.workers import share

# Scores in one block: on a CPU what stays in the cache of one core, elsewhere enough to fill the device.
_BLOCK = {"cpu": 2**18}
_BLOCK_ELSEWHERE = 2**24
_MIN_QUERIES = 16  # fewer make matrix products slow


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
    dropout_p: float,
    scale: float,
) -> Tensor:
    """`ops.attention` by blocks: the same values in memory linear in Nq + Nk; arguments as there."""
    seed = None
    if dropout_p > 0:
        # From torch's own generator, on the CPU: it repeats with torch.manual_seed and under activation checkpointing.
        seed = torch.randint(2**62, (), dtype=torch.int64)
    return _forward(
        query, key, value, mixing, attn_mask, key_padding_mask, seed, normalizer, causal, dropout_p, scale
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
        seed: Optional[Tensor],
        normalizer: str,
        causal: bool,
        dropout_p: float,
        scale: float,
        learned_mask: bool = False,
    ):
        batch, self.heads, n_queries, _ = query.shape
        n_keys = key.shape[2]
        self.query, self.key, self.value = upcast(query), upcast(key), upcast(value)
        self.dtype, self.device = self.query.dtype, query.device
        self.mixing = None if mixing is None else mixing.to(self.dtype)
        self.normalizer = NORMALIZERS[normalizer]
        self.dropout_p, self.seed = dropout_p, 0 if seed is None else int(seed)
        self.gain = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0  # of what dropout keeps
        self.scale = scale
        sentences, queries = _cut(batch, self.heads, n_queries, n_keys, self.device)
        self.masks = BlockMasks(
            causal, attn_mask, key_padding_mask, n_queries, n_keys, sentences, queries, self.query, learned_mask
        )
        self.blocks = [block for block in self.masks.blocks if block.keys.start < block.keys.stop]

    def for_each_block(self, work: "Callable[[_Worker, int, Block], None]") -> None:
        def go_through(blocks: Iterator[Tuple[int, Block]]) -> None:
            worker = _Worker(self)
            for number, block in blocks:
                work(worker, number, block)

        share(go_through, list(enumerate(self.blocks)), self.device)


class _Worker:
    """What one thread does with a block: heads and sentences are one dimension, [b * H, n, k], unless heads mix."""

    def __init__(self, call: _Call):
        self.call = call
        self.largest = call.heads * max(_size(block) for block in call.blocks)
        self.buffers: Dict[str, Tensor] = {}
        self.generator = self.bits = None
        if call.dropout_p > 0:
            self.generator = torch.Generator(call.device)
            self.bits = torch.empty(math.ceil(self.largest / 4), dtype=torch.int64, device=call.device)

    def buffer(self, name: str, *shape: int) -> Tensor:
        """Memory for a tensor [...] no larger than a block's scores.

        It serves block after block: fresh pages from the system cost as much as what is computed in them.
        """
        if name not in self.buffers:
            self.buffers[name] = torch.empty(self.largest, dtype=self.call.dtype, device=self.call.device)
        return self.buffers[name][: math.prod(shape)].view(shape)

    def query(self, tensor: Tensor, block: Block) -> Tensor:
        """What `tensor` [B, H, Nq, D] holds of the block, [b * H, n, D]"""
        return tensor[block.sentences, :, block.queries].flatten(0, 1)

    def key(self, tensor: Tensor, block: Block) -> Tensor:
        """What `tensor` [B, H, Nk, D] holds of the block, [b * H, k, D]"""
        return tensor[block.sentences, :, block.keys].flatten(0, 1)

    def mixing(self, block: Block) -> Optional[Tensor]:
        """[H, H] or [b, n, H, H]"""
        mixing = self.call.mixing
        return mixing[block.sentences, block.queries] if mixing is not None and mixing.dim() == 4 else mixing

    def scores(self, block: Block) -> Tensor:
        query, key = self.query(self.call.query, block), self.key(self.call.key, block)
        scores = self.buffer("scores", len(query), query.shape[1], key.shape[1])  # [b * H, n, k]
        torch.baddbmm(scores, query, key.transpose(1, 2), beta=0, alpha=self.call.scale, out=scores)
        self.call.masks.add_to(scores.unflatten(0, [-1, self.call.heads]), block)
        return scores

    def mix(self, weights: Tensor, mixing: Tensor) -> Tensor:
        """sum_j M[j, i] P_j of weights P [b * H, n, k], with M [H, H] or [b, n, H, H]"""
        heads, (n, k) = self.call.heads, weights.shape[1:]
        weights = weights.view(-1, heads, n, k)
        b = len(weights)
        if mixing.dim() == 2:
            mixed = self.buffer("mixed", b, heads, n * k)
            torch.bmm(mixing.t().expand(b, heads, heads), weights.flatten(2), out=mixed)
            return mixed.view(b * heads, n, k)
        mixed = self.buffer("mixed", b * n, heads, k)
        torch.bmm(mixing.transpose(2, 3).flatten(0, 1), weights.transpose(1, 2).flatten(0, 1), out=mixed)
        return mixed.view(b, n, heads, k).transpose(1, 2).flatten(0, 1)  # a copy only where b > 1

    def mixing_grad(self, weights: Tensor, d_mixed: Tensor, mixing: Tensor) -> Tensor:
        """dM[j, i] = sum_k P_j dPbar_i, summed further to the shape of M where it is shared"""
        weights, d_mixed = (t.view(-1, self.call.heads, *t.shape[1:]) for t in (weights, d_mixed))  # [b, H, n, k]
        if mixing.dim() == 2:
            return torch.bmm(weights.flatten(2), d_mixed.flatten(2).transpose(1, 2)).sum(0)
        return torch.matmul(weights.transpose(1, 2), d_mixed.permute(0, 2, 3, 1))

    def keep(self, number: int, shape: torch.Size) -> Tensor:
        """Dropout's ones and zeros for the block of this number, the same in both passes."""
        keep = self.buffer("keep", *shape)
        drop = round(self.call.dropout_p * 2**16)
        if drop == 2**16:
            return keep.zero_()
        # Four draws of 16 bits in one: the probability is right to 2^-17, in a fifth of the time of bernoulli_.
        assert self.generator is not None and self.bits is not None
        self.generator.manual_seed((self.call.seed + number) % 2**63)
        bits = self.bits[: math.ceil(keep.numel() / 4)].random_(-(2**63), None, generator=self.generator)
        return torch.ge(bits.view(torch.int16)[: keep.numel()].view(shape), drop - 2**15, out=keep)


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


def _attend(call: _Call, output: Tensor) -> None:
    """O = dropout(Pbar) V into `output` [B, H, Nq, Dv], which holds zeros"""

    def work(worker: _Worker, number: int, block: Block) -> None:
        weights = call.normalizer.weights(worker.scores(block))  # [b * H, n, k]
        mixing = worker.mixing(block)
        mixed = weights if mixing is None else worker.mix(weights, mixing)
        if call.dropout_p > 0:
            mixed = mixed.mul_(worker.keep(number, mixed.shape))
        rows = torch.bmm(mixed, worker.key(call.value, block)).mul_(call.gain)  # [b * H, n, Dv]
        output[block.sentences, :, block.queries] = rows.unflatten(0, [-1, call.heads])

    call.for_each_block(work)


class _Gradients:
    """The gradients of one call, in the dtype of the computation, from that of its output [B, H, Nq, Dv]."""

    def __init__(self, call: _Call, d_output: Tensor, learned_mask: bool):
        self.call = call
        self.d_output = d_output.to(call.dtype)
        self.query, self.key, self.value = (torch.zeros_like(t) for t in (call.query, call.key, call.value))
        self.mixing = None if call.mixing is None else torch.zeros_like(call.mixing)
        self.attn_mask = None
        if learned_mask:
            self.attn_mask = torch.zeros_like(call.masks.attn_mask, dtype=call.dtype)
        n = len(call.blocks)
        self.before = _before(call.blocks)
        self.mixing_of_blocks: List[Optional[Tensor]] = [None] * n  # [H, H] each, where the mixing is shared
        self.value_turns, self.key_turns, self.mask_turns = _Turns(n), _Turns(n), _Turns(n)

        call.for_each_block(self._work)
        if self.mixing is not None and self.mixing.dim() == 2 and n > 0:
            self.mixing = torch.stack(self.mixing_of_blocks).sum(0)

    def _work(self, worker: _Worker, number: int, block: Block) -> None:
        try:
            self._add(worker, number, block)
        except BaseException:  # nobody may wait for this block: the call fails once all threads are back
            for turns in (self.value_turns, self.key_turns, self.mask_turns):
                turns.over[number].set()
            raise

    def _add(self, worker: _Worker, number: int, block: Block) -> None:
        call = self.call
        scores = worker.scores(block)  # [b * H, n, k]
        weights = call.normalizer.weights(scores)
        mixing = worker.mixing(block)
        mixed = weights if mixing is None else worker.mix(weights, mixing)
        d_rows = worker.query(self.d_output, block) * call.gain  # [b * H, n, Dv]
        d_mixed = worker.buffer("d_mixed", *weights.shape)
        torch.bmm(d_rows, worker.key(call.value, block).transpose(1, 2), out=d_mixed)
        if call.dropout_p > 0:
            keep = worker.keep(number, weights.shape)
            mixed = mixed * keep if mixing is None else mixed.mul_(keep)
            d_mixed.mul_(keep)

        with self.value_turns.turn(number, self.before[number]):
            _add_products(self.value[block.sentences, :, block.keys], mixed, d_rows, 1.0)
        d_weights = d_mixed
        if mixing is not None:
            d_weights = worker.mix(d_mixed, mixing.transpose(-2, -1))
            d_mixing = worker.mixing_grad(weights, d_mixed, mixing)
            if mixing.dim() == 2:
                self.mixing_of_blocks[number] = d_mixing
            else:
                self.mixing[block.sentences, block.queries] = d_mixing
        d_scores = call.normalizer.grad(scores, weights, d_weights)  # [b * H, n, k]
        if self.attn_mask is not None:
            with self.mask_turns.turn(number, number - 1):
                call.masks.add_grad(self.attn_mask, d_scores.unflatten(0, [-1, call.heads]), block)
        d_query = torch.bmm(d_scores, worker.key(call.key, block)).mul_(call.scale)  # [b * H, n, D]
        self.query[block.sentences, :, block.queries] = d_query.unflatten(0, [-1, call.heads])
        with self.key_turns.turn(number, self.before[number]):
            _add_products(
                self.key[block.sentences, :, block.keys], d_scores, worker.query(call.query, block), call.scale
            )


def _before(blocks: List[Block]) -> List[int]:
    """For each block the last one before it that concerns the same sentences, -1 for none."""
    latest: Dict[int, int] = {}
    before = []
    for number, block in enumerate(blocks):
        before.append(latest.get(block.sentences.start, -1))
        latest[block.sentences.start] = number
    return before


def _add_products(total: Tensor, d_weights: Tensor, rows: Tensor, factor: float) -> None:
    """total [b, H, k, D] += factor * W^T R, with W [b * H, n, k] and R [b * H, n, D]"""
    if len(total) == 1:
        total[0].baddbmm_(d_weights.transpose(1, 2), rows, alpha=factor)
    else:  # many small products: at once, then added
        products = torch.bmm(d_weights.transpose(1, 2), rows)
        total.add_(products.unflatten(0, total.shape[:2]), alpha=factor)


def _size(block: Block) -> int:
    """Scores of one head"""
    b, n, k = (part.stop - part.start for part in (block.sentences, block.queries, block.keys))
    return b * n * k


def _cut(batch: int, heads: int, n_queries: int, n_keys: int, device: torch.device) -> Tuple[List[slice], List[slice]]:
    """Slices of the batch and of the queries, so that one of each makes a block of the size that suits the device."""
    target = _BLOCK.get(device.type, _BLOCK_ELSEWHERE)
    rows = max(1, min(n_queries, max(_MIN_QUERIES, target // max(1, heads * n_keys))))
    some = max(1, min(batch, target // max(1, heads * rows * n_keys)))
    return _slices(batch, some), _slices(n_queries, rows)


def _slices(n: int, size: int) -> List[slice]:
    return [slice(start, min(n, start + size)) for start in range(0, n, size)]


def _output_like(query: Tensor, size: int) -> Tensor:
    """Zeros [B, H, Nq, size] that lie in memory in the order of `query`, so that reshaping them needs no copy."""
    order = sorted(range(4), key=query.stride, reverse=True)
    shape = [*query.shape[:3], size]
    return query.new_zeros([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])


@torch.library.custom_op("mixhead_plugin::blockwise", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    seed: Optional[Tensor],
    normalizer: str,
    causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    output = _output_like(upcast(query), value.shape[3])
    _attend(
        _Call(query, key, value, mixing, attn_mask, key_padding_mask, seed, normalizer, causal, dropout_p, scale),
        output,
    )
    return output.to(value.dtype)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return _output_like(query, value.shape[3])


@torch.library.custom_op("mixhead_plugin::blockwise_backward", mutates_args=())
def _backward(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    seed: Optional[Tensor],
    normalizer: str,
    causal: bool,
    dropout_p: float,
    scale: float,
    learned_mask: bool,
) -> List[Tensor]:
    """Gradients of query, key, value, then of mixing if there is one, then of attn_mask if asked for."""
    call = _Call(
        query, key, value, mixing, attn_mask, key_padding_mask, seed, normalizer, causal, dropout_p, scale, learned_mask
    )
    grads = _Gradients(call, d_output, learned_mask)
    found = [(grads.query, query), (grads.key, key), (grads.value, value)]
    if mixing is not None:
        found.append((grads.mixing, mixing))
    if learned_mask:
        found.append((grads.attn_mask.view(attn_mask.shape), attn_mask))
    return [grad.to(tensor.dtype) for grad, tensor in found]


@_backward.register_fake
def _(
    d_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    attn_mask: Optional[Tensor],
    *rest: Any,
) -> List[Tensor]:
    found = [query, key, value]
    if mixing is not None:
        found.append(mixing)
    if rest[-1]:
        found.append(attn_mask)
    return [torch.empty_like(tensor) for tensor in found]


def _save(ctx: Any, inputs: Tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _differentiate(ctx: Any, d_output: Tensor) -> Tuple[Optional[Tensor], ...]:
    _, _, _, mixing, attn_mask, _, _ = ctx.saved_tensors
    learned_mask = attn_mask is not None and ctx.needs_input_grad[4]
    grads = _backward(d_output, *ctx.saved_tensors, *ctx.options, learned_mask)
    d_mixing = grads[3] if mixing is not None else None
    d_attn_mask = grads[-1] if learned_mask else None
    return (*grads[:3], d_mixing, d_attn_mask, None, None, None, None, None, None)


_forward.register_autograd(_differentiate, setup_context=_save)
