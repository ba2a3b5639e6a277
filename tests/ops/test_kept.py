"""Weights that wait for a backward pass: how much memory they take, and that nothing depends on it.

`blockwise` keeps them in one stretch of memory for the process (ops/blockwise/kept.py).
"""

import os
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.ops import attention
from mixhead_plugin.ops.blockwise import kept, operator
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.inputs import AttentionInputs
from tests.ops.calls import assert_same, blocks, outcome, tensors

PLENTY = 2**24  # 16 MiB


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Give each test a memory of its own, in which all its calls fit."""
    own = kept.Memory()
    monkeypatch.setattr(operator, "MEMORY", own)
    monkeypatch.setenv("MIXHEAD_KEPT_MIB", "16")
    with blocks(2, 2**6):
        yield own


@pytest.fixture
def allow(monkeypatch):
    """Return a function that sets the budget to a number of bytes."""
    return lambda size: monkeypatch.setenv("MIXHEAD_KEPT_MIB", str(size / 2**20))


def in_use(memory):
    """Return how many bytes wait for a backward pass."""
    held = [piece for handle, piece in memory.pieces.items() if not handle.expired()]
    return sum(piece.stop - piece.start for piece in held)


def attend(given, **options):
    return attention(**given, causal=True, impl="blockwise", **options)


def learned(**options):
    return {name: t.requires_grad_() for name, t in tensors("shared", **options).items()}


def size_of(given):
    plan = Plan(AttentionInputs(**given, causal=True))
    return plan.kept_numbers * given["query"].dtype.itemsize


@pytest.mark.parametrize(
    "mixing, distances, normalizer, dropout_p",
    [
        ("none", "none", "softmax", 0.4),
        ("shared", "none", "softmax, sink", 0.0),
        ("per query", "all", "sigsoftmax", 0.4),
        ("wide, per query", "past and gain", "l2, sink", 0.4),
        ("tall", "scores shared", "sigsoftmax, sink", 0.4),
        ("shared", "past and gain, scores per query", "softmax", 0.0),
    ],
)
def test_results_are_the_same_bit_by_bit_without_it(
    mixing, distances, normalizer, dropout_p, memory, allow
):
    given = tensors(mixing, distances, torch.float32, normalizer=normalizer)
    options = dict(causal=True, impl="blockwise", normalizer=normalizer, dropout_p=dropout_p)
    runs = []
    for size in (PLENTY, 0):
        allow(size)
        torch.manual_seed(3)
        runs.append(outcome(given, **options))
        assert (memory.storage is not None) == (size > 0)
    assert_same(*runs, rtol=0, atol=0)


def test_a_second_backward_pass_finds_the_weights_again(memory):
    given = learned()
    out = attend(given, dropout_p=0.3)
    first, second = (
        torch.autograd.grad(out.sum(), list(given.values()), retain_graph=True) for _ in range(2)
    )
    assert in_use(memory) == size_of(given)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_all_calls_that_wait_share_the_budget(memory, allow):
    given = learned()
    size = size_of(given)
    allow(2 * size + 2 * kept.ALIGNMENT)
    held = []
    outputs = []
    for _ in range(4):
        outputs.append(attend(given))
        held.append(in_use(memory) // size)
    assert held == [1, 2, 2, 2]

    outputs[0].sum().backward()
    del outputs[0]
    assert in_use(memory) == size
    outputs.append(attend(given))
    assert in_use(memory) == 2 * size


def test_a_call_that_does_not_fit_whole_keeps_nothing(memory, allow):
    given = learned()
    allow(size_of(given) - 1)
    out = attend(given)
    assert in_use(memory) == 0
    out.sum().backward()


def test_a_call_of_4096_tokens_and_8_heads_does_not_fit_into_the_default(monkeypatch):
    monkeypatch.delenv("MIXHEAD_KEPT_MIB", raising=False)
    long = torch.empty(1, 8, 4096, 1)
    plan = Plan(AttentionInputs(long, long, long, mixing=torch.empty(8, 8), causal=True))
    assert plan.kept_numbers * 4 > kept.budget()


def test_without_a_backward_pass_nothing_is_kept(memory):
    given = learned()
    with torch.no_grad():
        attend(given)
    attend({name: t.detach() for name, t in given.items()})
    assert in_use(memory) == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_holds_nothing_between_the_passes(reentrant, memory):
    given = learned()

    def run(*values):
        return attend(dict(zip(given, values)))

    out = checkpoint(run, *given.values(), use_reentrant=reentrant)
    assert in_use(memory) == 0
    out.sum().backward()


def test_a_copied_handle_holds_nothing_and_the_weights_are_computed_again(memory):
    """As where saved tensors are moved to another memory and back."""
    given = learned()
    copied = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    with copied:
        out = attend({name: t * 1 for name, t in given.items()})
    assert in_use(memory) == 0
    found = torch.autograd.grad(out.sum(), list(given.values()))
    expected = torch.autograd.grad(attend(given).sum(), list(given.values()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_a_compiled_call_keeps_its_weights(memory):
    given = learned()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out = compiled(given)
    assert in_use(memory) == size_of(given)
    out.sum().backward()
    del out
    assert in_use(memory) == 0


def test_pieces_lie_side_by_side_and_gaps_are_filled(memory, allow):
    allow(10 * kept.ALIGNMENT)
    sizes = [kept.ALIGNMENT, 3 * kept.ALIGNMENT - 1, kept.ALIGNMENT]
    handles = [memory.reserve(size) for size in sizes]
    starts = [piece.start // kept.ALIGNMENT for piece in memory.pieces.values()]
    assert starts == [0, 1, 4]

    handles[1] = memory.reserve(kept.ALIGNMENT)  # at the end, as the old one is held until then
    assert memory.piece(handles[1], kept.ALIGNMENT, torch.float32).storage_offset() == 5 * 16
    handles.append(memory.reserve(2 * kept.ALIGNMENT))
    assert memory.piece(handles[3], 2 * kept.ALIGNMENT, torch.float32).storage_offset() == 16


def test_a_smaller_budget_counts_at_once(memory, allow):
    given = learned()
    size = size_of(given)
    outputs = [attend(given)]
    allow(size + kept.ALIGNMENT)
    outputs.append(attend(given))
    assert in_use(memory) == size  # that of the first call stays
    outputs[0].sum().backward()


def test_a_larger_budget_counts_once_no_call_waits(memory, allow):
    given = learned()
    size = size_of(given)
    allow(size)
    waiting = attend(given)
    allow(PLENTY)
    attend(given)
    assert memory.storage.nbytes() == in_use(memory) == size
    waiting.sum().backward()  # with what it has kept
    del waiting
    outputs = [attend(given) for _ in range(2)]
    assert in_use(memory) == len(outputs) * size


@pytest.mark.parametrize("given, expected", [("", 2**28), ("1.5", 3 * 2**19), ("0", 0)])
def test_the_budget_is_a_number_of_mib(given, expected, monkeypatch):
    monkeypatch.setenv("MIXHEAD_KEPT_MIB", given)
    assert kept.budget() == expected


@pytest.mark.parametrize("value", ["much", "-1", "nan", "inf", "1e305"])
def test_another_budget_ends_the_call_in_one_line(value, monkeypatch):
    monkeypatch.setenv("MIXHEAD_KEPT_MIB", value)
    with pytest.raises(ValueError) as error:
        attend(learned())
    assert str(error.value) == f"MIXHEAD_KEPT_MIB={value}: must be a number of MiB, at least 0"


@pytest.mark.parametrize("value", ["1e9", "1e15"])
def test_a_budget_that_no_machine_has_ends_the_call_in_one_line(value, monkeypatch):
    monkeypatch.setenv("MIXHEAD_KEPT_MIB", value)
    told = rf"^MIXHEAD_KEPT_MIB={re.escape(f'{float(value):g}')}: .*; must be less, or 0 to keep"
    with pytest.raises(RuntimeError, match=told):
        attend(learned())


def test_a_forked_process_has_all_of_the_budget():
    held = kept.MEMORY.reserve(64)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(in_use(kept.MEMORY)).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"0"
    del held
