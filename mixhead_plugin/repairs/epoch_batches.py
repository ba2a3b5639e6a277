"""Resume an epoch with the batches of the first epoch, which an undisturbed training uses.

fairseq makes the batches of all epochs in the first epoch that a process sees, and seeds them by its number. A
training that resumes in a later epoch sees some of its sentences twice or not at all.
"""

from fairseq.trainer import Trainer

from mixhead_plugin.repairs.replace import replaces


@replaces(Trainer, "get_train_iterator")
def _get_train_iterator(original, trainer, epoch: int, *args, **kwargs):
    # fairseq makes batches anew for each epoch of sharded data, of some tasks and with --update-epoch-batch-itr
    anew = kwargs.get("disable_iterator_cache") or getattr(trainer.task.cfg, "rebuild_batches", False)
    anew = anew or trainer.cfg.dataset.update_epoch_batch_itr
    if epoch > 1 and not args and not anew and kwargs.get("load_dataset", True):
        original(trainer, 1, **kwargs)
        kwargs["load_dataset"] = False
    return original(trainer, epoch, *args, **kwargs)
