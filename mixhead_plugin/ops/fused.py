"""Plain softmax attention by torch's own fused kernels."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mixhead_plugin.ops.masks import additive_mask


def serves(
    query: Tensor,
    value: Tensor,
    *,
    normalizer: str,
    mixing: Optional[Tensor],
    causal: bool,
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    dropout_p: float,
) -> bool:
    """Whether torch has a fused kernel for this, arguments as in `ops.attention`."""
    if normalizer != "softmax" or mixing is not None:
        return False
    if query.device.type != "cpu":
        return True
    # On a CPU torch would write out all weights for the first three, and needs a mask [B, 1, Nq, Nk] for the last.
    learned = attn_mask is not None and attn_mask.requires_grad
    return (
        dropout_p == 0 and query.shape[3] == value.shape[3] and not learned and (not causal or key_padding_mask is None)
    )


def fused_attention(
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
    """`ops.attention` for what it `serves`; arguments as there."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    # torch lines up the first query with the first key, not the last with the last
    plain_causal = causal and n_queries == n_keys and attn_mask is None and key_padding_mask is None
    mask = unseen = None
    if not plain_causal:
        mask = additive_mask(causal, attn_mask, key_padding_mask, n_queries, n_keys, query.device, query.dtype)
    if mask is not None and n_keys > 0:
        # What a kernel makes of a row that sees nothing is its own affair: here the row sees all, and is dropped.
        unseen = mask.amax(-1, keepdim=True) == float("-inf")  # [.., .., .., 1]
        mask = mask.masked_fill(unseen, 0.0)
    with torch.autocast(query.device.type, enabled=False):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=plain_causal, scale=scale
        )
    return out if unseen is None else out.masked_fill(unseen, 0.0)
