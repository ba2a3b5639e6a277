"""Fused GPU kernels (triton.md). Only a call that runs them imports triton."""

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.operators import announce_flops


def triton_attention(inputs: AttentionInputs) -> Tensor:
    """Compute `ops.attention` by fused kernels, for a call that has no `call_problem`."""
    from mixhead_plugin.ops.triton import operators  # noqa: F401  (imports triton, registers the operators)

    if inputs.factors() is not None:
        # The kernels mix by M itself. triton.md, 'Factors of M', says why.
        inputs = inputs.with_mixing(inputs.matrix())
    if inputs.dropout_p > 0:
        # From torch's generator, so that it repeats with torch.manual_seed and under activation
        # checkpointing. From the device's, as in F.dropout, because a CUDA graph replays draws
        # there but would freeze a number of the host.
        seed = torch.randint(2**62, (), dtype=torch.int64, device=inputs.query.device)
        inputs = inputs._replace(seed=seed)
    announce_flops()
    return torch.ops.mixhead_plugin.triton(*inputs)[0]
