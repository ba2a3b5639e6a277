"""End the thread of a validation that was cut short when the next validation begins.

If --max-valid-steps cuts a validation short, fairseq leaves a thread, its data workers and about 40 open files behind.
In the end the system can open no more files, and the training dies.
"""

import queue
from contextlib import suppress

from fairseq.data.iterators import BufferedIterator
from fairseq.trainer import Trainer

from mixhead_plugin.repairs.replace import replaces


@replaces(Trainer, "get_valid_iterator")
def _get_valid_iterator(original, trainer: Trainer, *args, **kwargs):
    epochs = getattr(trainer, "_validated", None)
    batches = getattr(getattr(epochs, "_cur_epoch_itr", None), "_itr", None)
    if isinstance(batches, BufferedIterator):
        _end(batches)
    trainer._validated = original(trainer, *args, **kwargs)
    return trainer._validated


def _end(batches: BufferedIterator) -> None:
    thread = batches._consumer
    if thread is None or not thread.is_alive():
        return
    thread._max_len = 0  # the thread waits to put a batch into the queue, and ends after that
    while thread.is_alive():
        with suppress(queue.Empty):
            batches._queue.get(timeout=0.01)
    with batches._queue.mutex:
        batches._queue.queue.clear()  # put() would wait for ever at a full queue
    batches._queue.put(RuntimeError("this validation was given up when the next one began"))
