"""The backward pass: the memory of the gradients, and the blocks that write or add to it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.block import Block, dimensions
from mixhead_plugin.ops.blockwise.block_backward import BlockBackward
from mixhead_plugin.ops.blockwise.forward import Steps, inputs_of_block
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.blockwise.threads import parallel_for, threads_for
from mixhead_plugin.ops.blockwise.turns import BY_GROUP, Turns
from mixhead_plugin.ops.inputs import DIMENSIONS, AttentionInputs
from mixhead_plugin.ops.masks import with_four_dimensions


def _shared_by_blocks() -> set[str]:
    """Return the inputs that several blocks read the same part of: what has keys or distances."""
    names = {"attn_mask"}
    for name, shapes in DIMENSIONS.items():
        for dims in shapes:
            if "Nk" in dims or "P" in dims:
                names.add(name)
    return names


# Blocks add to these gradients. They write all others, and leave nothing out if
# `plan.has_every_query`.
ADDED = _shared_by_blocks()


def backward(
    plan: Plan, d_output: Tensor, names: Sequence[str], kept: Tensor | None
) -> dict[str, Tensor]:
    """Return gradients in the dtype of the computation.

    The gradient of attn_mask has four dimensions; that of relative_key has a row for each distance.

    Args:
        plan: the blocks of the call
        d_output: the gradient of the output, [B, H', Nq, Dv]
        names: names of the inputs whose gradients are asked for; no others are computed
        kept: what the forward pass has kept, or None
    """
    dtype = plan.inputs.query.dtype
    d_output = d_output.to(dtype)
    grads = _gradients(plan, names)
    terms = {name for name, grad in grads.items() if _has_terms(name, grad)}
    totals = _totals(grads, terms, len(plan.blocks))

    # Blocks of all groups add to these, in the order of their numbers. They must be taken in that
    # order, or all threads could wait for a block that none has taken. Else blocks go by group,
    # which is faster.
    added_by_all_groups = ADDED.intersection(names).difference(BY_GROUP)
    blocks = plan.blocks if added_by_all_groups else plan.by_group(threads_for(d_output.device))
    items = []
    for block in blocks:
        if block.is_first:
            _zero_hidden_keys(totals, block)
        block_grads = _grads_of_block(block, totals, terms)
        d_out = block.matrices("output", d_output)
        items.append((block, inputs_of_block(plan, block), d_out, block_grads))
    turns = Turns(plan.blocks, ADDED.intersection(names))

    def work(share: Iterator[tuple[Block, AttentionInputs, Tensor, dict[str, Tensor]]]) -> None:
        steps = Steps(plan, kept, written=True)
        for block, part, d_out, block_grads in share:
            try:
                BlockBackward(steps, turns, block, part, block_grads).add_gradients(d_out)
            except BaseException:  # the call fails, and no block may wait for this one
                turns.give_up(block)
                raise

    parallel_for(work, items, d_output.device)
    for name in terms:
        grads[name].copy_(totals[name].sum(0))
    return grads


def _gradients(plan: Plan, names: Sequence[str]) -> dict[str, Tensor]:
    """Return memory for the gradients: zeros where blocks add, or where none of them writes."""
    grads = {}
    for name in names:
        like = getattr(plan.inputs, name)
        grad = torch.empty_like(like, dtype=plan.inputs.query.dtype)
        written = name in BY_GROUP or name not in ADDED
        if not (written and plan.has_every_query):
            grad.zero_()
        grads[name] = grad
    return grads


def _totals(grads: dict[str, Tensor], terms: set[str], n_blocks: int) -> dict[str, Tensor]:
    """Return what the blocks write or add to, which is mostly the gradients themselves.

    Args:
        grads: the gradients
        terms: names of those to which each block has a term of its own, [n_blocks, ...]
        n_blocks: number of blocks of the call
    """
    totals = dict(grads)
    if "attn_mask" in grads:
        totals["attn_mask"] = with_four_dimensions(grads["attn_mask"])
    for name in terms:
        totals[name] = grads[name].new_zeros(n_blocks, *grads[name].shape)
    return totals


def _grads_of_block(block: Block, totals: dict[str, Tensor], terms: set[str]) -> dict[str, Tensor]:
    """Return views of what a block writes or adds to.

    Args:
        block: the block
        totals: what all blocks write or add to, by name
        terms: names of those to which each block has a term of its own
    """
    grads = {}
    for name, total in totals.items():
        if name in terms:
            total = total[block.number]
        grads[name] = block.part(name, total)
    return grads


def _zero_hidden_keys(grads: dict[str, Tensor], block: Block) -> None:
    """Zero the gradients of keys and values that the first block of a group does not see.

    It writes all others of its group.
    """
    for name in BY_GROUP:
        if name in grads:
            n_keys = grads[name].shape[2]
            for start, stop in ((0, block.keys.start), (block.keys.stop, n_keys)):
                if start < stop:
                    hidden = replace(block, keys=slice(start, stop))
                    hidden.part(name, grads[name]).zero_()


def _has_terms(name: str, grad: Tensor) -> bool:
    """Return whether each block writes a term of its own, which are summed at the end.

    So it is for small tensors that all queries share: a sink [H], or an M [H, H'].
    """
    return name not in ADDED and "Nq" not in dimensions(name, grad.dim())
