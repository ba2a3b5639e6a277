"""Give `int` to fairseq where it asks for np.compat.long.

fairseq asks for np.compat.long in --sample-break-mode eos and in filters of lengths. NumPy 2 lacks that name.
"""

from types import SimpleNamespace

import numpy as np

VERSIONS = "fairseq 0.12.2 and fairseq-fixed 0.12.3.1, with NumPy >= 2"


def apply() -> None:
    if not hasattr(np, "compat"):
        np.compat = SimpleNamespace(long=int)
