"""The three ways of hiding a key, as one additive mask."""

from typing import Optional

import torch
from torch import Tensor


def additive_mask(
    causal: bool,
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    n_queries: int,
    n_keys: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Optional[Tensor]:
    """Return the sum of all masks, ``-inf`` where a key is hidden; None if every key is visible.

    It is broadcastable to [B, H, Nq, Nk] and has the given dtype, float32 or float64. The masks are as in
    `ops.attention`.
    """
    mask = attn_mask if attn_mask is None else attn_mask.to(dtype)
    if causal:
        future = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).triu(1 + n_keys - n_queries)  # [Nq, Nk]
        if mask is None:
            mask = torch.zeros(1, 1, n_queries, n_keys, dtype=dtype, device=device)
        mask = mask.masked_fill(future, float("-inf"))
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None, :]  # [B, 1, 1, Nk]
        if mask is None:
            mask = torch.zeros(1, 1, 1, n_keys, dtype=dtype, device=device)
        mask = mask.masked_fill(padding, float("-inf"))
    return mask
