"""Resume an epoch with the batches of the first one, as an uninterrupted training does.

fairseq groups sentences into batches in the first epoch that a process sees, and seeds this by the
epoch's number. A training that resumes in a later epoch sees some sentences twice or not at all.
"""

from fairseq.trainer import Trainer

from mixhead_plugin.fairseq.replace import replaces


@replaces(Trainer, "get_train_iterator")
def _get_train_iterator(original, trainer, epoch: int, *args, **kwargs):
    # Then fairseq makes new batches in each epoch itself.
    anew = (
        kwargs.get("disable_iterator_cache")  # for sharded data
        or getattr(trainer.task.cfg, "rebuild_batches", False)  # for some tasks
        or trainer.cfg.dataset.update_epoch_batch_itr
    )
    # Only fairseq-train's call loads the data and names its arguments.
    loads = kwargs.get("load_dataset", True) and not args
    if epoch > 1 and loads and not anew:
        # fairseq keeps the iterator of the first call, with its batches, for all epochs.
        original(trainer, 1, **kwargs)
        kwargs["load_dataset"] = False
    return original(trainer, epoch, *args, **kwargs)
