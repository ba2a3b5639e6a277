"""Name the plain classes of fairseq's checkpoints to torch's safe loader, which still refuses code.

fairseq cannot load its own checkpoints with torch >= 2.6: the loader takes only tensors and plain containers.
"""

from argparse import Namespace
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

ISSUE = "https://github.com/facebookresearch/fairseq/issues/5610"
VERSIONS = "fairseq 0.12.2 and fairseq-fixed 0.12.3.1, with torch >= 2.6"

_ARRAYS = (np._core if hasattr(np, "_core") else np.core).multiarray
CLASSES = [Namespace, defaultdict, Any, dict, list, int, float]
CLASSES += [DictConfig, ListConfig, ContainerMetadata, Metadata, AnyNode]
# --eval-bleu keeps its BLEU with a checkpoint, as a NumPy number.
CLASSES += [_ARRAYS.scalar, _ARRAYS._reconstruct, np.ndarray, np.dtype]
CLASSES += [type(np.dtype(np.float64)), type(np.dtype(np.int64))]
# It stands for a tensor while the first worker sends a checkpoint to the others.
CLASSES += [_TensorPlaceholder]


def apply() -> None:
    torch.serialization.add_safe_globals(CLASSES)
