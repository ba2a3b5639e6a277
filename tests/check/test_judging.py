"""Test that wrong results are called wrong, and right ones right."""

import pytest
import torch

from mixhead_plugin.check.judging import judge
from mixhead_plugin.ops import api
from mixhead_plugin.ops.sample_calls import CallKind
from mixhead_plugin.ops.triton import support


def test_kernels_without_room_for_their_trial_are_not_wrong(monkeypatch):
    pytest.importorskip("triton")
    from mixhead_plugin.ops.triton import verify

    def lack(kind):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(verify, "try_on_device", lack)
    monkeypatch.setattr(support, "machine_problem", lambda: "")
    monkeypatch.setattr(support, "call_problem", lambda inputs: "")
    judged = judge(CallKind("softmax", 2, 4, 4, torch.float32, torch.device("cpu")))
    assert judged.kernels == "cannot be tried now: CUDA out of memory"
    assert judged.fault == "" and 0 < judged.error < 1


@pytest.mark.parametrize("factor", ["left", "right", "diagonal"])
def test_a_wrong_gradient_of_a_factor_of_m_is_named(factor, monkeypatch):
    original = api.attend
    name = f"mixing_{factor}"

    def with_wrong_gradient(call, impl):
        given = getattr(call, name)
        return original(call.with_tensors({name: 3 * given - 2 * given.detach()}), impl)

    monkeypatch.setattr(api, "attend", with_wrong_gradient)
    fields = {"rank": 2, "mixing_dtype": torch.float32}
    judged = judge(CallKind("softmax", 4, 8, 8, torch.float32, torch.device("cpu"), **fields))
    assert judged.fault.startswith(f"the gradient of {name} is wrong by ")


ALL_QUERIES = {"mixing_dim": 2, "causal": True}
BY_HEAD = {"mask_dtype": torch.float32, "mask_by": "head"}
RIGHT = {  # by what could make a right implementation look wrong
    "one number": (("unnormalized", 1, 1, torch.float32), ALL_QUERIES),
    "few terms of exp(s) make the sum": (("unnormalized", 8, 2, torch.float16), ALL_QUERIES),
    "quotients of small numbers": (("swish-l2", 2, 2, torch.float32), ALL_QUERIES),
    "differences of small numbers": (("softpick", 8, 2, torch.float32), ALL_QUERIES),
    "the largest of many parts": (("l2", 5, 1, torch.float32), BY_HEAD),
    "one score makes the error of all heads": (
        ("unnormalized", 2, 21, torch.float32),
        {"score_mixing_dim": 4, **BY_HEAD},
    ),
    "one number a row": (("swish-l2", 1, 1, torch.float32), {"rank": 2}),
    "a score beside the gradient's jump": (
        ("softpick", 8, 57, torch.float32),
        {"mixing_dim": 2, **BY_HEAD},
    ),
}


@pytest.mark.parametrize("why", RIGHT)
def test_right_results_are_not_called_wrong(why):
    (normalizer, heads, head_dim, dtype), fields = RIGHT[why]
    if "mixing_dim" in fields or "rank" in fields:
        fields = {**fields, "mixing_dtype": dtype}
    kind = CallKind(normalizer, heads, head_dim, head_dim, dtype, torch.device("cpu"), **fields)
    assert judge(kind).fault == ""


def test_a_draw_in_which_the_formula_is_not_finite_is_left_out():
    """In one of these draws the formula is NaN: the rounded weights of entmax do not sum to 1."""
    fields = {"mixing_dim": 4, "mixing_dtype": torch.bfloat16, "sink": True, "causal": True}
    judged = judge(CallKind("entmax15", 8, 2, 2, torch.bfloat16, torch.device("cpu"), **fields))
    assert judged.fault == "" and 0 < judged.error < 1
