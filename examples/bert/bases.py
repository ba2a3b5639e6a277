"""Base classes of the tasks and their data sets."""

from typing import Any
from weakref import ref

import numpy as np
from fairseq.data import Dictionary, FairseqDataset
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
    """A task with one dictionary, whose data sets need a new iterator for every epoch."""

    dictionary: Dictionary

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    def get_batch_iterator(
        self, dataset: FairseqDataset, *args: Any, **settings: Any
    ) -> EpochBatchIterator:
        """Return fairseq's iterator without its reference cycle.

        Its sampler holds a method of the iterator, and the iterator holds the sampler. So its
        worker processes would live until the garbage collector runs, which takes seconds for each
        of them.
        """
        iterator = super().get_batch_iterator(dataset, *args, **settings)
        # fairseq may return the iterator of an earlier epoch
        if "ordered_batches" not in vars(iterator):
            held = ref(iterator)

            def ordered_batches(*which: Any) -> list[list[int]]:
                return EpochBatchIterator.ordered_batches(held(), *which)

            iterator.ordered_batches = ordered_batches
        return iterator
