"""Write fairseq's binary sets."""

from collections.abc import Sequence
from pathlib import Path


class BinarySet:
    """Writes a memory-mapped set of fairseq, as fairseq-preprocess does.

    Args:
        prefix: its path without .bin and .idx
        symbols: the size of its dictionary
    """

    def __init__(self, prefix: Path, symbols: int):
        # takes seconds
        from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder, best_fitting_int_dtype

        self.prefix = prefix
        self.builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", best_fitting_int_dtype(symbols))

    def add(self, numbers: Sequence[int]) -> None:
        import torch

        self.builder.add_item(torch.tensor(numbers))

    def close(self) -> None:
        self.builder.finalize(f"{self.prefix}.idx")
