"""Test that a kernel is tried before its first use, and that what breaks it is noticed."""

import logging

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.ops import attention, choice
from mixhead_plugin.ops.sample_calls import sample_call
from mixhead_plugin.ops.triton import call_kinds, support
from tests.covering import each_once
from tests.ops.triton_cases import (
    DEVICE,
    SINKS,
    Tile,
    calls,
    inputs,
    passes,
    programs,
    record,
    rows,
    tuning,
    verify,
)

pytestmark = pytest.mark.usefixtures("kernels", "small")


@pytest.fixture
def small(monkeypatch):
    """Take a small problem, of two tiles of 16, and forget what was tried."""
    monkeypatch.setattr(verify, "SIZES" if DEVICE == "cuda" else "INTERPRETED", [(19, 18)])
    monkeypatch.setattr(verify, "_faults", {})
    monkeypatch.setattr(verify, "_said", set())
    monkeypatch.setattr(support, "trial_fault", verify.trial_fault)


def call(mixed=None, dtype=torch.float32, normalizer="softmax", **options):
    return record(inputs(mixed, dtype), normalizer=normalizer, scale=None, **options)


@each_once(
    mixed=[None, "shared", "per query"],
    normalizer=[*support.KERNEL_NORMALIZERS, *SINKS],
    dtype=[torch.float32, torch.float16],
    dropout_p=[0.0, 0.1],
    masks=["none", "causal", "mask and padding"],
)
def test_every_variant_passes(mixed, normalizer, dtype, dropout_p, masks):
    options = {"causal": masks == "causal"}
    if masks == "mask and padding":
        options["attn_mask"] = torch.zeros(3, 19, 37, device=DEVICE)
        options["key_padding_mask"] = torch.zeros(2, 37, dtype=torch.bool, device=DEVICE)
    if normalizer in SINKS:
        options["sink"] = torch.zeros(3, device=DEVICE)
    given = call(mixed, dtype, normalizer.removesuffix(", sink"), dropout_p=dropout_p, **options)
    assert verify.trial_fault(given) == ""


@pytest.mark.parametrize("mixed", [None, "shared"])
def test_heads_without_numbers_pass(mixed):
    """Their scores are 0, so the output is a mean of values, but for dropout."""
    empty = record(inputs(mixed, head_dim=0), dropout_p=0.1)
    assert verify.trial_fault(empty) == ""


# The fixture replaces these.
ORIGINAL_FAULT = support.trial_fault
ORIGINAL_SIZES = verify.SIZES
# what a kernel writes, by the names of its arguments
OUTPUTS = {
    "flash_fwd_kernel": ["o"],
    "flash_bwd_dq_kernel": ["d_q"],
    "flash_bwd_dkv_kernel": ["d_k", "d_v"],
    "mixed_weights_kernel": ["w"],
    "mix_kernel": ["w"],
    "product_over_keys_kernel": ["y"],
    "mixed_bwd_dw_kernel": ["d_w"],
    "mixed_bwd_dm_kernel": ["d_m"],
    "mixed_bwd_ds_kernel": ["d_w"],
    "product_over_queries_kernel": ["y"],
}


def break_kernel(monkeypatch, kernel, how):
    original = programs.start

    def start(started, n_programs, arguments, tile):
        if started.fn.__name__ != kernel:
            return original(started, n_programs, arguments, tile)
        if how == "raises":
            raise RuntimeError("no such instruction\nat line 7")
        if how == "misses a tile":
            n_programs -= 1
        original(started, n_programs, arguments, tile)
        for name, value in arguments.items():
            if name not in OUTPUTS[kernel] or value is None:
                continue
            if how == "has the wrong sign":
                value.p.neg_()
            if how == "writes NaN":
                first = (0,) * value.p.dim()
                value.p[first] = float("nan")

    monkeypatch.setattr(programs, "start", start)


WAYS = ["has the wrong sign", "misses a tile", "writes NaN", "raises"]


@each_once(kernel=[*OUTPUTS], how=WAYS)
def test_a_broken_kernel_is_noticed_refused_and_said_once(kernel, how, monkeypatch, caplog):
    break_kernel(monkeypatch, kernel, how)
    given = call(None if kernel.startswith("flash") else "per query")
    expected = "RuntimeError: no such instruction" if how == "raises" else " is wrong by "
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert expected in verify.trial_fault(given)
    (said,) = caplog.messages
    assert "'auto' takes another implementation" in said and verify.trial_fault(given) in said
    assert choice.triton_problem(given)  # what `auto` asks
    with pytest.raises(RuntimeError, match=r"impl 'triton': .*; usable here: auto"):
        attention(*given[:3], mixing=given.mixing, impl="triton")


def test_a_wrong_setting_is_no_fault_of_the_kernels(monkeypatch):
    monkeypatch.setenv("MIXHEAD_STRIP_MIB", "much")
    with pytest.raises(ValueError, match="MIXHEAD_STRIP_MIB=much: must be a number of MiB"):
        verify.trial_fault(call("per query"))
    monkeypatch.delenv("MIXHEAD_STRIP_MIB")
    assert verify.trial_fault(call("per query")) == ""


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_fault_of_any_tile_is_noticed(place, monkeypatch):
    """The first call on a GPU may choose any tile of the lists."""
    tiles = [Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)]
    monkeypatch.setattr(tuning, "tiles_for", lambda *size: tiles)
    original = programs.start

    def start(kernel, n_programs, arguments, tile):
        original(kernel, n_programs, arguments, tile)
        if kernel.fn.__name__ == "flash_fwd_kernel" and tile == tiles[place]:
            arguments["o"].p.mul_(1.001)

    monkeypatch.setattr(programs, "start", start)
    assert verify.trial_fault(call()).startswith("the output is wrong by ")


def test_nothing_is_tried_before_a_call_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(support, "trial_fault", ORIGINAL_FAULT)
    monkeypatch.setattr(support, "_interpreted", lambda: True)
    monkeypatch.setattr(verify, "trial_fault", lambda inputs: "was tried")
    assert support.trial_fault(call()) == ""
    monkeypatch.setattr(support, "_interpreted", lambda: False)
    assert support.trial_fault(call()) == "was tried"


def test_dropout_that_drops_nothing_is_noticed(monkeypatch):
    original = calls.Dropout
    monkeypatch.setattr(calls, "Dropout", lambda seed, threshold, gain: original(seed, 0, gain))
    assert verify.trial_fault(call(dropout_p=0.1)) == "dropout keeps 1.00 of the weights, not 0.9"


def under_inference(step, *tensors):
    with torch.inference_mode(), torch.autocast(DEVICE, dtype=torch.bfloat16):
        return step(*tensors)


def under_checkpointing(step, *tensors):
    out = checkpoint(step, *tensors, use_reentrant=False)
    out.sum().backward()
    return out


@pytest.mark.parametrize("how", [under_inference, under_checkpointing])
def test_it_works_wherever_the_call_comes_from_and_changes_no_random_state(how):
    tensors = call("shared")[:4]
    before = torch.get_rng_state()

    def step(query, key, value, mixing):
        return attention(query, key, value, mixing=mixing, impl="triton")

    assert how(step, *tensors).isfinite().all() and set(verify._faults.values()) == {""}
    assert torch.equal(torch.get_rng_state(), before)


def test_it_is_tried_when_a_program_is_compiled():
    tensors = call("per query")[:4]

    @torch.compile(backend="eager", fullgraph=True)
    def step(query, key, value, mixing):
        return attention(query, key, value, mixing=mixing, impl="triton")

    assert step(*tensors).isfinite().all() and set(verify._faults.values()) == {""}


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kind = call_kinds.call_kind(call())._replace(device=torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        assert all("run one step before" in verify._fault_of(*kind) for _ in range(2))
    assert verify._faults == {} and len(caplog.messages) == 1


def test_a_fault_is_said_after_a_refusal_that_was_none(monkeypatch, caplog):
    """What forbids a trial for now is another reason than what the trial finds."""
    broken = "the output is wrong by 7 times what is allowed"
    monkeypatch.setattr(verify, "try_on_device", lambda kind: broken)
    kind = call_kinds.call_kind(call())._replace(device=torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as captured:
            captured.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            verify._fault_of(*kind)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert verify._fault_of(*kind) == broken
    first, second = caplog.messages
    assert "run one step before" in first and broken in second


def test_a_lack_of_memory_is_not_kept(monkeypatch):
    def lack(kind):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as full:
        full.setattr(verify, "_try", lack)
        assert verify.trial_fault(call()) == "cannot be tried now: CUDA out of memory"
    assert verify.trial_fault(call()) == ""


def test_more_heads_than_can_be_mixed_are_tried_apart(monkeypatch):
    monkeypatch.setattr(verify, "_fault_with", lambda *arguments: "")
    heads = support.MAX_HEADS + 1
    assert (
        verify.trial_fault(
            record(inputs(heads=heads, batch=1, n_queries=2, n_keys=2, head_dim=2, value_dim=2))
        )
        == ""
    )


@each_once(
    mixed=[None, "shared", "per query"],
    head_dim=[64, 8, 12],
    dropout_p=[0.0, 0.1, 0.5],
    length=[33, 64],
)
def test_what_is_tried_is_what_runs(mixed, head_dim, dropout_p, length, monkeypatch):
    """triton compiles a kernel again for other types, and for other sizes and strides.

    These differ by whether they are multiples of 16.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    compiled = set()

    def start(kernel, n_programs, arguments, tile):
        jitted = JITFunction(kernel.fn, do_not_specialize=rows.UNSPECIALIZED)
        bind = create_function_from_signature(jitted.signature, jitted.params, backend)
        compiled.add((kernel.fn.__name__, str(bind(**arguments, num_warps=4, num_stages=1)[1])))

    def kernels_of(given, d_out, tile_index):
        compiled.clear()
        made = calls.Call(given, tile_index)
        out, statistics = passes.forward(made)
        if d_out is None:
            d_out = torch.empty_like(out)
        passes.backward(made, d_out, statistics, out)
        return set(compiled)

    monkeypatch.setattr(programs, "start", start)
    given = inputs(
        mixed, heads=4, n_queries=length, n_keys=length, head_dim=head_dim, value_dim=head_dim
    )
    given = record(
        given, dropout_p=dropout_p, seed=torch.tensor(1, device=DEVICE) if dropout_p else None
    )
    kind = call_kinds.call_kind(given)
    tried = set().union(*(kernels_of(*sample_call(kind, *sizes), 0) for sizes in ORIGINAL_SIZES))
    assert kernels_of(given, None, None) <= tried
