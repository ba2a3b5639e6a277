"""Share the batches that an epoch has left anew when a training resumes with other workers or
another --update-freq.

fairseq saves how many batches each worker has seen, not how many workers there were. With others it
skips sentences or sees them twice. With another --update-freq it may leave out the last batches of
the epoch.
"""

import logging
import math
import zlib
from typing import Any

from fairseq.data.iterators import EpochBatchIterator
from fairseq.trainer import Trainer

from mixhead_plugin.fairseq.replace import replaces

logger = logging.getLogger(__name__)

# Our entry in an iterator's state: the batches that all `workers` have `seen` together, and in
# which `order`.
SHARDS = "shards"


def _resumed(epochs: EpochBatchIterator, epoch: int) -> tuple[int, int]:
    """Return how many batches others had seen of this epoch, and the number that this worker began
    to count at.
    """
    return getattr(epochs, "_shared", {}).get(epoch, (0, 0))


@replaces(EpochBatchIterator, "ordered_batches")
def _ordered_batches(original, epochs: EpochBatchIterator, epoch: int, *args) -> list[list[int]]:
    seen, begin = _resumed(epochs, epoch)
    if seen == 0:
        return original(epochs, epoch, *args)
    ours = epochs.num_shards, epochs.shard_id
    epochs.num_shards, epochs.shard_id = 1, 0
    left = original(epochs, epoch, *args)[seen:]
    epochs.num_shards, epochs.shard_id = ours
    # as fairseq does: all workers need the same number
    left += [[]] * (-len(left) % epochs.num_shards)
    return [[]] * begin + left[epochs.shard_id :: epochs.num_shards]  # fairseq skips the first ones


@replaces(EpochBatchIterator, "state_dict")
def _state_dict(original, epochs: EpochBatchIterator) -> dict[str, Any]:
    state = original(epochs)
    if (number := state["iterations_in_epoch"]) > 0:
        seen, begin = _resumed(epochs, state["epoch"])
        seen += (number - begin) * epochs.num_shards
        workers = getattr(epochs, "_workers", epochs.num_shards)
        state[SHARDS] = {"seen": seen, "workers": workers, "order": _order(epochs)}
    return state


def _order(epochs: EpochBatchIterator) -> int:
    """Return a number that differs if the seed differs, or the size or the first sentence of any
    batch.
    """
    return zlib.crc32(
        repr((epochs.seed, [(len(b), *map(str, b[:1])) for b in epochs.frozen_batches])).encode()
    )


@replaces(EpochBatchIterator, "load_state_dict")
def _load_state_dict(original, epochs: EpochBatchIterator, state: dict[str, Any]) -> None:
    epochs._shared = {}
    if state.get("iterations_in_epoch", 0) > 0:
        state = {**state, "iterations_in_epoch": _position(epochs, state)}
    original(epochs, state)


def _position(epochs: EpochBatchIterator, state: dict[str, Any]) -> int:
    """Return the number to count on from, 0 to begin the epoch anew, and note the batches that have
    been seen.
    """
    epoch, number, saved = state["epoch"], state["iterations_in_epoch"], state.get(SHARDS, {})
    workers, group = (
        getattr(epochs, "_workers", epochs.num_shards),
        getattr(epochs, "_update_freq", 1),
    )
    then, seen = saved.get("workers"), saved.get("seen")
    # fairseq's own; old ones have ended
    if "order" not in saved and (number < len(epochs) or "version" not in state):
        logger.info(
            f"epoch {epoch} goes on after {number:,} batches of each worker, if there were as many "
            "workers"
        )
        return number
    if "order" not in saved:
        reason = "its checkpoint has seen more batches than a worker has now"
    elif saved["order"] != _order(epochs):
        reason = "--max-tokens, --batch-size, --seed or the data have changed"
    elif workers == then and seen == number * epochs.num_shards and number % group == 0:
        return number
    # Some tasks (truncated_bptt_lm) and iterators give each worker its own data, or an order by the
    # number of workers.
    elif workers != epochs.num_shards or type(epochs) is not EpochBatchIterator:
        reason = f"the task binds data to workers, of which there were {then}, now {workers}"
    elif epochs._supports_prefetch or epochs.grouped_shuffling:
        reason = (
            f"--dataset-impl cached and --grouped-shuffling bind data to workers ({then}, now "
            f"{workers})"
        )
    elif epochs.skip_remainder_batch:
        reason = "--skip-remainder-batch leaves out other batches"
    else:
        logger.info(
            f"epoch {epoch}: workers have seen {seen:,} batches, the others are shared anew"
        )
        # If it is no multiple of --update-freq, fairseq counts the updates that are left wrongly.
        epochs._shared[epoch] = seen, group * math.ceil(seen / (epochs.num_shards * group))
        return epochs._shared[epoch][1]
    logger.warning(f"epoch {epoch} begins anew, and some sentences are seen twice: {reason}")
    return 0


@replaces(Trainer, "get_train_iterator")
def _get_train_iterator(original, trainer: Trainer, epoch: int, *args, **kwargs):
    epochs = original(trainer, epoch, *args, **kwargs)
    numbers = trainer.cfg.optimization.update_freq
    epochs._update_freq, epochs._workers = (
        numbers[min(epoch, len(numbers)) - 1],
        trainer.data_parallel_world_size,
    )
    return epochs
