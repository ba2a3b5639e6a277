"""The three ways of hiding a key, as one additive mask."""

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs


def no_masks(inputs: AttentionInputs) -> bool:
    """Return whether every query sees every key."""
    return not inputs.causal and inputs.attn_mask is None and inputs.key_padding_mask is None


def additive_mask(inputs: AttentionInputs, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of all masks, ``-inf`` where a key is hidden; None if there are no masks.

    It is broadcastable to [B, H, Nq, Nk].

    Args:
        inputs: the inputs of the call
        dtype: dtype of the result, float32 or float64
    """
    n_queries = inputs.query.size(2)
    n_keys = inputs.key.size(2)
    device = inputs.query.device
    mask = inputs.attn_mask
    padding = inputs.key_padding_mask
    if mask is not None:
        mask = mask.to(dtype)
    if inputs.causal:
        # Query t sees the keys up to t + (Nk - Nq); [Nq, Nk]
        every = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
        future = every.triu(1 + n_keys - n_queries)
        if mask is None:
            mask = torch.zeros(1, 1, n_queries, n_keys, dtype=dtype, device=device)
        mask = mask.masked_fill(future, float("-inf"))
    if padding is not None:
        if mask is None:
            mask = torch.zeros(1, 1, 1, n_keys, dtype=dtype, device=device)
        mask = mask.masked_fill(padding[:, None, None, :], float("-inf"))
    return mask


def with_four_dimensions(mask: Tensor) -> Tensor:
    """Return a view of a mask with up to four dimensions, in which those that lack in front are 1.

    So it is broadcastable to [B, H, Nq, Nk] and has as many dimensions.
    """
    while mask.dim() < 4:
        mask = mask[None]
    return mask


def hide_lowest(mask: Tensor | None) -> Tensor | None:
    """Return a mask of floats in which the least number of its type has become -inf.

    Many models hide keys by the least number. That is far enough for softmax, but other normalizers
    would count such a key. None and masks of other types stay.

    A larger number, as -1e9, is not taken for hidden: it may be a score.
    """
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, float("-inf"))


def as_added_mask(attn_mask: Tensor | None, num_heads: int, dtype: torch.dtype) -> Tensor | None:
    """Return a mask as floats to add, with four dimensions: broadcastable to [B, H, Nq, Nk].

    Args:
        attn_mask: [Nq, Nk], [B * H, Nq, Nk] or [B, H, Nq, Nk]; floats are added; in other types
            non-zero hides
        num_heads: H
        dtype: dtype of the result, where the mask has no floats
    """
    if attn_mask is None:
        return None
    if not attn_mask.is_floating_point():
        zeros = torch.zeros_like(attn_mask, dtype=dtype)
        attn_mask = zeros.masked_fill(attn_mask.to(torch.bool), float("-inf"))
    if attn_mask.dim() == 3:
        return attn_mask.unflatten(0, [-1, num_heads])
    return with_four_dimensions(attn_mask)
