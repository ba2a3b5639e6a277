"""The backward pass: each block computes its weights again and adds to the gradients."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.forward import Steps, inputs_of, product
from mixhead_plugin.ops.blockwise.masks import NARROW, Block, add_mask_grad
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.blockwise.threads import parallel_for
from mixhead_plugin.ops.inputs import DIMENSIONS, AttentionInputs

# Blocks add to these gradients, which start at 0. They write all others, completely if
# `plan.complete`.
ADDED = {"attn_mask", *(name for name, (dims, *_) in DIMENSIONS.items() if {"Nk", "P"} & {*dims})}


def backward(plan: Plan, d_output: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the gradients of the named inputs in the dtype of the computation, from d_output [B,
    H', Nq, Dv].

    The gradient of attn_mask has four dimensions; that of relative_key has a row for each distance.
    """
    dtype = plan.inputs.query.dtype
    grads = {name: torch.empty_like(getattr(plan.inputs, name), dtype=dtype) for name in names}
    for name in grads.keys() & ADDED if plan.complete else grads:
        grads[name].zero_()
    totals = dict(grads)  # what the blocks add to
    if "attn_mask" in grads:
        totals["attn_mask"] = grads["attn_mask"][(None,) * (4 - grads["attn_mask"].dim())]
    shared = [name for name in grads.keys() - ADDED if grads[name].dim() < 4]
    for name in shared:  # one term for each block, to be summed
        totals[name] = grads[name].new_zeros(len(plan.blocks), *grads[name].shape)
    d_output = d_output.to(dtype)
    items = []
    for block in plan.blocks:
        views = {name: block.part(name, total) for name, total in totals.items()}
        items.append(
            (block, inputs_of(plan, block), block.part("output", d_output).flatten(0, 1), views)
        )
    turns = _Turns(plan.blocks)

    def work(items: Iterator[tuple[Block, AttentionInputs, Tensor, dict[str, Tensor]]]) -> None:
        steps = Steps(plan)
        for block, part, d_out, views in items:
            try:
                _add_gradients(steps, turns, block, part, d_out, views)
            except BaseException:  # the call fails, and no block may wait for this one
                turns.give_up(block)
                raise

    parallel_for(work, items, d_output.device)
    for name in shared:
        grads[name].copy_(totals[name].sum(0))
    return grads


class _Turns:
    """Let blocks add to the same memory in the order of their numbers: sums of floats depend on the
    order.

    A block waits only for blocks of a lower number. A thread has already taken those, so no two
    wait for one another.
    """

    def __init__(self, blocks: Sequence[Block]):
        self.done = {name: [threading.Event() for _ in blocks] for name in ADDED}

    @contextmanager
    def turn(self, name: str, block: Block) -> Iterator[None]:
        """Wait for the last block before this one that adds to the same memory."""
        previous = block.previous if name in ("key", "value") else block.number - 1
        if previous >= 0:
            self.done[name][previous].wait()
        try:
            yield
        finally:
            self.done[name][block.number].set()

    def give_up(self, block: Block) -> None:
        for events in self.done.values():
            events[block.number].set()


def _add_gradients(
    steps: Steps,
    turns: _Turns,
    block: Block,
    part: AttentionInputs,
    d_output: Tensor,
    grads: dict[str, Tensor],
) -> None:
    """Add the block's terms to the gradients by the equations of blockwise.md; d_output [b * h', n,
    Dv].
    """
    scores, with_sink = steps.weights(block, part)  # [b * h, n, k] or [b * h, n, k + 1]
    weights = steps.without_sink(with_sink, part)  # [b * h, n, k]
    with_gain = steps.apply_gain(weights, block, part.gain)
    mixed, n = with_gain, block.shape[2]
    mixing = part.mixing
    if mixing is not None:
        arranged = steps.arranged(with_gain, mixing, "by query")
        mixed = steps.mix_arranged(arranged, mixing, n)  # [b * h', n, k]
    d_mixed = steps.buffer("d_mixed", mixed.shape)
    product(d_output, part.value.transpose(1, 2), steps.dropout_scale, d_mixed)
    if steps.dropout_p > 0:
        mask = steps.dropout_mask(block, mixed.shape)
        mixed = mixed * mask if part.mixing is None else mixed.mul_(mask)
        d_mixed.mul_(mask)
    with turns.turn("value", block):
        _add_products(grads["value"], mixed, d_output, steps.dropout_scale)

    d_weights = d_mixed
    if mixing is not None:
        d_arranged = steps.arranged(d_mixed, mixing.transpose(-2, -1), "d by query")
        _mixing_grad(arranged, d_arranged, grads["mixing"])
        d_weights = steps.mix_arranged(d_arranged, mixing.transpose(-2, -1), n)
    if part.gain is not None:
        d_gain = _gain_grad(steps, block, weights, d_weights)
        d_weights.view(block.shape).mul_(steps.gain_by_key(block, part.gain))
        with turns.turn("gain", block):
            grads["gain"].add_(d_gain)

    out = steps.buffer("d_scores" if part.mixing is None else "d_mixed", with_sink.shape)
    if part.sink is not None:
        d_of_keys, d_weights = d_weights, steps.buffer("d_with sink", with_sink.shape)
        d_weights[..., :-1], d_weights[..., -1] = d_of_keys, 0.0
    # [b * h, n, k] or [b * h, n, k + 1]
    d_scores = steps.normalizer.grad(scores, with_sink, d_weights, out)
    if part.sink is not None:
        grads["sink"].copy_(d_scores[..., -1].view(block.shape[:3]).sum((0, 2)))
        d_scores = steps.without_sink(d_scores, part)
    if "attn_mask" in grads:
        with turns.turn("attn_mask", block):
            add_mask_grad(grads["attn_mask"], d_scores.view(block.shape), block)
    if part.relative_query is not None:
        d_relative_query, d_relative_key = _relative_grads(steps, block, part, d_scores)
        grads["relative_query"].copy_(d_relative_query)
        with turns.turn("relative_key", block):
            grads["relative_key"].add_(d_relative_key)
    if part.score_mixing is not None:
        arranged = steps.arranged(
            steps.buffer("products", d_scores.shape), part.score_mixing, "by query"
        )
        d_arranged = steps.arranged(d_scores, part.score_mixing.transpose(-2, -1), "d by query")
        _mixing_grad(arranged, d_arranged, grads["score_mixing"])
        d_scores = steps.mix_arranged(
            d_arranged, part.score_mixing.transpose(-2, -1), n, "mixed products"
        )
    d_query = product(d_scores, part.key, steps.scale)  # [b * h, n, D]
    grads["query"].copy_(d_query.view(grads["query"].shape))
    with turns.turn("key", block):
        _add_products(grads["key"], d_scores, part.query, steps.scale)


def _mixing_grad(weights: Tensor, d_mixed: Tensor, out: Tensor) -> None:
    """Write dM[j, i] = sum_k P_j dPbar_i of arranged matrices to `out` [b, n, H, H'], or summed
    further [H, H'].
    """
    in_place = out.flatten(0, 1) if out.dim() == 4 and out.is_contiguous() else None
    # [b, H, H'] or [b * n, H, H']
    found = torch.bmm(weights, d_mixed.transpose(1, 2), out=in_place)
    if in_place is None:
        out.copy_(found.sum(0) if out.dim() == 2 else found.view(out.shape))


def _gain_grad(steps: Steps, block: Block, weights: Tensor, d_with_gain: Tensor) -> Tensor:
    """Return the gain's gradient [h, n + k - 1]."""
    distances, shifted = steps.distances(block, 1)
    distances.zero_()
    torch.sum(
        weights.view(block.shape) * d_with_gain.view(block.shape), 0, keepdim=True, out=shifted
    )
    return distances.sum(1)


def _relative_grads(
    steps: Steps, block: Block, part: AttentionInputs, d_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the relative query, [b, h, n, R], and of the relative key, [h, n + k
    - 1, R].
    """
    b, _, n, _ = block.shape
    d_distances, shifted = steps.distances(block, b)
    d_distances.zero_()
    shifted.copy_(d_scores.view(block.shape))
    assert part.relative_query is not None and part.relative_key is not None
    d_query = torch.bmm(d_distances, part.relative_key).unflatten(1, (b, n)).transpose(0, 1)
    return d_query, torch.bmm(d_distances.transpose(1, 2), part.relative_query)


def _add_products(total: Tensor, weights: Tensor, rows: Tensor, factor: float) -> None:
    """Add factor * W^T R to total [b, h, k, D], with W [b * h, n, k] and R [b * h, n, D]."""
    if len(total) == 1 and rows.shape[2] >= NARROW:
        total[0].baddbmm_(weights.transpose(1, 2), rows, alpha=factor)
    else:  # many small products: at once, then added
        total.add_(product(weights.transpose(1, 2), rows, factor).unflatten(0, total.shape[:2]))
