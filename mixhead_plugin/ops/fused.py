"""Plain softmax attention by torch's own fused kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import additive_mask
from mixhead_plugin.ops.reference import upcast, without_autocast


def serves(inputs: AttentionInputs) -> bool:
    """Return whether torch has a fused kernel for this call."""
    query, key, value, mask = *inputs[:3], inputs.attn_mask
    if inputs.normalizer != "softmax" or inputs.given().keys() != {"query", "key", "value"}:
        return False
    if query.device.type != "cpu":
        return True
    # On a CPU torch has no kernel for the following, and would keep all weights.
    if inputs.dropout_p > 0 or query.shape[3] != value.shape[3] or any(t.stride(3) != 1 for t in (query, key, value)):
        return False
    # The same holds for a mask with a gradient; a mask beside half precision would be rounded.
    if mask is not None and (mask.requires_grad or query.dtype in (torch.float16, torch.bfloat16)):
        return False
    return not inputs.causal or inputs.key_padding_mask is None  # both together need a mask [B, 1, Nq, Nk]


def fused_attention(inputs: AttentionInputs) -> Tensor:
    """Compute `ops.attention` for inputs that it `serves`."""
    query, key, value = inputs[:3]
    plain_causal = False
    if inputs.causal and inputs.attn_mask is None and inputs.key_padding_mask is None:
        # torch aligns the first query with the first key; here the last query belongs to the last key. An `if`, because
        # the compiler decides one: it would hand a comparison of changing lengths to torch as it stands.
        if query.shape[2] == key.shape[2]:
            plain_causal = True
    mask = unseen = None
    if not plain_causal:
        mask = additive_mask(inputs, upcast(query).dtype)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        hidden = mask == float("-inf")
        # Kernels differ on rows that see no key. Such a row sees all keys here, and its output is set to 0.
        unseen = hidden.all(-1, keepdim=True)  # [.., .., .., 1]
        # Rounding may not turn a low score, like the -1e8 of fairseq's encoders, into a hidden key.
        mask = mask.clamp_min(torch.finfo(query.dtype).min).masked_fill(hidden, float("-inf"))
        mask = mask.masked_fill(unseen, 0.0).to(query.dtype)
    with without_autocast(query.device):
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=inputs.dropout_p, is_causal=plain_causal, scale=inputs.scale
        )
    return out if unseen is None else out.masked_fill(unseen, 0.0)
