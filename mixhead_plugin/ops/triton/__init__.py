"""Fused GPU kernels (triton.md). Only a call that runs them imports triton."""

import importlib.metadata
import importlib.util
import os
import re
from typing import Optional

import torch
from torch import Tensor

from mixhead_plugin.ops.forward_mode import refuse_forward_mode
from mixhead_plugin.ops.inputs import AttentionInputs

NORMALIZERS = ("softmax", "sigsoftmax", "l2", "sigmoid")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED_DTYPES = (torch.float16, torch.float32)  # triton's interpreter multiplies bfloat16 as integers
MAX_HEAD_DIM = 256
MAX_HEADS = 64
MIN_CAPABILITY = 8
MIN_VERSION = (3, 5)  # the oldest version that compiled the kernels


def _package_problem() -> str:
    """Return why the package triton cannot be used, without importing it."""
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    for name in ("triton", "pytorch-triton", "triton-windows"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if tuple(map(int, re.findall(r"\d+", version)[:2])) >= MIN_VERSION:
            return ""
        return f"needs triton {'.'.join(map(str, MIN_VERSION))} or newer, {version} is installed"
    return ""  # a build without metadata: assume that it is new enough


_PACKAGE_PROBLEM = _package_problem()  # at import, because torch.compile cannot trace it


def machine_problem() -> str:
    """Return why no kernel can run on the current device, or an empty string. This initialises CUDA."""
    if _interpreted():
        return _PACKAGE_PROBLEM
    if torch.version.hip is not None:
        return f"needs an NVIDIA GPU, this torch is built for AMD's (ROCm {torch.version.hip})"
    if not torch.cuda.is_available():
        return "needs a CUDA device and none is visible"
    return _PACKAGE_PROBLEM or _device_problem("cuda", None)


def _interpreted() -> bool:
    """Return True where triton runs its kernels in Python on the CPU, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _device_problem(type_: str, index: Optional[int]) -> str:
    """Return why no kernel can run on a device, or an empty string; an index of None is the current device."""
    if type_ != "cuda":
        return "" if type_ == "cpu" and _interpreted() else f"needs tensors on a CUDA device, not on {type_}"
    device = torch.cuda.get_device_properties(index)
    if device.major < MIN_CAPABILITY:
        which = "the current one" if index is None else f"cuda:{index}"
        return f"needs a GPU of compute capability {MIN_CAPABILITY}.0, {which} has {device.major}.{device.minor}"
    return ""


def variant_problem(normalizer: str, heads: int, head_dim: int, mixes: bool) -> str:
    """Return why there is no kernel for such heads, or an empty string."""
    if normalizer not in NORMALIZERS:
        return f"has no kernel for normalizer {normalizer!r}, only for {', '.join(NORMALIZERS)}"
    if head_dim > MAX_HEAD_DIM:
        return f"has no kernel for head size {head_dim}, only up to {MAX_HEAD_DIM}"
    if mixes and heads > MAX_HEADS:
        return f"mixes at most {MAX_HEADS} heads, not {heads}"
    return ""


def problem(inputs: AttentionInputs) -> str:
    """Return why the kernels cannot serve this call of `ops.attention`, or an empty string."""
    query, value = inputs.query, inputs.value
    heads, head_dim = query.shape[1], max(query.shape[3], value.shape[3])
    if reason := variant_problem(inputs.normalizer, heads, head_dim, inputs.mixing is not None):
        return reason
    if inputs.relative_query is not None:
        return "has no kernel for relative positions"
    if inputs.score_mixing is not None:
        return "has no kernel for mixed scores"
    if inputs.gain is not None:
        return "has no kernel for a gain by distance"
    if value.shape[1] != heads:
        return f"mixes {heads} heads into as many, not into {value.shape[1]}"
    if query.dtype not in DTYPES:
        return f"has no kernel for {query.dtype}"
    if _interpreted() and query.dtype not in INTERPRETED_DTYPES:
        return f"computes {query.dtype} wrongly under TRITON_INTERPRET=1"
    if inputs.attn_mask is not None and inputs.attn_mask.requires_grad:
        return "gives a learned attn_mask no gradient"
    return _device_problem(query.device.type, query.device.index)


def fault(inputs: AttentionInputs) -> str:
    """Return what the kernels do wrong on this device for such a call, or an empty string (see `verify`)."""
    from mixhead_plugin.ops.triton import verify

    return "" if _interpreted() else verify.fault(inputs)  # there a trial takes far longer than a call


def triton_attention(inputs: AttentionInputs) -> Tensor:
    """Compute `ops.attention` by fused kernels, for a call that has no `problem`."""
    from mixhead_plugin.ops.triton import operators  # noqa: F401  (imports triton, registers the operators)

    refuse_forward_mode("triton", inputs)
    if inputs.dropout_p > 0:
        # From torch's generator, so that it repeats with torch.manual_seed and under activation checkpointing. From the
        # device's, as in F.dropout, because a CUDA graph replays draws there but would freeze a number of the host.
        inputs = inputs._replace(seed=torch.randint(2**62, (), dtype=torch.int64, device=inputs.query.device))
    return torch.ops.mixhead_plugin.triton(*inputs)[0]
