"""Plain softmax attention by torch's own fused kernels."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import additive_mask
from mixhead_plugin.ops.precision import upcast, without_autocast

# Of a row's largest number in a mask. A float32 of this size has three digits behind the point.
LOWEST = -1e4


def serves(inputs: AttentionInputs) -> bool:
    """Return whether torch has a fused kernel for this call."""
    query, key, value = inputs[:3]
    mask = inputs.attn_mask
    if inputs.normalizer != "softmax" or inputs.given().keys() != {"query", "key", "value"}:
        return False
    if query.device.type != "cpu":
        return True
    # On a CPU torch has no kernel for the following, and would keep all weights.
    if inputs.dropout_p > 0 or query.shape[3] != value.shape[3]:
        return False
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return False
    if (
        inputs.causal and inputs.key_padding_mask is not None
    ):  # both together need a mask [B, 1, Nq, Nk]
        return False
    if mask is None:
        return True
    if mask.requires_grad:
        return False
    if query.dtype in (torch.float16, torch.bfloat16):  # the mask would be rounded
        return False
    return not _loses_gradients(inputs[:3], mask)


def _loses_gradients(tensors: Sequence[Tensor], mask: Tensor) -> bool:
    """Return whether gradients would come from a log(sum exp(s)) too large for its digits.

    A row whose scores are all about -1e8, or the lowest float, has such a sum. torch's kernel
    differentiates weights by it, so each gradient of the row would be several times too large,
    without a word. Only kernels on a CPU were looked at.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    if (
        torch.compiler.is_compiling()
    ):  # a program that is compiled whole cannot look at the numbers of a mask
        return True
    if mask.numel() == 0:
        return False
    largest = mask.amax(-1)
    if largest.amin().item() >= LOWEST:  # as nearly always, and faster
        return False
    sees_no_key = largest == float("-inf")
    return bool((largest.masked_fill(sees_no_key, 0.0) < LOWEST).any())


def fused_attention(inputs: AttentionInputs) -> Tensor:
    """Compute `ops.attention` for inputs that it `serves`."""
    query, key, value = inputs[:3]
    plain_causal = False
    alone = inputs.causal and inputs.attn_mask is None and inputs.key_padding_mask is None
    # torch aligns the first query with the first key; here the last query belongs to the last key.
    # An `if`, because the compiler decides one: it would hand a comparison of changing lengths to
    # torch as it stands.
    if alone and query.shape[2] == key.shape[2]:
        plain_causal = True
    mask = unseen = None
    if not plain_causal:
        mask = additive_mask(inputs, upcast(query).dtype)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        hidden = mask == float("-inf")
        # Kernels differ on rows that see no key. Such a row sees all keys here, and its output is
        # set to 0.
        unseen = hidden.all(-1, keepdim=True)  # [.., .., .., 1]
        # Rounding may not turn a low score, like the -1e8 of fairseq's encoders, into a hidden key.
        mask = mask.clamp_min(torch.finfo(query.dtype).min).masked_fill(hidden, float("-inf"))
        mask = mask.masked_fill(unseen, 0.0).to(query.dtype)
    with without_autocast(query.device):
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=inputs.dropout_p,
            is_causal=plain_causal,
            scale=inputs.scale,
        )
    if (
        not torch.compiler.is_compiling() and out.grad_fn is not None
    ):  # the compiler knows no `grad_fn`
        out.grad_fn.register_hook(_name_the_missing_derivative)
    return out if unseen is None else out.masked_fill(unseen, 0.0)


def _name_the_missing_derivative(
    d_inputs: tuple[Tensor | None, ...], _: Any
) -> tuple[Tensor | None, ...] | None:
    """Refuse a second derivative that torch's kernel lacks, in words that name `impl`."""
    if not torch.is_grad_enabled():  # as nearly always: nobody asked for a second derivative
        return None
    lacks = [
        d is not None and d.grad_fn is not None and d.grad_fn.name().endswith("NotImplemented")
        for d in d_inputs
    ]
    if not any(lacks):
        return None
    return tuple(_Once.apply(d) if lack else d for d, lack in zip(d_inputs, lacks))


class _Once(torch.autograd.Function):
    """The identity, without a derivative."""

    @staticmethod
    def forward(ctx: Any, d_input: Tensor) -> Tensor:
        return d_input.view_as(d_input)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> Any:
        kernel = "torch's scaled_dot_product_attention"
        raise NotImplementedError(
            f"impl 'auto' took {kernel}, which has no second derivative here; impl 'reference' has"
        )
