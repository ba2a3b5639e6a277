"""Start new data workers (--num-workers) for each epoch.

fairseq keeps the data workers of the first epoch, and they never learn that another epoch began. So
masked_lm masks the same words in every epoch, and a resumed training masks others.
"""

from fairseq.data.iterators import EpochBatchIterator

from mixhead_plugin.fairseq.replace import replaces


@replaces(EpochBatchIterator, "next_epoch_itr")
def _next_epoch_itr(original, epochs, *args, set_dataset_epoch: bool = True, **kwargs):
    if set_dataset_epoch and epochs.next_epoch_idx != epochs.epoch:
        epochs.dataloader = None  # fairseq makes a new one, which has new workers
    return original(epochs, *args, set_dataset_epoch=set_dataset_epoch, **kwargs)
