"""Let SIGINT end a worker, so that no worker outlives the process that started it.

When a training dies, torch sends SIGINT to its workers. In the background of a shell (`&`) they
ignore SIGINT: they go on, write checkpoints and keep the GPUs.
"""

import multiprocessing
import signal

import torch


def apply() -> None:
    is_worker = multiprocessing.parent_process() is not None and torch.distributed.is_initialized()
    if is_worker and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
