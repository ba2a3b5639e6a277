"""Threads that share the work of one call on the CPU, each with torch's operations on one core.

torch splits every operation over the cores and waits for all of them at its end. Blockwise
attention is many operations, so a busy machine would delay each by its slowest core. Here each core
takes whole blocks and waits once.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Barrier, BrokenBarrierError, Lock
from typing import TypeVar

import torch

from mixhead_plugin.ops.precision import without_autocast

Item = TypeVar("Item")

PATIENCE = 60  # seconds, after which the wait for threads that do not start ends

_pools: dict[int, ThreadPoolExecutor] = {}  # by number of threads
_lock = Lock()


def threads_for(device: torch.device) -> int:
    """Return how many threads share the work on the tensors of a device."""
    return torch.get_num_threads() if device.type == "cpu" else 1


def parallel_for(
    work: Callable[[Iterator[Item]], None], items: Sequence[Item], device: torch.device
) -> None:
    """Let `work` go through `items`, without gradients, autocast and denormal numbers.

    On the CPU as many threads as torch has call `work` once each, and take their items, in order,
    from one queue. Where no thread can be had, as after the end of the main thread, the caller goes
    through all items itself. After an error no thread takes another item; the error is raised once
    all threads are back.

    Args:
        work: takes an iterator over its share of the items
        items: the work
        device: where the tensors are; on others than the CPU the caller does all the work
    """
    threads = min(threads_for(device), len(items))
    if threads < 2:
        with torch.no_grad(), without_autocast(device), _without_denormals(device):
            work(iter(items))
        return

    waiting = deque(items)
    inference = torch.is_inference_mode_enabled()

    def take() -> Iterator[Item]:
        while True:
            try:
                item = waiting.popleft()
            except IndexError:  # nothing is left
                return
            yield item

    def run() -> None:
        # A thread has modes of its own. Autocast is off in it; the others are set here.
        with torch.inference_mode(inference), torch.no_grad(), _without_denormals(device):
            try:
                work(take())
            except BaseException:
                waiting.clear()
                raise

    results: list[Future[None]] = []
    try:
        try:
            pool = _pool()
            for _ in range(threads):
                # One by one: where a later thread cannot be had, `wait` below still has the earlier
                # ones to wait for.
                results.append(pool.submit(run))
        except RuntimeError:
            # Python starts no thread and takes no work once the main thread has ended.
            run()
        for result in results:
            result.result()
    finally:
        # Also after Ctrl-C, no thread may go on with tensors that the caller gives up.
        waiting.clear()
        wait(results)


@contextmanager
def _without_denormals(device: torch.device) -> Iterator[None]:
    """Take numbers that are closer to 0 than any normal one for 0, if this thread computes alone.

    A trained head gives many keys weights such as 1e-40, with which some processors compute slowly:
    a training step of B with 32 heads of 4 took 1.3 times as long on an Intel Xeon.

    Where torch shares an operation among threads, nothing is set: threads that it starts meanwhile
    would keep the setting for all that the program computes later.
    """
    if device.type != "cpu" or torch.get_num_threads() > 1 or _flushes():
        yield
        return
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _flushes() -> bool:
    """Return whether this thread takes denormal numbers for 0 already."""
    smallest = sys.float_info.min  # a name, because Python would compute a constant at import
    return smallest / 2 == 0.0


def _pool() -> ThreadPoolExecutor:
    """Return as many threads as torch has, each of which runs torch's operations on one core.

    They stay for later calls, because starting them takes longer than a small call.
    """
    size = torch.get_num_threads()
    with _lock:
        if size not in _pools:
            pool = ThreadPoolExecutor(size, "mixhead")
            ready = Barrier(size + 1, timeout=PATIENCE)
            try:
                for _ in range(size):
                    pool.submit(_use_one_core, ready)
                ready.wait()
            except BrokenBarrierError:
                # Threads may start too late on a machine that is busy. This error is a
                # RuntimeError, for which `parallel_for` would work without threads: right, but
                # slow, and nobody would know why. So another kind of error ends the call.
                raise TimeoutError(
                    f"impl 'blockwise': the {size} threads of torch did not start within "
                    f"{PATIENCE} s"
                ) from None
            except BaseException:
                ready.abort()  # the threads that have started would wait for the others
                raise
            finally:
                # In `_use_one_core` each thread sets the number 1, which every later thread gets.
                torch.set_num_threads(size)
            _pools[size] = pool
        return _pools[size]


def _use_one_core(ready: Barrier) -> None:
    # The first call in a thread adopts the common number, so it must come before the change.
    torch.get_num_threads()
    torch.set_num_threads(1)
    ready.wait()


def _forget_pools() -> None:
    """Forget the threads of the parent, which a forked process does not have."""
    global _lock
    _pools.clear()
    _lock = Lock()


os.register_at_fork(after_in_child=_forget_pools)
