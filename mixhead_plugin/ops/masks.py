"""The three ways of hiding a key, as one additive mask."""

from typing import Optional

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs


def no_masks(inputs: AttentionInputs) -> bool:
    """Return whether every query sees every key."""
    return not inputs.causal and inputs.attn_mask is None and inputs.key_padding_mask is None


def additive_mask(inputs: AttentionInputs, dtype: torch.dtype) -> Optional[Tensor]:
    """Return the sum of all masks, ``-inf`` where a key is hidden; None if there are no masks.

    It is broadcastable to [B, H, Nq, Nk] and has the given dtype, float32 or float64.
    """
    n_queries, n_keys, device = inputs.query.size(2), inputs.key.size(2), inputs.query.device
    mask, padding = inputs.attn_mask, inputs.key_padding_mask
    if mask is not None:
        mask = mask.to(dtype)
    if inputs.causal:
        future = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).triu(1 + n_keys - n_queries)  # [Nq, Nk]
        if mask is None:
            mask = torch.zeros(1, 1, n_queries, n_keys, dtype=dtype, device=device)
        mask = mask.masked_fill(future, float("-inf"))
    if padding is not None:
        if mask is None:
            mask = torch.zeros(1, 1, 1, n_keys, dtype=dtype, device=device)
        mask = mask.masked_fill(padding[:, None, None, :], float("-inf"))
    return mask
