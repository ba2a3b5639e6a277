"""Threads that share the work of one call on the CPU, each running torch's operations on one core.

Torch spreads every single operation over the cores and waits for all of them at its end. Attention by blocks is many
operations: on a busy machine every one of them would wait for the core that is late. Here the cores take whole blocks
instead, and wait for one another once.
"""

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, Lock
from typing import Callable, Dict, Iterator, Sequence, TypeVar

import torch

Item = TypeVar("Item")

_pools: Dict[int, ThreadPoolExecutor] = {}  # by number of threads
_lock = Lock()


def share(work: Callable[[Iterator[Item]], None], items: Sequence[Item], device: torch.device) -> None:
    """Let `work` go through `items`, without gradients and autocast.

    On the CPU it is called in as many threads as torch may use, all of them taking their items, in order, from one
    iterator; each should have some tenths of a millisecond to do with an item. Inference mode is as it is outside.
    After an error no further item is taken; it is raised when all threads are back.
    """
    if not items:
        return
    threads = min(torch.get_num_threads(), len(items)) if device.type == "cpu" else 1
    if threads < 2:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            work(iter(items))
        return

    waiting = deque(items)
    inference = torch.is_inference_mode_enabled()

    def take() -> Iterator[Item]:
        while waiting:
            try:
                yield waiting.popleft()
            except IndexError:  # another thread was faster
                return

    def run() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            try:
                work(take())
            except BaseException:
                waiting.clear()
                raise

    results = [_workers().submit(run) for _ in range(threads)]
    try:
        wait(results)
    except BaseException:  # Ctrl-C
        waiting.clear()
        wait(results)
        raise
    for result in results:
        result.result()


def _workers() -> ThreadPoolExecutor:
    size = torch.get_num_threads()
    with _lock:
        if size not in _pools:
            pool = ThreadPoolExecutor(size, "mixhead")
            ready = Barrier(size + 1, timeout=60)  # lest a thread that cannot start lets all others wait for ever
            try:
                for _ in range(size):
                    pool.submit(_use_one_core, ready)
                ready.wait()
            except BaseException:
                ready.abort()
                raise
            finally:
                # Beside the number of each thread, torch keeps one for threads to come: only the former was meant.
                torch.set_num_threads(size)
            _pools[size] = pool
        return _pools[size]


def _use_one_core(ready: Barrier) -> None:
    torch.get_num_threads()  # the first call in a thread takes over the common number: let that be behind us
    torch.set_num_threads(1)
    ready.wait()


def _forget_workers() -> None:
    """A forked process has none of its parent's threads."""
    global _lock
    _pools.clear()
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_workers)
