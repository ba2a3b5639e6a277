"""Fused GPU kernels: `problem` says what they cannot do, without importing triton; see triton.md."""

import importlib.util
import os
from typing import Optional

import torch
from torch import Tensor
from torch.autograd import forward_ad

NORMALIZERS = ("softmax", "sigsoftmax", "l2")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
MAX_HEADS = 64
MIN_CAPABILITY = 8

_INSTALLED = importlib.util.find_spec("triton") is not None  # here, where torch.compile need not follow


def machine_problem() -> str:
    """Why no kernel can run on this machine, in a few words; empty if they can."""
    if not torch.cuda.is_available() and not _interpreted():
        return "needs a CUDA device and none is visible"
    if not _INSTALLED:
        return "needs the package triton, which is not installed"
    return ""


def _interpreted() -> bool:
    """Whether triton runs its kernels in Python, on tensors of the CPU: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _device_problem(type_: str, index: Optional[int]) -> str:
    if type_ != "cuda":
        return "" if type_ == "cpu" and _interpreted() else f"needs tensors on a CUDA device, not on {type_}"
    device = torch.cuda.get_device_properties(index)
    if device.major < MIN_CAPABILITY:
        return f"needs a GPU of compute capability {MIN_CAPABILITY}.0, this one has {device.major}.{device.minor}"
    return ""


def problem(
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
) -> str:
    """Why the kernels cannot serve this call, arguments as in `ops.attention`; empty if they can."""
    heads, head_dim, value_dim = query.shape[1], query.shape[3], value.shape[3]
    if normalizer not in NORMALIZERS:
        return f"has no kernel for normalizer {normalizer!r}, only for {', '.join(NORMALIZERS)}"
    if query.dtype not in DTYPES:
        return f"has no kernel for {query.dtype}"
    if max(head_dim, value_dim) > MAX_HEAD_DIM:
        return f"head size {max(head_dim, value_dim)} is above {MAX_HEAD_DIM}"
    if mixing is not None and heads > MAX_HEADS:
        return f"mixes at most {MAX_HEADS} heads, not {heads}"
    if attn_mask is not None and attn_mask.requires_grad:
        return "gives a learned attn_mask no gradient"
    return _device_problem(query.device.type, query.device.index)


def triton_attention(
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
    """`ops.attention` by fused kernels, for what has no `problem`; arguments as there."""
    from mixhead_plugin.ops.triton import operators  # noqa: F401  (imports triton, registers the operators)

    if not torch.compiler.is_compiling() and _in_forward_mode(query, key, value, mixing):
        raise NotImplementedError("impl 'triton' has no forward-mode derivative; impl 'reference' has")
    seed = None
    if dropout_p > 0:
        # From torch's own generator, on the CPU: it repeats with torch.manual_seed and under activation checkpointing.
        seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu")
    return torch.ops.mixhead_plugin.triton(
        query, key, value, mixing, attn_mask, key_padding_mask, seed, normalizer, causal, dropout_p, scale
    )[0]


def _in_forward_mode(*tensors: Optional[Tensor]) -> bool:
    """Whether any carries a tangent: torch takes an operator without a forward-mode derivative for a constant."""
    if forward_ad._current_level < 0:
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)
