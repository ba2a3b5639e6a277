"""Test the threads of the blockwise implementation."""

import threading
import time

import pytest
import torch

from mixhead_plugin.ops.blockwise import threads as blockwise_threads
from mixhead_plugin.ops.blockwise.threads import parallel_for
from tests.torch_programs import run_program

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_item_is_taken_once(threads):
    taken = []
    parallel_for(taken.extend, list(range(100)), CPU)
    assert sorted(taken) == list(range(100))


def test_each_thread_runs_torch_on_one_core_without_gradients_and_autocast(threads):
    seen = []

    def work(items):
        for _ in items:
            seen.append(
                (torch.get_num_threads(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
            )

    with torch.autocast("cpu", dtype=torch.bfloat16):
        parallel_for(work, list(range(20)), CPU)
    assert len(seen) == 20
    assert set(seen) == {(1, False, False)}


def are_flushed(count):
    """Return which of as many denormal numbers are taken for 0 in this thread, and in torch's."""
    # From their bits, because a thread that flushes cannot make one from a number.
    numbers = torch.full((count,), 71362, dtype=torch.int32).view(torch.float32)  # 1e-40
    return numbers * 1.0 == 0


KEEPS_DENORMALS = pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="torch cannot set this processor"
)


@KEEPS_DENORMALS
@pytest.mark.parametrize("flushes", [False, True])
def test_denormal_numbers_are_0_in_the_work_and_the_caller_keeps_its_own_way(threads, flushes):
    seen = []

    def work(items):
        seen.extend(are_flushed(1).item() for _ in items)

    torch.set_flush_denormal(flushes)
    try:
        parallel_for(work, list(range(20)), CPU)
        assert seen == [True] * 20
        assert are_flushed(1).item() == flushes
    finally:
        torch.set_flush_denormal(False)


@KEEPS_DENORMALS
def test_after_an_error_denormal_numbers_are_kept_again(threads):
    def work(items):
        raise ValueError("an item")

    with pytest.raises(ValueError, match="an item"):
        parallel_for(work, list(range(20)), CPU)
    assert not are_flushed(1).item()


# One block is computed by the caller, with the threads of torch, which start here.
ONE_BLOCK = """
import torch
from mixhead_plugin.ops import attention
torch.set_num_threads(2)
q = torch.randn(4, 4, 100, 16)
attention(q, q, q, mixing=torch.eye(4), impl="blockwise")
numbers = torch.full((2**18,), 71362, dtype=torch.int32).view(torch.float32)
print(int((numbers * 1.0 == 0).sum()))
"""


@KEEPS_DENORMALS
def test_threads_that_torch_starts_in_a_call_keep_denormal_numbers(tmp_path):
    result = run_program(ONE_BLOCK, tmp_path)
    assert (result.stdout, result.returncode) == ("0\n", 0), result.stderr


def test_the_number_of_threads_of_everyone_else_stays(threads):
    parallel_for(list, list(range(20)), CPU)
    assert torch.get_num_threads() == threads
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads]


def test_the_first_error_is_raised(threads):
    def work(items):
        for item in items:
            if item == 7:
                raise KeyError(item)

    with pytest.raises(KeyError, match="7"):
        parallel_for(work, list(range(20)), CPU)


def test_after_an_error_nothing_runs_any_more(threads):
    taken = []
    failing = threading.Event()

    def work(items):
        for item in items:
            if item == 0:
                failing.set()
                raise KeyError(item)
            assert failing.wait(60)
            time.sleep(0.05)  # all items would take the threads seconds
            taken.append(item)

    with pytest.raises(KeyError):
        parallel_for(work, list(range(200)), CPU)
    at_once = len(taken)
    time.sleep(0.1)
    assert at_once == len(taken) < 199


def test_two_callers_at_once_do_not_wait_for_each_other(threads):
    totals = []

    def call():
        for _ in range(20):
            taken = []
            parallel_for(taken.extend, list(range(10)), CPU)
            totals.append(len(taken))

    callers = [threading.Thread(target=call) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert totals == [10] * 60


FORK = """
import os, signal, sys, torch
from mixhead_plugin.ops.blockwise import threads

def count():
    taken = []
    threads.parallel_for(taken.extend, list(range(20)), torch.device("cpu"))
    return len(taken)

torch.set_num_threads(4)
assert count() == 20 and len(threads._pools) == 1
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(60)
assert not threads._pools
torch.set_num_threads(1)  # as data loaders do: torch's own threads do not outlive a fork either
assert count() == 20
"""


def test_a_forked_process_does_not_count_on_threads_of_its_parent(tmp_path):
    result = run_program(FORK, tmp_path, timeout=120)
    assert result.returncode == 0, result.stderr


AFTER_MAIN = """
import threading, torch
from mixhead_plugin.ops import attention

def work(q, before):
    threading.main_thread().join()
    torch.testing.assert_close(attention(q, q, q, mixing=torch.eye(4), impl="blockwise"), before)
    print("done")

torch.set_num_threads(2)
q = torch.randn(2, 4, 600, 16)
before = attention(q, q, q, mixing=torch.eye(4), impl="BEFORE")
threading.Thread(target=work, args=(q, before)).start()
"""


@pytest.mark.parametrize(
    "before", ["blockwise", "reference"], ids=["with threads", "without threads"]
)
def test_a_thread_that_outlives_the_main_thread_goes_on(before, tmp_path):
    program = AFTER_MAIN.replace("BEFORE", before)
    result = run_program(program, tmp_path, timeout=120)
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr


def test_threads_that_do_not_start_in_time_end_the_call(monkeypatch):
    monkeypatch.setattr(blockwise_threads, "_pools", {})
    monkeypatch.setattr(blockwise_threads, "PATIENCE", 0.01)
    monkeypatch.setattr(blockwise_threads, "_use_one_core", lambda ready: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    message = "impl 'blockwise': the 2 threads of torch did not start within 0.01 s"
    with pytest.raises(TimeoutError, match=message):
        parallel_for(list, list(range(20)), CPU)
