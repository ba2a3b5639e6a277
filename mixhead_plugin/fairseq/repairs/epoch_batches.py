"""Resume an epoch with the batches that an uninterrupted training would use, those of the first
epoch.

fairseq groups sentences into batches in the first epoch that a process sees, and seeds this by the
epoch's number. A training that resumes in a later epoch sees some sentences twice or not at all.
"""

from fairseq.trainer import Trainer

from mixhead_plugin.fairseq.replace import replaces


@replaces(Trainer, "get_train_iterator")
def _get_train_iterator(original, trainer, epoch: int, *args, **kwargs):
    # fairseq makes new batches in each epoch for sharded data, for some tasks, and with
    # --update-epoch-batch-itr
    anew = kwargs.get("disable_iterator_cache") or getattr(
        trainer.task.cfg, "rebuild_batches", False
    )
    anew = anew or trainer.cfg.dataset.update_epoch_batch_itr
    if epoch > 1 and not args and not anew and kwargs.get("load_dataset", True):
        original(trainer, 1, **kwargs)
        kwargs["load_dataset"] = False
    return original(trainer, epoch, *args, **kwargs)
