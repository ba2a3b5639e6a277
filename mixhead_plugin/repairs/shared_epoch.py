"""Share the batches that an epoch has left anew when a training resumes with other workers or another --update-freq.

fairseq saves how many batches each worker has seen, but not how many workers there were. With another number of workers
it skips sentences or sees them twice. With another --update-freq it may leave out the last batches of the epoch.
"""

import logging
import math
from typing import Any, NamedTuple

from fairseq import checkpoint_utils
from fairseq.data.iterators import EpochBatchIterator
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from mixhead_plugin.repairs.replace import replaces

logger = logging.getLogger(__name__)

SHARDS = "shards"  # our entry in the state of an iterator, a dict:
# `seen` batches, by all workers together; `workers` that share the batches; `order_of`: the number of workers that the
# order was made for (--grouped-shuffling); `batches` of the whole epoch; `seed` of their order


class Resumed(NamedTuple):
    """An epoch that other workers began."""

    epoch: int
    seen: int  # the first batches in the order of the epoch, which all workers together have seen
    order_of: int
    begin: int  # the number that this worker begins to count at


def _rest(original, epochs: EpochBatchIterator, resumed: Resumed, *args) -> list[list[int]]:
    """Return this worker's share of the batches that nobody has seen, behind `begin` empty ones that are skipped."""
    ours = epochs.num_shards, epochs.shard_id
    parts = resumed.order_of if epochs.grouped_shuffling else 1
    try:
        shards = []
        for part in range(parts):
            epochs.num_shards, epochs.shard_id = parts, part
            shards.append(original(epochs, *args))
    finally:
        epochs.num_shards, epochs.shard_id = ours
    left = [batch for row in zip(*shards) for batch in row][resumed.seen :]
    left += [[]] * (-len(left) % epochs.num_shards)  # as fairseq does: all workers need the same number
    return [[]] * resumed.begin + left[epochs.shard_id :: epochs.num_shards]


@replaces(EpochBatchIterator, "ordered_batches")
def _ordered_batches(original, epochs: EpochBatchIterator, epoch: int, *args) -> list[list[int]]:
    resumed = getattr(epochs, "_resumed", None)
    if resumed is None or resumed.epoch != epoch:
        return original(epochs, epoch, *args)
    return _rest(original, epochs, resumed, epoch, *args)


@replaces(EpochBatchIterator, "state_dict")
def _state_dict(original, epochs: EpochBatchIterator) -> dict[str, Any]:
    state = original(epochs)
    number = state["iterations_in_epoch"]
    if number == 0:
        return state
    resumed = getattr(epochs, "_resumed", None)
    if resumed is None or resumed.epoch != state["epoch"]:
        resumed = Resumed(state["epoch"], 0, epochs.num_shards, 0)
    seen = resumed.seen + (number - resumed.begin) * epochs.num_shards
    workers = getattr(epochs, "_workers", epochs.num_shards)
    size = {"batches": len(epochs.frozen_batches), "seed": epochs.seed}
    return {**state, SHARDS: {"seen": seen, "workers": workers, "order_of": resumed.order_of, **size}}


@replaces(EpochBatchIterator, "load_state_dict")
def _load_state_dict(original, epochs: EpochBatchIterator, state: dict[str, Any]) -> None:
    epochs._resumed = None
    if state.get("iterations_in_epoch", 0) > 0:
        state = _shared_anew(epochs, state)
    original(epochs, state)


def _shared_anew(epochs: EpochBatchIterator, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state as it was saved, or the one that this number of workers and this --update-freq resume from."""
    epoch, number, saved = state["epoch"], state["iterations_in_epoch"], state.get(SHARDS)
    workers, group = getattr(epochs, "_workers", epochs.num_shards), getattr(epochs, "_update_freq", 1)
    is_same = saved is not None and saved["workers"] == workers
    reason = _difference(epochs, saved)
    if reason is None and not is_same and workers != epochs.num_shards:
        reason = f"the task binds data to workers, of which there were {saved['workers']}, now {workers}"
    if reason is None:
        seen = saved.get("seen", number * (epochs.num_shards if is_same else saved["workers"]))
        if seen == number * epochs.num_shards and number % group == 0:
            return state
        if type(epochs) is not EpochBatchIterator or epochs._supports_prefetch:
            reason = "in this kind of data set, each worker has its own part"
    if reason is not None:
        logger.info(f"epoch {epoch} begins anew, and some sentences are seen twice: {reason}")
        return {**state, "iterations_in_epoch": 0}
    # If this is no multiple of `group`, fairseq counts the groups that are left wrongly.
    begin = group * math.ceil(seen / (epochs.num_shards * group))
    epochs._resumed = Resumed(epoch, seen, saved.get("order_of", saved["workers"]), begin)
    logger.info(f"epoch {epoch}: workers have seen {seen:,} batches, the others are shared anew")
    return {**state, "iterations_in_epoch": begin}


def _difference(epochs: EpochBatchIterator, saved: dict[str, int] | None) -> str | None:
    """Return why nobody can say which batches are left, or None."""
    if saved is None:
        return "its checkpoint does not say how many workers there were"
    for name, now in {"batches": len(epochs.frozen_batches), "seed": epochs.seed}.items():
        if saved.get(name, now) != now:
            return f"--max-tokens, --batch-size, --seed or the data have changed ({name} {saved[name]}, now {now})"
    return None


@replaces(Trainer, "get_train_iterator")
def _get_train_iterator(original, trainer: Trainer, epoch: int, *args, **kwargs):
    epochs = original(trainer, epoch, *args, **kwargs)
    numbers = trainer.cfg.optimization.update_freq
    epochs._update_freq = numbers[min(epoch, len(numbers)) - 1]
    epochs._workers = trainer.data_parallel_world_size
    return epochs


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def _load_checkpoint(original, *args, **kwargs) -> dict[str, Any]:
    """Add the number of workers to a checkpoint that was saved without this repair: its config has it."""
    checkpoint = original(*args, **kwargs)
    state = (checkpoint.get("extra_state") or {}).get("train_iterator", {})
    if state.get("iterations_in_epoch", 0) > 0 and SHARDS not in state and OmegaConf.is_config(checkpoint.get("cfg")):
        workers = OmegaConf.select(checkpoint["cfg"], "distributed_training.distributed_world_size")
        parts = OmegaConf.select(checkpoint["cfg"], "common.model_parallel_size")  # one worker for data
        if workers:
            state[SHARDS] = {"workers": workers // (parts or 1)}
    return checkpoint
