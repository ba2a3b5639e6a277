"""Let SIGINT end a worker, so that no worker outlives the process that started it.

When that process ends, torch sends SIGINT to its workers. Workers of a training in the background of a shell (`&`)
ignore SIGINT. They go on, write checkpoints and keep the GPUs.
"""

import multiprocessing
import signal

import torch


def apply() -> None:
    is_worker = multiprocessing.parent_process() is not None and torch.distributed.is_initialized()
    if is_worker and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
