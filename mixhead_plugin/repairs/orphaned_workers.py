"""Let SIGINT end a worker, so that it ends with the process that started it.

torch sends SIGINT to a worker whose parent has ended. A training in the background of a shell (`&`) ignores SIGINT:
its workers go on, write checkpoints and keep the GPUs.
"""

import multiprocessing
import signal

import torch


def apply() -> None:
    is_worker = multiprocessing.parent_process() is not None and torch.distributed.is_initialized()
    if is_worker and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
