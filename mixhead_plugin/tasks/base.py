"""What the tasks of the plugin share."""

from typing import Any, List
from weakref import ref

from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.tasks import FairseqTask


class Task(FairseqTask):
    """Where an epoch needs an iterator of its own, its workers go with it."""

    def get_batch_iterator(self, dataset: FairseqDataset, *args: Any, **settings: Any) -> EpochBatchIterator:
        """fairseq's, without the cycle in it.

        Its sampler holds a method of the iterator that holds the sampler. The workers, which persist, would stay until
        Python collects the cycle, and that takes seconds for each, since their queues are closed first.
        """
        iterator = super().get_batch_iterator(dataset, *args, **settings)
        if "ordered_batches" not in vars(iterator):  # it is not that of an earlier epoch
            held = ref(iterator)

            def ordered_batches(*which: Any) -> List[List[int]]:
                return EpochBatchIterator.ordered_batches(held(), *which)

            iterator.ordered_batches = ordered_batches
        return iterator
