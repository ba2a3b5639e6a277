"""Plain softmax attention by torch's own fused kernels."""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mixhead_plugin.ops.masks import additive_mask
from mixhead_plugin.ops.reference import upcast, without_autocast
from mixhead_plugin.ops.relative import RelativeScores


def serves(
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
) -> bool:
    """Whether torch has a fused kernel for this, arguments as in `ops.attention`."""
    if normalizer != "softmax" or any(t is not None for t in (mixing, relative, gain)):
        return False
    if query.device.type != "cpu":
        return True
    if dropout_p > 0 or query.shape[3] != value.shape[3] or any(t.stride(3) != 1 for t in (query, key, value)):
        return False  # on a CPU torch has no kernel for these, and would write out all weights
    if attn_mask is not None and (attn_mask.requires_grad or query.dtype in (torch.float16, torch.bfloat16)):
        return False  # nor for the gradient of a mask; and it would round the mask
    return not causal or key_padding_mask is None  # both together need a mask [B, 1, Nq, Nk]


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
    relative: Optional[RelativeScores],
    gain: Optional[Tensor],
    dropout_p: float,
    scale: float,
) -> Tensor:
    """`ops.attention` for what it `serves`; arguments as there."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    # torch lines up the first query with the first key, not the last with the last
    plain_causal = causal and n_queries == n_keys and attn_mask is None and key_padding_mask is None
    mask = unseen = None
    if not plain_causal:
        dtype = upcast(query).dtype
        mask = additive_mask(causal, attn_mask, key_padding_mask, n_queries, n_keys, query.device, dtype)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        hidden = mask == float("-inf")
        # What a kernel makes of a row that sees nothing is its own affair: here the row sees all, and is dropped.
        unseen = hidden.all(-1, keepdim=True)  # [.., .., .., 1]
        # Rounding may not make a low score, like the -1e8 of fairseq's encoders, a hidden key.
        mask = mask.clamp_min(torch.finfo(query.dtype).min).masked_fill(hidden & ~unseen, float("-inf"))
        mask = mask.masked_fill(unseen, 0.0).to(query.dtype)
    with without_autocast(query.device):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=plain_causal, scale=scale
        )
    return out if unseen is None else out.masked_fill(unseen, 0.0)
