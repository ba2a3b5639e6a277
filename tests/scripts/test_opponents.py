"""Whatever a time is compared with computes the same numbers."""

import pytest
import torch
from benchmarks import core, opponents

EAGER = [
    name
    for name, one in opponents.OPPONENTS.items()
    if not one.compiled and name not in ("flash", "mask")
]
# tests of scripts/gpu_report.sh run it in triton's interpreter
EAGER.remove("FlashAttention-2 in triton")
COMPILED = [name for name, one in opponents.OPPONENTS.items() if one.compiled]
KINDS = core.VARIANTS


@pytest.fixture(scope="module")
def inputs():
    return core.Inputs((3, 2, 200, 8), "cpu", "float32")  # two blocks of 128 queries, four of 64


@pytest.mark.parametrize("provider", ["mask", *EAGER])
def test_an_opponent_gives_the_numbers_of_the_formula(provider, inputs):
    for kind in KINDS if opponents.OPPONENTS[provider].mixes else KINDS[:1]:
        assert inputs.fault(core.Core(provider, *kind)) == "", kind


@pytest.mark.slow
@pytest.mark.parametrize("provider", COMPILED)
def test_a_compiled_opponent_gives_the_numbers_of_the_formula(provider, inputs):
    if why := opponents.problem(provider, "cpu"):
        pytest.skip(why)
    for kind in KINDS[1:3] if opponents.OPPONENTS[provider].mixes else KINDS[:1]:
        assert inputs.fault(core.Core(provider, *kind)) == "", kind


def test_a_loop_without_its_last_block_is_wrong(inputs, monkeypatch):
    right = opponents.rows_of
    monkeypatch.setattr(opponents, "rows_of", lambda *given: right(*given) * (given[4] < 192))
    assert inputs.fault(core.Core("loop 64", "softmax", "A")) != ""


def test_checkpointing_keeps_no_weights(inputs):
    kept = {}
    for provider in ("loop 128", "loop 128, checkpointed"):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            inputs.attend(core.Core(provider), inputs.call(core.Core(provider), 0.0))
        kept[provider] = max(sizes)
    assert kept["loop 128"] >= 3 * 2 * 128 * 128 > kept["loop 128, checkpointed"]


@pytest.mark.parametrize("device, compiler", [("cpu", "c++"), ("cuda", "cc")])
def test_what_is_compiled_is_left_out_where_no_compiler_is(device, compiler, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert (
        opponents.problem("loop 64, compiled", device)
        == f"needs a compiler: {compiler} is not installed"
    )
    assert opponents.problem("loop 64", device) == ""
