"""Mixed attention by the equations of the papers; every other implementation is tested against it.

The three steps are separate functions: a module that returns its weights, or is scripted, calls them one by one.
"""

from contextlib import nullcontext
from typing import ContextManager, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

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

    Args:
        query: [B, H, Nq, D]
        key: [B, H, Nk, D]
        mask: additive, broadcastable to [B, H, Nq, Nk]; -inf hides a key
        scale: usually D ** -0.5
        relative: scores by distance
    """
    scores = torch.matmul(upcast(query) * scale, upcast(key).transpose(2, 3))  # [B, H, Nq, Nk]
    if relative is not None:
        relative = RelativeScores(upcast(relative.query), upcast(relative.key))
        scores = scores + relative_scores(relative, key.size(2))
    return scores if mask is None else scores + mask


def mix_heads(weights: Tensor, mixing: Optional[Tensor]) -> Tensor:
    """Return Pbar_i = sum_j M[j, i] P_j (mixhead eq. 12).

    Args:
        weights: P [B, H, Nq, Nk]
        mixing: M [H, H'] or [B, Nq, H, H'], M[..., j, i]: weight of source head j in mixed head i; None for P as it is
    """
    if mixing is None:
        return weights
    mixing = mixing.to(weights.dtype)
    by_query = weights.transpose(1, 2)  # [B, Nq, H, Nk]
    return torch.matmul(mixing.transpose(-2, -1), by_query).transpose(1, 2)


def reference_attention(
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
    """Compute mixhead eqs 8-12 in float32 or better for inputs of any dtype; arguments as in `ops.attention`."""
    with without_autocast(query.device):
        mask = additive_mask(
            causal, attn_mask, key_padding_mask, query.shape[2], key.shape[2], query.device, upcast(query).dtype
        )
        scores = attention_scores(query, key, mask, scale, relative)  # [B, H, Nq, Nk]
        weights = NORMALIZERS[normalizer].weights(scores, mask is None)  # [B, H, Nq, Nk]
        if gain is not None:
            weights = weights * toeplitz(upcast(gain), query.shape[2], key.shape[2])
        weights = mix_heads(weights, mixing)  # [B, H', Nq, Nk]
        output = torch.matmul(F.dropout(weights, dropout_p), upcast(value))  # [B, H, Nq, Dv]
    return output.to(value.dtype)
