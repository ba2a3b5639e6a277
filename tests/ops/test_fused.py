"""Test which of torch's kernels compute plain softmax; test_attention.py has their numbers."""

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mixhead_plugin.check.judging import OF_TORCH
from mixhead_plugin.ops import fused
from mixhead_plugin.ops.accuracy import compare, fault_in, results
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.sample_calls import CallKind, sample_call

ON_GPU = torch.device("cuda")


def allowed():
    """Return whether torch may take its flash, efficient, math and cuDNN kernels."""
    cuda = torch.backends.cuda
    enabled = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    return [each() for each in (*enabled, cuda.cudnn_sdp_enabled)]


def test_cudnn_is_off_for_a_call_alone():
    before = allowed()
    with fused._without_cudnn(ON_GPU):
        assert allowed() == [*before[:3], False]
    assert allowed() == before


def test_a_call_inside_a_call_does_not_wait_for_it():
    before = allowed()

    def nested():
        with fused._without_cudnn(ON_GPU), fused._without_cudnn(ON_GPU):
            pass

    thread = threading.Thread(target=nested, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert allowed() == before


def test_what_the_caller_forbids_stays_forbidden():
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION]):
        with fused._without_cudnn(ON_GPU):
            assert allowed() == [False, False, True, False]
        assert fused._allowed_kernels() == [SDPBackend.MATH]  # what a compiled call takes


def on_gpu(dtype=torch.float32):
    """Return a call with what `serves` reads of tensors on a GPU, so that none is needed."""
    tensor = SimpleNamespace(device=ON_GPU, dtype=dtype)
    return AttentionInputs(query=tensor, key=tensor, value=tensor)


@pytest.mark.parametrize("kernel", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_another_implementation_is_taken_where_the_caller_allows_the_kernels_of_cudnn_alone(kernel):
    """Without these torch would have no kernel left and raise."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert not fused.serves(on_gpu())
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, kernel]):
        assert fused.serves(on_gpu())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float64_on_a_gpu_is_left_to_other_implementations(dtype):
    """torch has its formula alone there, which keeps all weights."""
    assert fused.serves(on_gpu(dtype)) == (dtype != torch.float64)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5, 1.0])
def test_a_call_that_drops_all_weights_is_left_to_other_implementations(dropout_p):
    """Kernels of torch refuse it or divide by 1 - p."""
    assert fused.serves(on_gpu()._replace(dropout_p=dropout_p)) == (dropout_p < 1)


def test_a_call_waits_for_that_of_another_thread():
    """The second one would put the switch back while the first one computes."""
    order = []

    def second():
        with fused._without_cudnn(ON_GPU):
            order.append("second")

    thread = threading.Thread(target=second)
    before = allowed()
    with fused._without_cudnn(ON_GPU):
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert allowed() == before


# ---- on a GPU ----------------------------------------------------------------------------------

ORDERS = {  # which dimension of [B, H, N, D] comes first in memory, then the others
    "contiguous": (0, 1, 2, 3),
    "fairseq's": (2, 0, 1, 3),
    "Hugging Face's": (0, 2, 1, 3),
}
MASKS = {"none": {}, "causal": {"causal": True}, "mask": {"mask_dtype": torch.float32}}


def in_order(tensor, order):
    """Return a copy whose dimensions lie in memory in this order."""
    copy = tensor.permute(order).contiguous()
    return copy.permute([order.index(dim) for dim in range(4)])


def plant_a_plan(inputs, d_out):
    """Let torch plan a backward pass for a gradient that lies so, as another module would."""
    mask = inputs.attn_mask
    given = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    out = F.scaled_dot_product_attention(
        *given, attn_mask=None if mask is None else mask.to(d_out.dtype), is_causal=inputs.causal
    )
    torch.autograd.grad(out, given, d_out)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", MASKS)
def test_gradients_are_right_after_calls_whose_gradients_lie_otherwise(masks, dtype, compiled):
    attend = fused.fused_attention
    if compiled:
        attend = torch.compile(attend, fullgraph=True)
    for order in ORDERS.values():
        kind = CallKind("softmax", 8, 64, 64, dtype, ON_GPU, **MASKS[masks])
        inputs, d_out = sample_call(kind, 512, 512)
        laid = {name: in_order(getattr(inputs, name), order) for name in ("query", "key", "value")}
        inputs = inputs.with_tensors(laid)
        plant_a_plan(inputs, in_order(d_out, order))
        for order_of_d_out in ORDERS.values():
            found = results(attend, inputs, in_order(d_out, order_of_d_out))
            draw = compare(inputs, d_out, torch.ones(1, device=ON_GPU), found)
            assert not fault_in([draw], OF_TORCH), (order, order_of_d_out)
