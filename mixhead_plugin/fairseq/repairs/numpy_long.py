"""Define np.compat.long as `int`.

fairseq uses np.compat.long, which NumPy 2 lacks, for --sample-break-mode eos and to filter
sentences by length.
"""

from types import SimpleNamespace

import numpy as np

VERSIONS = "fairseq 0.12.2 and its main branch, with NumPy >= 2"


def apply() -> None:
    if not hasattr(np, "compat"):
        np.compat = SimpleNamespace(long=int)  # type: ignore[attr-defined]
