"""The table of implementations, and which of them "auto" chooses."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops import fused
from mixhead_plugin.ops.blockwise import blockwise_attention
from mixhead_plugin.ops.blockwise.plan import block_size
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.reference import reference_attention
from mixhead_plugin.ops.transforms import exporting, transformations
from mixhead_plugin.ops.triton import support, triton_attention


class Implementation(NamedTuple):
    """One value of the flag ``--attention-impl``."""

    run: Callable[[AttentionInputs], Tensor]
    summary: str


IMPLEMENTATIONS = {
    "reference": Implementation(
        reference_attention, "the formula as it stands; all weights in memory"
    ),
    "blockwise": Implementation(
        blockwise_attention, "exact, by blocks of queries; memory linear in the length"
    ),
    "triton": Implementation(
        triton_attention, "fused GPU kernels; they ran on NVIDIA's H200 and H100"
    ),
}

# Up to as many keys, blocks are not faster, however many queries there are.
SHORT_ROWS = 16


def implementation_problem(impl: str) -> str:
    """Return why `impl` cannot be used on this machine, in a few words; empty if it can.

    Args:
        impl: "auto" or a key of `IMPLEMENTATIONS`
    """
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        return "unknown"
    return support.machine_problem() if impl == "triton" else ""


def fastest(inputs: AttentionInputs) -> str:
    """Return what "auto" stands for: "fused" or a key of `IMPLEMENTATIONS`.

    The first answer that fits counts: what must be, before what is fast.

    With dropout the choice does not depend on whether gradients are on: activation checkpointing
    computes the same attention without and with them, and both passes must drop the same weights.
    Without dropout it may depend on them, see `fused.serves` and `support.kind_problem`.
    """
    query = inputs.query
    key = inputs.key
    if query.device.type == "meta" or exporting():
        # Counters of FLOPs and exported programs know its operations, and it asks for no sizes.
        return "reference"
    if query.shape[2] <= 1:
        # In a step of decoding there is one row a head, and nothing to save.
        return "reference"
    if transformations():
        # It is the only one that serves torch.func, and forward mode.
        return "reference"
    by_torch = fused.serves(inputs)
    masked = inputs.attn_mask is not None or inputs.key_padding_mask is not None
    if by_torch and not masked:
        return "fused"
    # Behind a mask torch cannot take its flash kernel. The one that it takes computes hidden keys,
    # too, while ours skip them.
    # Nobody has reported from one of AMD's GPUs yet, so the kernels must be asked for there.
    kernels_allowed = query.device.type != "cpu" and torch.version.hip is None
    if kernels_allowed and not support.slower_than_blocks(inputs) and _kernels_serve(inputs):
        return "triton"
    if by_torch:
        return "fused"
    # With no more keys than numbers in a head, all weights take no more memory than the queries, so
    # blocks save none. They save time where all weights would not fit into the cache.
    n_keys = key.shape[2]
    if n_keys <= query.shape[3]:
        weights = query.shape[:3].numel() * n_keys
        if n_keys <= SHORT_ROWS or weights <= block_size(query.device):
            return "reference"
    return "blockwise"


def _kernels_serve(inputs: AttentionInputs) -> bool:
    """Return whether the kernels may serve a call.

    The kernels give a mask no gradient. With dropout one cannot ask a mask whether it needs one: a
    checkpoint with use_reentrant=True, as fairseq's, computes a layer without gradients first. A
    bias that the layer makes of its parameters needs none then, and needs one in the second pass.
    So the shape decides: a learned bias has numbers for each head, a mask that hides keys mostly
    has none. A learned one without them, made in such a layer, is the case that is not seen.
    """
    mask = inputs.attn_mask
    heads = inputs.query.shape[1]
    by_head = mask is not None and mask.dim() > 2 and mask.shape[-3] == heads
    if by_head and inputs.dropout_p > 0:
        return False
    return not triton_problem(inputs)


def triton_problem(inputs: AttentionInputs) -> str:
    """Return why the kernels cannot serve a call, or an empty string.

    The machine may lack something, there may be no kernel for such a call, or the kernels may have
    computed something wrong when they were tried here.
    """
    return support.machine_problem() or support.call_problem(inputs) or support.trial_fault(inputs)
