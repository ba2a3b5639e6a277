"""Which implementation "auto" takes; an explicit choice runs or raises."""

from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.ops import IMPLEMENTATIONS, attention, choice, implementation_problem
from mixhead_plugin.ops.inputs import AttentionInputs
from tests.ops.calls import tensors


def inputs(head_dim=4, value_dim=None, n_queries=8, device="cpu", **changes):
    shapes = {
        "query": (n_queries, head_dim),
        "key": (8, head_dim),
        "value": (8, value_dim or head_dim),
    }
    given = {name: torch.zeros(1, 2, *shape, device=device) for name, shape in shapes.items()}
    return AttentionInputs(**given | changes)


def alike(batch, length):
    """Return query, key and value of 8 heads of 32."""
    return dict.fromkeys(("query", "key", "value"), torch.empty(batch, 8, length, 32))


PADDING = torch.zeros(1, 8, dtype=torch.bool)


@pytest.mark.parametrize(
    "changes, chosen",
    [
        (dict(), "fused"),
        (dict(causal=True), "fused"),
        (dict(key_padding_mask=PADDING), "fused"),
        (dict(attn_mask=torch.zeros(8, 8)), "fused"),
        # on a CPU, torch would write all weights out
        (dict(dropout_p=0.1), "blockwise"),
        (dict(attn_mask=torch.zeros(1, 8, requires_grad=True)), "blockwise"),
        (dict(value_dim=5), "blockwise"),
        (dict(causal=True, key_padding_mask=PADDING), "blockwise"),
        (dict(normalizer="sigsoftmax"), "blockwise"),
        (dict(mixing=torch.eye(2)), "blockwise"),
        (dict(mixing=torch.eye(2), n_queries=1), "reference"),
        (dict(mixing_left=torch.zeros(1, 8, 2, 1)), "blockwise"),
        (dict(n_queries=1), "reference"),
        (dict(mixing=torch.eye(2), head_dim=8), "reference"),
        (dict(dropout_p=0.1, head_dim=8), "reference"),
        (dict(dropout_p=0.1, **alike(1000, 16)), "reference"),
        (dict(dropout_p=0.1, **alike(81, 20)), "reference"),  # all scores fill no block
        (dict(dropout_p=0.1, **alike(82, 20)), "blockwise"),
        (dict(dropout_p=0.1, **alike(1, 33)), "blockwise"),
        (dict(device="meta"), "reference"),
    ],
)
def test_auto_takes_what_is_usually_the_fastest(changes, chosen):
    assert choice.fastest(inputs(**changes)) == chosen


@pytest.mark.parametrize("obstacle", [None, "machine_problem", "call_problem", "trial_fault"])
def test_auto_takes_the_kernels_where_they_serve(monkeypatch, obstacle):
    for name in ("machine_problem", "call_problem", "trial_fault"):
        monkeypatch.setattr(
            choice.support, name, lambda *call, name=name: "no" if name == obstacle else ""
        )
    on_gpu = inputs(normalizer="l2")
    on_gpu = on_gpu._replace(query=_Elsewhere(on_gpu.query.half()))
    assert choice.fastest(on_gpu) == ("blockwise" if obstacle else "triton")
    with mock.patch.object(torch.version, "hip", "6.4"):
        assert choice.fastest(on_gpu) == "blockwise"
    assert choice.fastest(inputs(normalizer="l2")) == "blockwise"


@pytest.mark.parametrize(
    "masks", [{}, {"attn_mask": torch.zeros(8, 8)}, {"key_padding_mask": PADDING}]
)
@pytest.mark.parametrize("problem", ["", "no"])
def test_auto_takes_the_kernels_for_softmax_behind_a_mask(monkeypatch, masks, problem):
    for name in ("machine_problem", "call_problem", "trial_fault"):
        monkeypatch.setattr(choice.support, name, lambda *call: problem)
    on_gpu = inputs(**masks)
    on_gpu = on_gpu._replace(query=_Elsewhere(on_gpu.query.half()))
    assert choice.fastest(on_gpu) == ("triton" if masks and not problem else "fused")


@pytest.mark.parametrize("tf32, chosen", [(False, "blockwise"), (True, "triton")])
def test_auto_takes_the_kernels_for_float32_only_with_tf32(monkeypatch, tf32, chosen):
    for name in ("machine_problem", "call_problem", "trial_fault"):
        monkeypatch.setattr(choice.support, name, lambda *call: "")
    monkeypatch.setattr(choice.support, "allows_tf32", lambda: tf32)
    on_gpu = inputs(normalizer="l2")
    assert choice.fastest(on_gpu._replace(query=_Elsewhere(on_gpu.query))) == chosen


@pytest.fixture
def gpu(monkeypatch):
    """Let the kernels be asked on a machine without a GPU; they have no fault."""
    for name in ("machine_problem", "_device_problem", "trial_fault"):
        monkeypatch.setattr(choice.support, name, lambda *call: "")
    on_gpu = inputs()
    return on_gpu._replace(query=_Elsewhere(on_gpu.query.half()))


@pytest.mark.parametrize(
    "dropout_p, made, shape, learned, chosen",
    [
        pytest.param(0.1, "inside", (2, 8, 8), True, "fused", id="a bias by head, made inside"),
        pytest.param(0.1, "inside", (1, 2, 8, 8), True, "fused", id="likewise, four dimensions"),
        pytest.param(0.1, "outside", (2, 8, 8), True, "fused", id="a bias by head, given"),
        # Nothing tells it from a learned one in the first pass.
        pytest.param(0.1, "inside", (2, 8, 8), False, "fused", id="a fixed mask by head"),
        pytest.param(0.1, "inside", (8, 8), False, "triton", id="a mask for all heads"),
        pytest.param(0.1, "inside", (1, 1, 8, 8), False, "triton", id="likewise, four dimensions"),
        pytest.param(0.0, "inside", (2, 8, 8), False, "triton", id="without dropout"),
    ],
)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_both_passes_of_a_checkpoint_choose_alike(
    gpu, dropout_p, made, shape, learned, chosen, use_reentrant
):
    bias = torch.zeros(shape, requires_grad=learned)
    found = []

    def layer(x, given):
        mask = bias * 1.0 if made == "inside" else given
        found.append(choice.fastest(gpu._replace(attn_mask=mask, dropout_p=dropout_p)))
        return x.sin()  # saves x, so a checkpoint computes it again

    x = torch.zeros(1, requires_grad=True)
    checkpoint(layer, x, bias * 1.0, use_reentrant=use_reentrant).sum().backward()
    assert found == [chosen, chosen]


def test_with_dropout_a_mask_of_the_only_head_may_be_a_bias(gpu):
    one = gpu._replace(
        query=_Elsewhere(torch.zeros(1, 1, 8, 4, dtype=torch.float16)),
        key=gpu.key[:, :1].half(),
        value=gpu.value[:, :1].half(),
    )
    mask = torch.zeros(1, 1, 8, 8)
    assert choice.fastest(one._replace(attn_mask=mask, dropout_p=0.1)) == "fused"
    assert choice.fastest(one._replace(attn_mask=mask)) == "triton"


class _Elsewhere:
    """Hold a tensor's shape and dtype on a device that this machine lacks."""

    def __init__(self, tensor):
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.device = torch.device("cuda")


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if implementation_problem(name)])
def test_an_explicit_choice_that_cannot_serve_raises_with_the_reason(impl):
    with pytest.raises(RuntimeError, match=f"impl '{impl}': .*usable here: auto, reference"):
        attention(**tensors(), impl=impl)
