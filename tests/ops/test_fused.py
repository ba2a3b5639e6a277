"""Test plain softmax by torch's own kernels on a GPU; test_attention.py has those of a CPU."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixhead_plugin.check import OF_TORCH
from mixhead_plugin.ops import fused
from mixhead_plugin.ops.accuracy import CallKind, compare, fault_in, results, sample_call
from tests.covering import covering

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# Which dimension of [B, H, N, D] comes first in memory, then the others.
ORDERS = {"contiguous": (0, 1, 2, 3), "fairseq's": (2, 0, 1, 3), "Hugging Face's": (0, 2, 1, 3)}
MASKS = {
    "none": {},
    "causal": {"causal": True},
    "mask": {"mask": torch.float32},
    "padding": {"padding": True},
}


def in_order(tensor, order):
    """Return a copy whose dimensions lie in memory in this order."""
    copy = tensor.permute(order).contiguous()
    return copy.permute([order.index(dim) for dim in range(4)])


def fault_of(attend, order, order_of_d_out, n, dtype=torch.bfloat16, **masks):
    """Return what is wrong with a call; empty if nothing is."""
    kind = CallKind("softmax", 8, 64, 64, dtype, DEVICE, **masks)
    inputs, d_out = sample_call(kind, n, n)
    laid = {}
    for name in ("query", "key", "value"):
        laid[name] = in_order(getattr(inputs, name), ORDERS[order])
    inputs = inputs.with_tensors(laid)
    assert fused.serves(inputs)
    found = results(attend, inputs, in_order(d_out, ORDERS[order_of_d_out]))
    draw = compare(inputs, d_out, torch.ones(1, device=DEVICE), found)
    return fault_in([draw], OF_TORCH)


# One length is a multiple of 16, one is none.
@covering(
    order=ORDERS,
    order_of_d_out=ORDERS,
    masks=MASKS,
    dtype=[torch.bfloat16, torch.float16],
    n=[512, 150],
)
def test_gradients_are_right_however_heads_lie_in_memory(order, order_of_d_out, masks, dtype, n):
    assert not fault_of(fused.fused_attention, order, order_of_d_out, n, dtype, **MASKS[masks])


@pytest.mark.parametrize("masks", ["none", "mask"])
def test_gradients_of_a_compiled_call_are_right(masks):
    compiled = torch.compile(fused.fused_attention, fullgraph=True)
    assert not fault_of(compiled, "fairseq's", "contiguous", 150, **MASKS[masks])


def test_a_kernel_that_the_caller_forbids_is_not_taken():
    inputs, _ = sample_call(CallKind("softmax", 8, 64, 64, torch.bfloat16, DEVICE), 150, 150)
    inputs.query.requires_grad_()
    assert "ScaledDotProduct" in fused.fused_attention(inputs).grad_fn.name()
    with sdpa_kernel(SDPBackend.MATH):
        assert "ScaledDotProduct" not in fused.fused_attention(inputs).grad_fn.name()
