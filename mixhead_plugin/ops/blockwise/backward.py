"""The backward pass: each block has its weights, kept or computed again, and adds to the gradients.

The equations stand in blockwise.md. With the names of forward.py, for one block:

    dO [b * h', n, Dv]  x  V [b * h', k, Dv]   ->  dPbar  [b * h', n, k]
    P x dPbar, over the keys                   ->  dM     [H, H'] or [b, n, H, H']
    dPbar    M mixes back                      ->  dP     [b * h, n, k]
    dP, P    normalizer's gradient             ->  dS     [b * h, n, k]
    dS x K   ->  dQ [b * h, n, D];    dS^T x Q  ->  dK [b * h, k, D];    Pbar^T x dO  ->  dV
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.forward import Steps, inputs_of, product
from mixhead_plugin.ops.blockwise.masks import NARROW, Block, add_mask_grad, dimensions
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.blockwise.threads import parallel_for
from mixhead_plugin.ops.inputs import DIMENSIONS, AttentionInputs
from mixhead_plugin.ops.low_rank import LowRank

# With no more heads, all products of pairs of heads take less time than a few narrow ones.
FEW_HEADS = 16
# Blocks add to these gradients, which start at 0. They write all others, completely if
# `plan.complete`.
ADDED = {
    "attn_mask",
    *(name for name, (dims, *_) in DIMENSIONS.items() if {"Nk", "P"} & {*dims}),
}


def backward(
    plan: Plan, d_output: Tensor, names: Sequence[str], kept: Tensor | None
) -> dict[str, Tensor]:
    """Return gradients in the dtype of the computation.

    The gradient of attn_mask has four dimensions; that of relative_key has a row for each distance.

    Args:
        plan: the blocks of the call
        d_output: the gradient of the output, [B, H', Nq, Dv]
        names: of the inputs whose gradients are asked for
        kept: what the forward pass has kept, or None
    """
    dtype = plan.inputs.query.dtype
    d_output = d_output.to(dtype)
    grads, totals = _memory_for(plan, names)

    items = []
    for block in plan.blocks:
        views = {name: block.part(name, total) for name, total in totals.items()}
        d_out = block.matrices("output", d_output)
        items.append((block, inputs_of(plan, block), d_out, views))
    turns = _Turns(plan.blocks, ADDED.intersection(names))

    def work(items: Iterator[tuple[Block, AttentionInputs, Tensor, dict[str, Tensor]]]) -> None:
        steps = Steps(plan, kept, written=True)
        for block, part, d_out, views in items:
            try:
                _add_gradients(steps, turns, block, part, d_out, views)
            except BaseException:  # the call fails, and no block may wait for this one
                turns.give_up(block)
                raise

    parallel_for(work, items, d_output.device)
    for name in grads:
        if _has_terms(name, grads[name]):
            grads[name].copy_(totals[name].sum(0))
    return grads


def _memory_for(plan: Plan, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients, and what the blocks add to."""
    grads = {}
    totals = {}
    for name in names:
        like = getattr(plan.inputs, name)
        grad = torch.empty_like(like, dtype=plan.inputs.query.dtype)
        if name in ADDED or not plan.complete:
            grad.zero_()
        grads[name] = grad
        totals[name] = grad
        if name == "attn_mask":
            totals[name] = grad[(None,) * (4 - grad.dim())]
        elif _has_terms(name, grad):
            totals[name] = grad.new_zeros(len(plan.blocks), *grad.shape)
    return grads, totals


def _has_terms(name: str, grad: Tensor) -> bool:
    """Return whether each block has a term of its own, which are summed at the end."""
    return name not in ADDED and "Nq" not in dimensions(name, grad.dim())


class _Turns:
    """Let blocks add to the same memory in the order of their numbers.

    Sums of floats depend on the order.

    A block waits only for blocks of a lower number. A thread has already taken those, so no two
    wait for one another.
    """

    def __init__(self, blocks: Sequence[Block], names: Iterable[str]):
        self.done = {name: [threading.Event() for _ in blocks] for name in names}

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
    """Add the block's terms to the gradients by the equations of blockwise.md.

    Args:
        part: the block's part of the inputs, as `inputs_of` shapes it
        d_output: [b * h', n, Dv]
        grads: the block's part of the gradients
    """
    # The weights, and the mixed ones that the forward pass has multiplied with the values
    scores, with_sink = steps.weights(block, part)  # [b * h, n, k] or [b * h, n, k + 1]
    weights = steps.without_sink(with_sink, part)  # [b * h, n, k]
    with_gain = steps.apply_gain(weights, block, part.gain)
    mixed = with_gain
    n = block.shape[2]
    mixing = part.mixing
    factors = part.factors()
    if mixing is not None:
        arranged = steps.arranged(with_gain, mixing, "by query")
        mixed = steps.mix_arranged(arranged, mixing, n)  # [b * h', n, k]
    elif factors is not None:
        arranged = steps.arranged(with_gain, factors.left, "by query")
        sums = steps.sums(arranged, factors.left, "sums")
        mixed = steps.spread(arranged, sums, factors.right, factors.diagonal)

    # Through the product with the values, and dropout
    d_mixed = steps.buffer("d_mixed", mixed.shape)
    product(d_output, part.value.transpose(1, 2), steps.dropout_scale, d_mixed)
    if steps.dropout_p > 0:
        mask = steps.dropout_mask(block, mixed.shape)
        d_mixed.mul_(mask)
        mixed = torch.mul(mixed, mask, out=mask)  # not in place: these may be kept for another pass
    with turns.turn("value", block):
        _add_products(grads["value"], mixed, d_output, steps.dropout_scale)

    # Through the mixing
    d_weights = d_mixed
    if mixing is not None:
        d_arranged = steps.arranged(d_mixed, mixing.transpose(-2, -1), "d by query")
        _write_product(arranged, d_arranged.transpose(1, 2), grads["mixing"])
        d_weights = steps.mix_arranged(d_arranged, mixing.transpose(-2, -1), n)
    elif factors is not None:
        d_arranged = steps.arranged(d_mixed, factors.right, "d by query")
        d_sums = steps.sums(d_arranged, factors.right, "d sums")
        if arranged.shape[1] <= FEW_HEADS:
            _factor_grads_by_pairs(arranged, d_arranged, factors, grads)
        else:
            _write_product(d_arranged, sums.transpose(1, 2), grads["mixing_right"])
            _write_product(arranged, d_sums.transpose(1, 2), grads["mixing_left"])
            terms = torch.mul(arranged, d_arranged, out=steps.buffer("terms", arranged.shape))
            grads["mixing_diagonal"].copy_(terms.sum(2).view(grads["mixing_diagonal"].shape))
        d_weights = steps.spread(d_arranged, d_sums, factors.left, factors.diagonal)
    if part.gain is not None:
        d_gain = _gain_grad(steps, block, weights, d_weights)
        d_weights.view(block.shape).mul_(steps.gain_by_key(block, part.gain))
        with turns.turn("gain", block):
            grads["gain"].add_(d_gain)

    # Through the normalizer, whose rows have a column more with a sink
    # Where heads mix, the gradient of P is in other memory than that of Pbar.
    out = steps.buffer("d_mixed" if part.mixes() else "d_scores", with_sink.shape)
    if part.sink is not None:
        d_of_keys = d_weights
        d_weights = steps.buffer("d_with sink", with_sink.shape)
        d_weights[..., :-1] = d_of_keys
        d_weights[..., -1] = 0.0
    d_scores = steps.normalizer.grad(scores, with_sink, d_weights, out)
    if part.sink is not None:
        grads["sink"].copy_(d_scores[..., -1].view(block.shape[:3]).sum((0, 2)))
        d_scores = steps.without_sink(d_scores, part)

    # Through what was added to the scores
    if "attn_mask" in grads:
        with turns.turn("attn_mask", block):
            add_mask_grad(grads["attn_mask"], d_scores.view(block.shape), block)
    if part.relative_query is not None:
        d_relative_query, d_relative_key = _relative_grads(steps, block, part, d_scores)
        grads["relative_query"].copy_(d_relative_query)
        with turns.turn("relative_key", block):
            grads["relative_key"].add_(d_relative_key)

    # Through the product of queries and keys
    if part.score_mixing is not None:
        back = part.score_mixing.transpose(-2, -1)
        arranged = steps.arranged(steps.products(block), part.score_mixing, "by query")
        d_arranged = steps.arranged(d_scores, back, "d by query")
        _write_product(arranged, d_arranged.transpose(1, 2), grads["score_mixing"])
        d_scores = steps.mix_arranged(d_arranged, back, n, "mixed products")
    d_query = product(d_scores, part.key, steps.scale)  # [b * h, n, D]
    grads["query"].copy_(d_query.view(grads["query"].shape))
    with turns.turn("key", block):
        _add_products(grads["key"], d_scores, part.query, steps.scale)


def _write_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write products of arranged matrices to `out`; so dM[j, i] = sum_k P_j dPbar_i.

    `out` is [b, n, J, I], or [J, I], where the products of all queries are summed.
    """
    in_place = out.flatten(0, 1) if out.dim() == 4 and out.is_contiguous() else None
    # [b, J, I] or [b * n, J, I]
    found = torch.bmm(left, right, out=in_place)
    if in_place is not None:
        return
    if out.dim() == 2:
        out.copy_(found.sum(0))
    else:
        out.copy_(found.view(out.shape))


def _factor_grads_by_pairs(
    arranged: Tensor, d_arranged: Tensor, factors: LowRank, grads: dict[str, Tensor]
) -> None:
    """Write the gradients of the factors of M, by that of M itself.

    It multiplies more than the products with the sums S, but reads the weights once.

    Args:
        arranged: P, [b * n, h, k]
        d_arranged: the gradient of Pbar, [b * n, h, k]
        factors: [b, n, h, R] twice and [b, n, h]
        grads: the block's part of their gradients
    """
    d_matrix = torch.bmm(arranged, d_arranged.transpose(1, 2))  # [b * n, h, h]
    _write_product(d_matrix, factors.right.flatten(0, 1), grads["mixing_left"])
    _write_product(d_matrix.transpose(1, 2), factors.left.flatten(0, 1), grads["mixing_right"])
    grads["mixing_diagonal"].copy_(d_matrix.diagonal(dim1=1, dim2=2).view(factors.diagonal.shape))


def _gain_grad(steps: Steps, block: Block, weights: Tensor, d_with_gain: Tensor) -> Tensor:
    """Return the gain's gradient [h, n + k - 1]."""
    distances, shifted = steps.distances(block, 1)
    distances.zero_()
    terms = weights.view(block.shape) * d_with_gain.view(block.shape)
    torch.sum(terms, 0, keepdim=True, out=shifted)
    return distances.sum(1)


def _relative_grads(
    steps: Steps, block: Block, part: AttentionInputs, d_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the relative query and key: [b, h, n, R] and [h, n + k - 1, R]."""
    b, _, n, _ = block.shape
    d_distances, shifted = steps.distances(block, b)
    d_distances.zero_()
    shifted.copy_(d_scores.view(block.shape))
    assert part.relative_query is not None and part.relative_key is not None
    d_query = torch.bmm(d_distances, part.relative_key).unflatten(1, (b, n)).transpose(0, 1)
    return d_query, torch.bmm(d_distances.transpose(1, 2), part.relative_query)


def _add_products(total: Tensor, weights: Tensor, rows: Tensor, factor: float) -> None:
    """Add factor * W^T R to a gradient.

    Args:
        total: [b, h, k, D]
        weights: W, [b * h, n, k]
        rows: R, [b * h, n, D]
    """
    if total.shape[0] == 1 and rows.shape[2] >= NARROW:
        total[0].baddbmm_(weights.transpose(1, 2), rows, alpha=factor)
    else:
        # torch would start a product for each sentence and head. So all at once, then added.
        found = product(weights.transpose(1, 2), rows, factor)
        total.add_(found.unflatten(0, total.shape[:2]))
