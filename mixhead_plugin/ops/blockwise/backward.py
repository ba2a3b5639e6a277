"""The backward pass: the memory of the gradients, and the blocks that write or add to it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.block import Block
from mixhead_plugin.ops.blockwise.block_backward import BlockBackward
from mixhead_plugin.ops.blockwise.forward import Steps, inputs_of_block
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.blockwise.sharing import Sharing, sharing
from mixhead_plugin.ops.blockwise.threads import parallel_for, threads_for
from mixhead_plugin.ops.blockwise.turns import Turns
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import with_four_dimensions


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
    shared = {name: sharing(name, getattr(plan.inputs, name).dim()) for name in names}
    grads = _gradients(plan, shared)
    totals = _totals(grads, shared, len(plan.blocks))

    # Where blocks of all groups add, they must be taken in the order of their numbers, or all
    # threads could wait for a block that none has taken. Else blocks go by group, which is faster.
    if Sharing.BY_ALL in shared.values():
        blocks = plan.blocks
    else:
        blocks = plan.by_group(threads_for(d_output.device))
    items = []
    for block in blocks:
        if block.is_first:
            _zero_hidden_keys(totals, shared, block)
        block_grads = _grads_of_block(block, totals, shared)
        d_out = block.matrices("output", d_output)
        items.append((block, inputs_of_block(plan, block), d_out, block_grads))
    turns = Turns(plan.blocks, shared)

    def work(share: Iterator[tuple[Block, AttentionInputs, Tensor, dict[str, Tensor]]]) -> None:
        steps = Steps(plan, kept, written=True)
        for block, part, d_out, block_grads in share:
            try:
                BlockBackward(steps, turns, block, part, block_grads).add_gradients(d_out)
            except BaseException:  # the call fails, and no block may wait for this one
                turns.give_up(block)
                raise

    parallel_for(work, items, d_output.device)
    for name, kind in shared.items():
        if kind is Sharing.TERM:
            grads[name].copy_(totals[name].sum(0))
    return grads


def _gradients(plan: Plan, shared: dict[str, Sharing]) -> dict[str, Tensor]:
    """Return memory for the gradients: zeros where blocks add, or where none of them writes."""
    grads = {}
    for name, kind in shared.items():
        like = getattr(plan.inputs, name)
        grad = torch.empty_like(like, dtype=plan.inputs.query.dtype)
        if kind is Sharing.BY_ALL or not plan.has_every_query:
            grad.zero_()
        grads[name] = grad
    return grads


def _totals(
    grads: dict[str, Tensor], shared: dict[str, Sharing], n_blocks: int
) -> dict[str, Tensor]:
    """Return what the blocks write or add to, which is mostly the gradients themselves.

    Where each block has a term, it is all terms, [n_blocks, ...].

    Args:
        grads: the gradients
        shared: how blocks share each of them
        n_blocks: number of blocks of the call
    """
    totals = dict(grads)
    if "attn_mask" in grads:
        totals["attn_mask"] = with_four_dimensions(grads["attn_mask"])
    for name, kind in shared.items():
        if kind is Sharing.TERM:
            totals[name] = grads[name].new_zeros(n_blocks, *grads[name].shape)
    return totals


def _grads_of_block(
    block: Block, totals: dict[str, Tensor], shared: dict[str, Sharing]
) -> dict[str, Tensor]:
    """Return views of what a block writes or adds to.

    Args:
        block: the block
        totals: what all blocks write or add to, by name
        shared: how blocks share it
    """
    grads = {}
    for name, total in totals.items():
        if shared[name] is Sharing.TERM:
            total = total[block.number]
        grads[name] = block.part(name, total)
    return grads


def _zero_hidden_keys(totals: dict[str, Tensor], shared: dict[str, Sharing], block: Block) -> None:
    """Zero the gradients of keys and values that the first block of a group does not see.

    It writes all others of its group.
    """
    for name, total in totals.items():
        if shared[name] is not Sharing.BY_GROUP:
            continue
        n_keys = total.shape[2]
        for start, stop in ((0, block.keys.start), (block.keys.stop, n_keys)):
            if start < stop:
                hidden = replace(block, keys=slice(start, stop))
                hidden.part(name, total).zero_()
