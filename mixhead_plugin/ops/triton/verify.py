"""Try each variant of the kernels on the device before its first use.

A small problem goes forward and backward through every tile that a call could get, and must stay within `Bounds`. This
compiles what the calls need anyway; the problem itself takes milliseconds. torch's generators are not used.
"""

import logging
from typing import Dict

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mixhead_plugin.ops.accuracy import N_KEYS, Bounds, Results, Variant, problem_of, variant_of
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.reference import without_autocast
from mixhead_plugin.ops.triton import tuning
from mixhead_plugin.ops.triton.operators import Call

logger = logging.getLogger(__name__)
CAPTURED = "was not tried on this GPU yet, and cannot be while a CUDA graph is captured; run one step before"
_faults: Dict[Variant, str] = {}


def fault(inputs: AttentionInputs) -> str:
    """Return why the kernels must not serve such a call, or an empty string; the first call of a variant tries it."""
    return _fault_of(*variant_of(inputs))


@torch.compiler.assume_constant_result
def _fault_of(*fields: object) -> str:
    variant = Variant(*fields)
    if variant not in _faults:
        if variant.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return CAPTURED
        _faults[variant] = try_on_device(variant)
        if _faults[variant]:
            logger.warning(
                "impl 'triton' fails here: %s; 'auto' takes 'blockwise' instead, for %s", _faults[variant], variant
            )
    return _faults[variant]


def try_on_device(variant: Variant) -> str:
    """Return what the kernels of a variant do wrong on its device, or an empty string."""
    # The call may come from inference mode, under autocast or from a trace of fake tensors.
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(variant.device), _disable_current_modes():
        try:
            return _try(*problem_of(variant))
        except Exception as error:  # of the compiler, the driver or the device: all count
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _try(inputs: AttentionInputs, d_out: Tensor) -> str:
    kept = torch.ones(1, device=inputs.query.device)
    if inputs.dropout_p > 0:
        kept = _kept(inputs)
        share = float(kept.mean())
        if not abs(share - (1 - inputs.dropout_p)) < 0.05:
            return f"dropout keeps {share:.2f} of the weights, not {1 - inputs.dropout_p}"
        kept = kept / (1 - inputs.dropout_p)
    bounds = Bounds(inputs, d_out, kept)
    sizes = inputs.query.shape[1], max(inputs.query.shape[3], inputs.value.shape[3]), inputs.query.element_size()
    faults = (bounds.fault(_results(inputs, d_out, i)) for i in range(tuning.most_candidates(*sizes)))
    return next(filter(None, faults), "")


def _results(inputs: AttentionInputs, d_out: Tensor, candidate: int) -> Results:
    """Return the output and the gradients by the tiles at place `candidate` of their lists."""
    call = Call(inputs, candidate)
    out, rows = call.forward()
    return {"output": out, **dict(zip(inputs.given(), call.backward(d_out, rows, out)))}


def _kept(inputs: AttentionInputs) -> Tensor:
    """Return 1 for each weight that dropout keeps, else 0: which ones depends on the seed and the place alone."""
    width = inputs.value.shape[3]
    identity = torch.eye(N_KEYS, N_KEYS + width, dtype=inputs.value.dtype, device=inputs.value.device)
    equal = inputs._replace(query=torch.zeros_like(inputs.query), key=torch.zeros_like(inputs.key), mixing=None)
    equal = equal._replace(causal=False, attn_mask=None, key_padding_mask=None)
    parts = []
    for first in range(0, N_KEYS, width):
        columns = identity[:, first : first + width].expand(*inputs.value.shape[:2], -1, -1).contiguous()
        parts.append(Call(equal._replace(value=columns)).forward()[0] != 0)
    return torch.cat(parts, 3)[..., :N_KEYS].float()
