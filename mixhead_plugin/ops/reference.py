"""Mixed attention by the equations of the papers; every other implementation is tested against it.

The three steps are separate functions: a module that returns its weights, or is scripted, calls them one by one.
"""

from contextlib import nullcontext
from typing import ContextManager, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import additive_mask
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.relative import RelativeScores, relative_scores, toeplitz


def upcast(tensor: Tensor) -> Tensor:
    """Return half precision as float32; float32 and float64 stay."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def without_autocast(device: torch.device) -> ContextManager:
    """Return a context in which operations on the device keep the dtype of their inputs."""
    # The device "meta" has no autocast, and asking torch for it is an error.
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def attention_scores(
    query: Tensor, key: Tensor, mask: Optional[Tensor], scale: float, relative: Optional[RelativeScores] = None
) -> Tensor:
    """Return scale * Q K^T + relative scores + mask (mixhead eq. 9, inside the brackets), in float32 or float64.

    Shapes: query [B, H, Nq, D], key [B, H, Nk, D], mask broadcastable to the scores [B, H, Nq, Nk]; -inf hides a key.
    """
    scores = torch.matmul(upcast(query) * scale, upcast(key).transpose(2, 3))  # [B, H, Nq, Nk]
    if relative is not None:
        relative = RelativeScores(upcast(relative.query), upcast(relative.key))
        scores = scores + relative_scores(relative, key.size(2))
    return scores if mask is None else scores + mask


def mix_heads(weights: Tensor, mixing: Optional[Tensor]) -> Tensor:
    """Return Pbar_i = sum_j M[j, i] P_j (mixhead eq. 12), for P [B, H, Nq, Nk] and M [H, H'] or [B, Nq, H, H'].

    M[..., j, i] is the weight of source head j in mixed head i. Without M the weights stay as they are.
    """
    if mixing is None:
        return weights
    mixing = mixing.to(weights.dtype)
    by_query = weights.transpose(1, 2)  # [B, Nq, H, Nk]
    return torch.matmul(mixing.transpose(-2, -1), by_query).transpose(1, 2)


def reference_attention(inputs: AttentionInputs) -> Tensor:
    """Compute mixhead eqs 8-12 in float32 or better for inputs of any dtype."""
    query, key, value = inputs[:3]
    n_queries, n_keys, dtype = query.shape[2], key.shape[2], upcast(query).dtype
    with without_autocast(query.device):
        masks = (inputs.causal, inputs.attn_mask, inputs.key_padding_mask)
        mask = additive_mask(*masks, n_queries, n_keys, query.device, dtype)
        scores = attention_scores(query, key, mask, inputs.scale, inputs.relative)  # [B, H, Nq, Nk]
        weights = NORMALIZERS[inputs.normalizer].weights(scores, mask is None)  # [B, H, Nq, Nk]
        if inputs.gain is not None:
            weights = weights * toeplitz(upcast(inputs.gain), n_queries, n_keys)
        weights = mix_heads(weights, inputs.mixing)  # [B, H', Nq, Nk]
        output = torch.matmul(F.dropout(weights, inputs.dropout_p), upcast(value))  # [B, H', Nq, Dv]
    return output.to(value.dtype)
