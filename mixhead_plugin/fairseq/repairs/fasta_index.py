"""Index a .fasta file in Python.

fairseq hands the path to a shell. So a folder named `$(command)` runs that command.
"""

import numpy as np
from fairseq.data.fasta_dataset import FastaDataset, fasta_file_path

from mixhead_plugin.fairseq.replace import replaces


@replaces(FastaDataset, "_build_index")
def _build_index(original, self, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte at which each record begins, and the length of its sequence."""
    begins: list[int] = []
    lengths: list[int] = []
    at = 0  # the byte at which a line begins
    with open(fasta_file_path(path), "rb") as file:
        for line in file:
            if line.startswith(b">"):
                begins.append(at)
                lengths.append(0)
            elif lengths:
                lengths[-1] += len(line.strip())
            at += len(line)
    return np.array(begins, dtype=np.int64), np.array(lengths, dtype=np.int64)
