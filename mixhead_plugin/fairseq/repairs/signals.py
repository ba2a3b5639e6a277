"""Save a checkpoint at the next update after SIGTERM or SIGUSR1, and end with status 75 ('try
again').

fairseq ends at once when a cluster preempts it or its time is over. The updates since the last
checkpoint are lost, and its status is that of a fault.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils
from fairseq.trainer import Trainer
from torch.multiprocessing.spawn import ProcessExitedException

from mixhead_plugin.fairseq.repairs.end_of_epoch import reason_to_end
from mixhead_plugin.fairseq.replace import install, is_command, replaces, train_command

logger = logging.getLogger(__name__)

TRY_AGAIN = os.EX_TEMPFAIL
_got: list[int] = []


@replaces(utils, "call_main")
def _call_main(original, cfg, main, **kwargs) -> None:
    parallel = cfg.distributed_training
    if (
        cfg.common_eval.path is None
        and parallel.distributed_world_size > 1
        and not parallel.distributed_no_spawn
    ):
        _handle(_pass_on)
    try:
        original(cfg, main, **kwargs)
    except ProcessExitedException as error:  # of a worker that fairseq has started
        # USR1 ends a worker that does not train yet
        if error.exit_code not in (TRY_AGAIN, -signal.SIGUSR1):
            raise
        sys.exit(TRY_AGAIN)


def _pass_on(number: int) -> None:
    """Send a signal to the workers, and ignore the next ones. As long as there are no workers, end
    this process.
    """
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid, signal.SIGUSR1)
    # srun sends SIGTERM to all tasks as soon as one has ended
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN if workers else signal.SIG_DFL)
    if not workers:
        signal.raise_signal(number)


def _handle(handler: Callable[[int], None]) -> None:
    ours = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == ours:
            # A signal to a whole group ends the data workers too; torch would raise here before a
            # checkpoint is saved.
            signal.signal(signal.SIGCHLD, lambda number, frame: None)
            handler(number)
        elif number == signal.SIGTERM:  # to a data worker, from torch
            os._exit(128 + number)

    signal.signal(signal.SIGUSR1, handle)
    # torch sends SIGTERM to workers that fairseq has started
    if multiprocessing.parent_process() is None:
        signal.signal(signal.SIGTERM, handle)


@replaces(checkpoint_utils, "load_checkpoint")
def _load(original, cfg, trainer, **kwargs):
    loaded = original(cfg, trainer, **kwargs)
    saves = (
        isinstance(trainer, Trainer)
        and is_command()
        and not cfg.no_save
        and not cfg.no_last_checkpoints
    )
    command = train_command()
    # Python gives signals to the main thread alone.
    if (
        saves
        and hasattr(command, "validate_and_save")
        and threading.current_thread() is threading.main_thread()
    ):
        install(replaces(command, "validate_and_save")(_validate_and_save))
        _handle(_got.append)
    return loaded


@replaces(Trainer, "_aggregate_logging_outputs")
def _aggregate(original, trainer, outputs, *stats, **kwargs):
    """Tell the other workers of a signal with the numbers that fairseq sums after each update
    anyway.
    """
    outputs, (*stats, trainer._signals) = original(trainer, outputs, *stats, len(_got), **kwargs)
    return outputs, stats


@replaces(checkpoint_utils, "save_checkpoint")
def _save(original, cfg, trainer, *args):
    trainer._saved_at = trainer.get_num_updates()
    return original(cfg, trainer, *args)


def _validate_and_save(original, cfg, trainer, task, epochs, subsets, end_of_epoch):
    alone, updates = trainer.data_parallel_world_size == 1, trainer.get_num_updates()
    # all workers stop after the same update
    stops = len(_got) if alone else getattr(trainer, "_signals", 0)
    intervals = cfg.checkpoint.save_interval_updates, cfg.dataset.validate_interval_updates
    regular = end_of_epoch or any(number > 0 and updates % number == 0 for number in intervals)
    losses, result = [None], None
    if not stops or regular or reason_to_end(cfg.checkpoint, trainer) is not None:
        losses, _ = result = original(cfg, trainer, task, epochs, subsets, end_of_epoch)
    if not stops:
        return result
    if getattr(trainer, "_saved_at", None) != updates:  # `original` may only validate
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epochs, losses[0])
    logger.info(
        f"ended by a signal after update {updates}, with a checkpoint: the same command goes on"
    )
    # srun and torch send it to the others as soon as one has ended
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not alone:
        torch.distributed.barrier()
    sys.exit(TRY_AGAIN)
