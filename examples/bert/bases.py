"""The base classes of the tasks and of their data sets."""

from typing import Any, List
from weakref import ref

import numpy as np
from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.tasks import FairseqTask


class SizedDataset(FairseqDataset):
    """A data set that knows the length of each example.

    Attributes:
        sizes: int64 [examples]
    """

    sizes: np.ndarray

    def __len__(self) -> int:
        return len(self.sizes)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.sizes[indices]


class Task(FairseqTask):
    """A task whose data sets need a new iterator for every epoch."""

    def get_batch_iterator(self, dataset: FairseqDataset, *args: Any, **settings: Any) -> EpochBatchIterator:
        """Return fairseq's iterator without the reference cycle in it.

        Its sampler holds a method of the iterator, and the iterator holds the sampler. The persistent workers would
        wait for the garbage collector, which takes seconds for each of them.
        """
        iterator = super().get_batch_iterator(dataset, *args, **settings)
        if "ordered_batches" not in vars(iterator):  # fairseq may return the iterator of an earlier epoch
            held = ref(iterator)

            def ordered_batches(*which: Any) -> List[List[int]]:
                return EpochBatchIterator.ordered_batches(held(), *which)

            iterator.ordered_batches = ordered_batches
        return iterator
