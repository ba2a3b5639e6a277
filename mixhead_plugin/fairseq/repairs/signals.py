"""Save a checkpoint at the next update after SIGTERM or SIGUSR1, and end with status 75.

fairseq ends at once when a cluster preempts it or its time is over. The updates since the last
checkpoint are lost, and its status is that of a fault, not 75 ('try again').
"""

# Who gets a signal, and what it does:
#
#   the process of fairseq-train   starts a worker for each GPU: `_pass_on` sends SIGUSR1 to all
#   a training process             `_handle` only counts the signal; after an update all processes
#                                  know of it, save and end (`_validate_and_save`)
#   a data worker                  is a copy of a training process, but must not count

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
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
_got: list[int] = []  # the signals so far


@replaces(utils, "call_main")
def _call_main(original, cfg, main, **kwargs) -> None:
    parallel = cfg.distributed_training
    trains = cfg.common_eval.path is None
    if trains and parallel.distributed_world_size > 1 and not parallel.distributed_no_spawn:
        _handle(_pass_on)
    try:
        original(cfg, main, **kwargs)
    except ProcessExitedException as error:  # of a worker that fairseq has started
        # SIGUSR1 ends a worker that does not train yet
        if error.exit_code not in (TRY_AGAIN, -signal.SIGUSR1):
            raise
        sys.exit(TRY_AGAIN)


def _pass_on(number: int) -> None:
    """Send a signal to the workers, and ignore the next ones.

    As long as there are no workers, the signal ends this process as usual.
    """
    workers = multiprocessing.active_children()
    for worker in workers:
        assert worker.pid is not None  # it has started
        os.kill(worker.pid, signal.SIGUSR1)
    # srun sends SIGTERM to all tasks as soon as one has ended
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN if workers else signal.SIG_DFL)
    if not workers:
        signal.raise_signal(number)


def _handle(handler: Callable[[int], None]) -> None:
    """Call `handler` for the signals of a cluster that this process gets."""
    ours = os.getpid()

    def handle(number: int, frame: Any) -> None:
        if os.getpid() == ours:
            # A signal to a whole group ends the data workers too; torch would raise here before a
            # checkpoint is saved.
            signal.signal(signal.SIGCHLD, lambda number, frame: None)
            handler(number)
        elif number == signal.SIGTERM:
            # In a data worker, which has inherited this handler: torch ends it so.
            os._exit(128 + number)

    signal.signal(signal.SIGUSR1, handle)
    # Not in workers that fairseq has started, because torch ends those by SIGTERM.
    if multiprocessing.parent_process() is None:
        signal.signal(signal.SIGTERM, handle)


@replaces(checkpoint_utils, "load_checkpoint")
def _load(original, cfg, trainer, **kwargs):
    loaded = original(cfg, trainer, **kwargs)
    # A program with a trainer of its own may also have a config that lacks most values.
    if not isinstance(trainer, Trainer) or not is_command():
        return loaded

    command = train_command()
    saves = not cfg.no_save and not cfg.no_last_checkpoints
    # Python gives signals to the main thread alone.
    in_main_thread = threading.current_thread() is threading.main_thread()
    if saves and in_main_thread and hasattr(command, "validate_and_save"):
        install(replaces(command, "validate_and_save")(_validate_and_save))
        _handle(_got.append)
    return loaded


@replaces(Trainer, "_aggregate_logging_outputs")
def _aggregate(original, trainer, logging_outputs, *extra_stats_to_sum, ignore=False):
    """Tell the other workers of a signal by the numbers that fairseq sums after each update."""
    stats = (*extra_stats_to_sum, len(_got))
    outputs_of_all, sums = original(trainer, logging_outputs, *stats, ignore=ignore)
    # fairseq sums each number over the workers: a signal to one of them reaches all.
    *sums_of_fairseq, signals_of_all = sums
    _trainer_state(trainer).signals = signals_of_all
    return outputs_of_all, sums_of_fairseq


@replaces(checkpoint_utils, "save_checkpoint")
def _save(original, cfg, trainer, epoch_itr, val_loss):
    _trainer_state(trainer).saved_at = trainer.get_num_updates()
    return original(cfg, trainer, epoch_itr, val_loss)


@dataclass
class _TrainerState:
    """The state of one trainer that the functions of this file share."""

    # How many signals all workers together had got at the latest update. `_aggregate` sets it.
    signals: int = 0
    # The number of updates at the latest checkpoint, or None. `_save` sets it.
    saved_at: int | None = None


def _trainer_state(trainer: Any) -> _TrainerState:
    return vars(trainer).setdefault("_mixhead_signals", _TrainerState())


def _validate_and_save(original, cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch):
    """Do what fairseq does after an update; after a signal, save and end this process."""
    updates = trainer.get_num_updates()
    alone = trainer.data_parallel_world_size == 1
    # Several workers stop after the update whose sums told all of them.
    signals = len(_got) if alone else _trainer_state(trainer).signals
    if signals == 0:
        return original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)

    # Where fairseq would validate or save now anyway, it still does.
    regular = end_of_epoch or reason_to_end(cfg.checkpoint, trainer) is not None
    for interval in (cfg.checkpoint.save_interval_updates, cfg.dataset.validate_interval_updates):
        if interval > 0 and updates % interval == 0:
            regular = True
    losses = [None]
    if regular:
        losses, _ = original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
    if _trainer_state(trainer).saved_at != updates:  # it may only have validated
        checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, losses[0])
    logger.info(
        f"ended by a signal after update {updates}, with a checkpoint: the same command goes on"
    )
    # srun and torch send it to the others as soon as one has ended
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not alone:
        torch.distributed.barrier()
    sys.exit(TRY_AGAIN)
