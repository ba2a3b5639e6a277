"""How long attention takes on this machine."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from mixhead_plugin.check.variants import DIMS_OF_MIXING
from mixhead_plugin.ops import api
from mixhead_plugin.ops.accuracy import formula_weights, results
from mixhead_plugin.ops.inputs import AttentionInputs

SPEED_SHAPE = (4, 8, 512, 64)  # B, H, N, D

Attend = Callable[[AttentionInputs], Tensor]


def speed(device: torch.device, seconds: float = 0.5) -> dict[str, float]:
    """Return milliseconds of a forward and backward pass.

    The attention has the SPEED_SHAPE, and is causal, without dropout.

    Args:
        device: where it runs
        seconds: how long each variant is measured, at least
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch, heads, length, head_dim = SPEED_SHAPE
    query, key, value, d_out = (
        torch.randn(SPEED_SHAPE, device=device, dtype=dtype) for _ in range(4)
    )
    unmixed = AttentionInputs(query=query, key=key, value=value, causal=True, scale=head_dim**-0.5)
    matrix = torch.eye(heads, device=device, dtype=dtype)
    matrices = {
        0: None,
        2: matrix,
        4: matrix.expand(batch, length, heads, heads).contiguous(),
    }

    # The function and the dimensions of M.
    runs: dict[str, tuple[Attend, int]] = {
        "torch's attention": (_by_torch, 0),
        "formula, mixing position-wise": (_by_formula, 4),
    }
    for name, dim in DIMS_OF_MIXING.items():
        runs[f"auto, mixing {name}"] = (_by_auto, dim)

    times = {}
    for name, (attend, dim) in runs.items():
        inputs = unmixed._replace(mixing=matrices[dim])
        times[name] = _milliseconds(attend, inputs, d_out, seconds)
    return times


def _by_torch(call: AttentionInputs) -> Tensor:
    return F.scaled_dot_product_attention(call.query, call.key, call.value, is_causal=True)


def _by_formula(call: AttentionInputs) -> Tensor:
    return formula_weights(call) @ call.value


def _by_auto(call: AttentionInputs) -> Tensor:
    return api.attend(call, "auto")


def _milliseconds(attend: Attend, inputs: AttentionInputs, d_out: Tensor, seconds: float) -> float:
    """Return the median time of a forward and backward pass.

    Args:
        attend: computes the output
        inputs: all that it needs
        d_out: the gradient of the output
        seconds: how long it is measured, at least
    """
    given = {"results": results, "attend": attend, "inputs": inputs, "d_out": d_out}
    timer = Timer(
        "results(attend, inputs, d_out)", globals=given, num_threads=torch.get_num_threads()
    )
    return 1000 * timer.blocked_autorange(min_run_time=seconds).median
