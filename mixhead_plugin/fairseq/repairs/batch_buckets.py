"""Divide sentences into buckets of similar length (--num-batch-buckets) with current NumPy.

fairseq calls np.percentile with `interpolation`, which NumPy has renamed to `method`. So a training
with this flag ends in a traceback before its first update.
"""

import numpy as np
from fairseq.data import bucket_pad_length_dataset, data_utils
from fairseq.data.audio import raw_audio_dataset

from mixhead_plugin.fairseq.replace import replaces

VERSIONS = "fairseq 0.12.2 and its main branch, with NumPy >= 2.4"


@replaces(data_utils, "get_buckets")
def _get_buckets(original, sizes: np.ndarray, num_buckets: int) -> np.ndarray:
    """Return the longest length of each bucket; the buckets hold about equally many sentences."""
    shares = np.linspace(0, 100, num_buckets + 1)
    return np.unique(np.percentile(sizes, shares, method="lower")[1:])


def apply() -> None:
    # These modules have imported the function by its name before.
    for module in (bucket_pad_length_dataset, raw_audio_dataset):
        module.get_buckets = data_utils.get_buckets
