"""Resume an epoch with other workers or another --update-freq, and see each sentence once.

fairseq saves how many batches each worker has seen, not how many workers there were. With others it
skips sentences or sees them twice. With another --update-freq it may leave out the last batches of
the epoch.
"""

import logging
import math
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fairseq.data.iterators import EpochBatchIterator
from fairseq.trainer import Trainer

from mixhead_plugin.fairseq.replace import replaces

logger = logging.getLogger(__name__)

# fairseq gives the batches of an epoch to its workers in turn. Two workers that stop after two
# batches each, and three that go on:
#
#     batches      0  1  2  3  4  5  6  7  8  9
#     worker of 2  0  1  0  1 | stop                   seen = 4
#     worker of 3              0  1  2  0  1  2        the others, in turn again
#
# fairseq skips as many batches of each worker as it has counted. So each of the three gets
# `first_number` empty batches in front, which fairseq skips and counts.

# Our entry in an iterator's state: the batches that all `workers` have `seen` together, and in
# which `order`.
SHARDS = "shards"


class Resumed(NamedTuple):
    """Where an epoch goes on that other workers had begun."""

    seen: int = 0  # batches, by all workers
    first_number: int = 0  # the number at which each worker begins to count


@dataclass
class _EpochState:
    """The state of one iterator of fairseq that the functions of this file share."""

    # How many workers train, also where the task gives each of them data of its own.
    # `_get_train_iterator` sets it; None, without a trainer, is one for each shard.
    workers: int | None = None
    # How many batches of a worker make one update in this epoch. `_get_train_iterator` sets it.
    update_freq: int = 1
    # By epoch, where it goes on. `_load_state_dict` empties it, and `_position` adds the epoch of
    # the checkpoint if other workers had begun it.
    resumed: dict[int, Resumed] = field(default_factory=dict)


def _epoch_state(epochs: EpochBatchIterator) -> _EpochState:
    return vars(epochs).setdefault("_mixhead_shared_epoch", _EpochState())


def _resumed(epochs: EpochBatchIterator, epoch: int) -> Resumed:
    """Return where an epoch was resumed; zeros if these workers have begun it."""
    return _epoch_state(epochs).resumed.get(epoch, Resumed())


def _workers(epochs: EpochBatchIterator) -> int:
    """Return how many workers train, also where the task gives each of them data of its own."""
    workers = _epoch_state(epochs).workers
    return epochs.num_shards if workers is None else workers


@replaces(EpochBatchIterator, "ordered_batches")
def _ordered_batches(
    original,
    epochs: EpochBatchIterator,
    epoch: int,
    fix_batches_to_gpus: bool,
    shuffle: bool,
) -> list[list[int]]:
    resumed = _resumed(epochs, epoch)
    if resumed.seen == 0:
        return original(epochs, epoch, fix_batches_to_gpus, shuffle)

    # Ask fairseq for the batches of all workers, as if there were one.
    workers = epochs.num_shards
    rank = epochs.shard_id
    epochs.num_shards = 1
    epochs.shard_id = 0
    try:
        batches = original(epochs, epoch, fix_batches_to_gpus, shuffle)
    finally:
        epochs.num_shards = workers
        epochs.shard_id = rank

    unseen_batches = batches[resumed.seen :]
    # As fairseq does: all workers need the same number of batches.
    unseen_batches += [[]] * (-len(unseen_batches) % workers)
    return [[]] * resumed.first_number + unseen_batches[rank::workers]


@replaces(EpochBatchIterator, "state_dict")
def _state_dict(original, epochs: EpochBatchIterator) -> dict[str, Any]:
    state = original(epochs)
    batches_done = state["iterations_in_epoch"]
    if batches_done > 0:
        resumed = _resumed(epochs, state["epoch"])
        seen = resumed.seen + (batches_done - resumed.first_number) * epochs.num_shards
        state[SHARDS] = {"seen": seen, "workers": _workers(epochs), "order": _order(epochs)}
    return state


def _order(epochs: EpochBatchIterator) -> int:
    """Return a number for the order of the batches.

    It differs if the seed differs, or the size or the first sentence of any batch.
    """
    batches = []
    for batch in epochs.frozen_batches:
        first = [str(sentence) for sentence in batch[:1]]  # of lists and of arrays alike
        batches.append((len(batch), *first))
    return zlib.crc32(repr((epochs.seed, batches)).encode())


@replaces(EpochBatchIterator, "load_state_dict")
def _load_state_dict(original, epochs: EpochBatchIterator, state_dict: dict[str, Any]) -> None:
    _epoch_state(epochs).resumed = {}
    if state_dict.get("iterations_in_epoch", 0) > 0:
        state_dict = {**state_dict, "iterations_in_epoch": _position(epochs, state_dict)}
    original(epochs, state_dict)


def _position(epochs: EpochBatchIterator, state: dict[str, Any]) -> int:
    """Return the number from which each worker counts on, 0 to begin the epoch anew.

    Where other workers have begun the epoch, note what they have seen.
    """
    epoch = state["epoch"]
    batches_done = state["iterations_in_epoch"]
    saved = state.get(SHARDS)
    if saved is None and (batches_done < len(epochs) or "version" not in state):
        # Of fairseq without the plugin; in a state without a version, the epoch has ended.
        logger.info(
            f"epoch {epoch} goes on after {batches_done:,} batches of each worker, if there were "
            "as many workers"
        )
        return batches_done
    if saved is not None and _is_unchanged(epochs, saved, batches_done):
        return batches_done

    reason = _reason_to_begin_anew(epochs, saved)
    if reason:
        logger.warning(f"epoch {epoch} begins anew, and some sentences are seen twice: {reason}")
        return 0
    assert saved is not None
    seen = saved["seen"]
    logger.info(f"epoch {epoch}: workers have seen {seen:,} batches, the others are shared anew")
    epoch_state = _epoch_state(epochs)
    # A multiple of --update-freq, or fairseq would count the updates that are left wrongly.
    updates_done = math.ceil(seen / (epochs.num_shards * epoch_state.update_freq))
    first_number = epoch_state.update_freq * updates_done
    epoch_state.resumed[epoch] = Resumed(seen, first_number)
    return first_number


def _is_unchanged(epochs: EpochBatchIterator, saved: dict[str, Any], batches_done: int) -> bool:
    """Return True if as many workers go on with the same batches, in whole updates."""
    return (
        saved["order"] == _order(epochs)
        and saved["workers"] == _workers(epochs)
        and saved["seen"] == batches_done * epochs.num_shards
        and batches_done % _epoch_state(epochs).update_freq == 0
    )


def _reason_to_begin_anew(epochs: EpochBatchIterator, saved: dict[str, Any] | None) -> str:
    """Return why the batches that are left cannot be shared; empty if they can."""
    if saved is None:
        return "its checkpoint has seen more batches than a worker has now"
    if saved["order"] != _order(epochs):
        return "--max-tokens, --batch-size, --seed or the data have changed"
    then = saved["workers"]
    now = _workers(epochs)
    # Some tasks (truncated_bptt_lm) and iterators give each worker its own data, or an order by the
    # number of workers.
    if now != epochs.num_shards or type(epochs) is not EpochBatchIterator:
        return f"the task binds data to workers, of which there were {then}, now {now}"
    if epochs._supports_prefetch or epochs.grouped_shuffling:
        flags = "--dataset-impl cached and --grouped-shuffling"
        return f"{flags} bind data to workers ({then}, now {now})"
    if epochs.skip_remainder_batch:
        return "--skip-remainder-batch leaves out other batches"
    return ""


@replaces(Trainer, "get_train_iterator")
def _get_train_iterator(original, trainer: Trainer, epoch: int, *args, **kwargs):
    epochs = original(trainer, epoch, *args, **kwargs)
    by_epoch = trainer.cfg.optimization.update_freq  # the last one counts for all later epochs
    epoch_state = _epoch_state(epochs)
    epoch_state.update_freq = by_epoch[min(epoch, len(by_epoch)) - 1]
    epoch_state.workers = trainer.data_parallel_world_size
    return epochs
