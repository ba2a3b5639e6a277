"""Resume an epoch with other workers or another --update-freq, and see each sentence once.

fairseq saves how many batches each worker has seen, not how many workers there were. With others it
skips sentences or sees them twice. With another --update-freq it may leave out the last batches of
the epoch.
"""

import logging
import math
import zlib
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
# fairseq skips as many batches of each worker as it has counted. So each of the three gets `begin`
# empty batches in front, which fairseq skips and counts.

# Our entry in an iterator's state: the batches that all `workers` have `seen` together, and in
# which `order`.
SHARDS = "shards"


class Resumed(NamedTuple):
    """Where an epoch goes on that other workers had begun."""

    seen: int = 0  # batches, by all workers
    begin: int = 0  # the number at which each worker begins to count


def _resumed(epochs: EpochBatchIterator, epoch: int) -> Resumed:
    """Return where an epoch was resumed; zeros if these workers have begun it."""
    return getattr(epochs, "_shared", {}).get(epoch, Resumed())


@replaces(EpochBatchIterator, "ordered_batches")
def _ordered_batches(original, epochs: EpochBatchIterator, epoch: int, *args) -> list[list[int]]:
    seen, begin = _resumed(epochs, epoch)
    if seen == 0:
        return original(epochs, epoch, *args)

    # Ask fairseq for the batches of all workers, as if there were one.
    number = epochs.num_shards
    rank = epochs.shard_id
    epochs.num_shards = 1
    epochs.shard_id = 0
    try:
        left = original(epochs, epoch, *args)[seen:]
    finally:
        epochs.num_shards = number
        epochs.shard_id = rank

    # As fairseq does: all workers need the same number of batches.
    left += [[]] * (-len(left) % number)
    return [[]] * begin + left[rank::number]


@replaces(EpochBatchIterator, "state_dict")
def _state_dict(original, epochs: EpochBatchIterator) -> dict[str, Any]:
    state = original(epochs)
    counted = state["iterations_in_epoch"]
    if counted > 0:
        seen, begin = _resumed(epochs, state["epoch"])
        seen += (counted - begin) * epochs.num_shards
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
def _load_state_dict(original, epochs: EpochBatchIterator, state: dict[str, Any]) -> None:
    epochs._shared = {}
    if state.get("iterations_in_epoch", 0) > 0:
        state = {**state, "iterations_in_epoch": _position(epochs, state)}
    original(epochs, state)


def _position(epochs: EpochBatchIterator, state: dict[str, Any]) -> int:
    """Return the number from which each worker counts on, 0 to begin the epoch anew.

    Where other workers have begun the epoch, note what they have seen.
    """
    epoch = state["epoch"]
    number = state["iterations_in_epoch"]
    saved = state.get(SHARDS)
    if saved is None and (number < len(epochs) or "version" not in state):
        # Of fairseq without the plugin; in a state without a version, the epoch has ended.
        logger.info(
            f"epoch {epoch} goes on after {number:,} batches of each worker, if there were as many "
            "workers"
        )
        return number
    if saved is not None and _is_unchanged(epochs, saved, number):
        return number

    reason = _reason_to_begin_anew(epochs, saved)
    if reason:
        logger.warning(f"epoch {epoch} begins anew, and some sentences are seen twice: {reason}")
        return 0
    assert saved is not None
    seen = saved["seen"]
    logger.info(f"epoch {epoch}: workers have seen {seen:,} batches, the others are shared anew")
    # A multiple of --update-freq, or fairseq would count the updates that are left wrongly.
    group = getattr(epochs, "_update_freq", 1)
    begin = group * math.ceil(seen / (epochs.num_shards * group))
    epochs._shared[epoch] = Resumed(seen, begin)
    return begin


def _workers(epochs: EpochBatchIterator) -> int:
    """Return how many workers train, also where the task gives each of them data of its own."""
    return getattr(epochs, "_workers", epochs.num_shards)


def _is_unchanged(epochs: EpochBatchIterator, saved: dict[str, Any], number: int) -> bool:
    """Return True if as many workers go on with the same batches, in whole updates."""
    return (
        saved["order"] == _order(epochs)
        and saved["workers"] == _workers(epochs)
        and saved["seen"] == number * epochs.num_shards
        and number % getattr(epochs, "_update_freq", 1) == 0
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
    epochs._update_freq = by_epoch[min(epoch, len(by_epoch)) - 1]
    epochs._workers = trainer.data_parallel_world_size
    return epochs
