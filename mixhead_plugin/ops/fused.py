"""Plain softmax attention by torch's own fused kernels."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import additive_mask, with_four_dimensions
from mixhead_plugin.ops.precision import upcast, without_autocast
from mixhead_plugin.ops.transforms import while_traced

# If the largest number of a row of a mask is lower, the row's log(sum exp(s)) lacks digits: see
# `_loses_gradients`. A float32 of this size still has three digits behind the point.
LOWEST = -1e4


def serves(inputs: AttentionInputs) -> bool:
    """Return whether torch has a fused kernel for this call."""
    query = inputs.query
    key = inputs.key
    value = inputs.value
    mask = inputs.attn_mask
    if inputs.normalizer != "softmax" or inputs.operands().keys() != {"query", "key", "value"}:
        return False
    if inputs.dropout_p == 1:
        # Nothing is left, and some kernels of torch divide by 1 - p, or refuse it.
        return False
    if inputs.scale <= 0:
        # torch's kernel hides keys before it scales, and -inf times 0 is NaN.
        return False
    if query.device.type == "cuda":
        # Nothing is left to torch where the caller allows the kernels of cuDNN alone, because
        # `fused_attention` takes none of them. For float64 torch has its formula alone, which keeps
        # all weights.
        return bool(_allowed_kernels()) and query.dtype != torch.float64
    if query.device.type != "cpu":
        return True
    # On a CPU torch has no kernel for the following, and would keep all weights.
    if inputs.dropout_p > 0 or query.shape[3] != value.shape[3]:
        return False
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        return False
    if inputs.causal and inputs.key_padding_mask is not None:
        # Both together need a mask [B, 1, Nq, Nk].
        return False
    if mask is None:
        return True
    if mask.requires_grad:
        return False
    if query.dtype in (torch.float16, torch.bfloat16):
        # torch wants the mask in the dtype of the query, which would round it. `blockwise` reads it
        # as it is. On a GPU blocks are much slower than torch's kernel, so there it is rounded.
        return False
    return not _loses_gradients(inputs)


def _loses_gradients(inputs: AttentionInputs) -> bool:
    """Return whether gradients would come from a log(sum exp(s)) too large for its digits.

    A row whose scores are all about -1e8, or the lowest float, has such a sum. torch's kernel
    differentiates weights by it, so each gradient of the row would be several times too large,
    without a word. Only kernels on a CPU were looked at.

    Args:
        inputs: the inputs of a call with an attn_mask
    """
    tensors = (inputs.query, inputs.key, inputs.value)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return False
    if torch.compiler.is_compiling():
        # A program that is compiled whole cannot look at the numbers of a mask.
        return True

    # All masks together: the largest number of a row of attn_mask may belong to a key that the
    # row does not see, because it is padding or in the future.
    mask = additive_mask(inputs, upcast(inputs.query).dtype)
    assert mask is not None  # there is an attn_mask
    if mask.numel() == 0:
        return False
    largest = mask.amax(-1)
    if largest.amin().item() >= LOWEST:  # as nearly always; what follows takes longer
        return False
    sees_no_key = largest == float("-inf")
    return bool((largest.masked_fill(sees_no_key, 0.0) < LOWEST).any())


def fused_attention(inputs: AttentionInputs) -> Tensor:
    """Compute `ops.attention` for inputs that it `serves`."""
    query = inputs.query
    # torch aligns the first query with the first key; here the last query belongs to the last key.
    # The comparison stands in an `if`, because torch.compile decides an `if` while it traces. A
    # bool made of lengths that change would be a symbol, and `is_causal` takes none.
    plain_causal = False
    another_mask = inputs.attn_mask is not None or inputs.key_padding_mask is not None
    causal_is_the_only_mask = inputs.causal and not another_mask
    if causal_is_the_only_mask and query.shape[2] == inputs.key.shape[2]:
        plain_causal = True

    mask = None
    unseen = None  # rows that see no key
    if not plain_causal:
        mask = additive_mask(inputs, upcast(query).dtype)
    if mask is not None:
        mask = with_four_dimensions(mask)
        hidden = mask == float("-inf")
        # Kernels differ on rows that see no key. Such a row sees all keys here, and its output is
        # set to 0 below.
        unseen = hidden.all(-1, keepdim=True)  # [.., .., .., 1]
        # Rounding may not turn a low score, like the -1e8 of fairseq's encoders, into a hidden key.
        mask = mask.clamp_min(torch.finfo(query.dtype).min).masked_fill(hidden, float("-inf"))
        # torch wants this dtype; `serves` says when that may round the mask.
        mask = mask.masked_fill(unseen, 0.0).to(query.dtype)

    with without_autocast(query.device), _without_cudnn(query.device):
        out = F.scaled_dot_product_attention(
            query,
            inputs.key,
            inputs.value,
            attn_mask=mask,
            dropout_p=inputs.dropout_p,
            is_causal=plain_causal,
            scale=inputs.scale,
        )
    # The compiler knows no `grad_fn`.
    if not torch.compiler.is_compiling() and out.grad_fn is not None:
        out.grad_fn.register_hook(_name_the_missing_derivative)
    if unseen is None:
        return out
    return out.masked_fill(unseen, 0.0)


# Torch's switch belongs to the process: another thread must not put it back during a call. The lock
# lets its own thread in again, because a mode or a subclass of torch's may attend inside a call.
_cudnn_lock = threading.RLock()


def _without_cudnn(device: torch.device) -> AbstractContextManager:
    """Return a context in which torch takes none of its cuDNN kernels, which it prefers on Hopper.

    torch keeps cuDNN's plan of a backward pass without looking at how the gradient of the output
    lies in memory. Another call of the same shapes, whose gradient lies otherwise, gets this plan,
    and wrong gradients (torch 2.11, cuDNN 9.19, H200; docs/gpus.md).
    """
    if device.type != "cuda":
        return nullcontext()
    if torch.compiler.is_compiling():  # it knows this context alone
        return sdpa_kernel(_allowed_kernels())
    return _cudnn_off()


@contextmanager
def _cudnn_off() -> Iterator[None]:
    with _cudnn_lock:
        allowed = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(allowed)


@while_traced
def _allowed_kernels() -> list[SDPBackend]:
    """Return which of torch's kernels the caller allows, but for those of cuDNN."""
    allows = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    }
    return [kernel for kernel, is_enabled in allows.items() if is_enabled()]


def _name_the_missing_derivative(
    d_inputs: tuple[Tensor | None, ...], _: Any
) -> tuple[Tensor | None, ...] | None:
    """Refuse a second derivative that torch's kernel lacks, in words that name `impl`.

    A hook of torch's node in the graph. Whoever asks for a second derivative goes back through the
    gradients that it returns.

    Args:
        d_inputs: the gradients of query, key, value and mask

    Returns:
        gradients in their place; None to leave them as they are
    """
    if not torch.is_grad_enabled():  # as nearly always: nobody asks for a second derivative
        return None
    replaced = []
    lacking = False
    for d_input in d_inputs:
        node = None if d_input is None else d_input.grad_fn
        if d_input is not None and node is not None and node.name().endswith("NotImplemented"):
            lacking = True
            d_input = _Once.apply(d_input)
        replaced.append(d_input)
    return tuple(replaced) if lacking else None


class _Once(torch.autograd.Function):
    """The identity, whose derivative is an error."""

    @staticmethod
    def forward(ctx: Any, d_input: Tensor) -> Tensor:
        return d_input.view_as(d_input)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> Any:
        kernel = "torch's scaled_dot_product_attention"
        raise NotImplementedError(
            f"impl 'auto' took {kernel}, which has no second derivative here; impl 'reference' has"
        )
