"""Test the threads of the blockwise implementation."""

import multiprocessing
import threading
import time

import pytest
import torch

from mixhead_plugin.ops.blockwise import threads as module
from mixhead_plugin.ops.blockwise.threads import parallel_for

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
            seen.append((torch.get_num_threads(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        parallel_for(work, list(range(20)), CPU)
    assert len(seen) == 20
    assert set(seen) == {(1, False, False)}


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

    def work(items):
        for item in items:
            if item == 0:
                raise KeyError(item)
            time.sleep(0.01)
            taken.append(item)

    with pytest.raises(KeyError):
        parallel_for(work, list(range(200)), CPU)
    at_once = len(taken)
    time.sleep(0.05)
    assert at_once == len(taken) < 20


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


def _in_a_fork(queue):
    queue.put(len(module._pools))
    torch.set_num_threads(1)  # as data loaders do: torch's own threads do not outlive a fork either
    taken = []
    parallel_for(taken.extend, list(range(10)), CPU)
    queue.put(len(taken))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_count_on_threads_of_its_parent(threads):
    parallel_for(list, list(range(20)), CPU)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_a_fork, args=(queue,))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
    assert (queue.get(), queue.get()) == (0, 10)
