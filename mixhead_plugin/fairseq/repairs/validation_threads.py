"""Read the data of a validation without a thread if --max-valid-steps may cut it short.

If --max-valid-steps cuts a validation short, fairseq leaves a thread, its data workers and about 40
open files behind, until no more files can be opened.
"""

from fairseq.trainer import Trainer

from mixhead_plugin.fairseq.replace import replaces


@replaces(Trainer, "get_valid_iterator")
def _get_valid_iterator(original, trainer: Trainer, *args, **kwargs):
    epochs = original(trainer, *args, **kwargs)
    if trainer.cfg.dataset.max_valid_steps is not None:
        epochs.buffer_size = 0  # then fairseq's BufferedIterator, a thread, is not made
    return epochs
