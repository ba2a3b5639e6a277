"""Allow the plain classes of fairseq's checkpoints in torch's safe loader, and nothing else.

Since version 2.6, torch loads only tensors and plain containers. Checkpoints of translation, of
RoBERTa, of --eval-bleu and of fairseq 0.9 hold other classes: fairseq cannot load them.
"""

from argparse import Namespace
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from fairseq.distributed.utils import _TensorPlaceholder
from fairseq.logging.meters import AverageMeter, StopwatchMeter, TimeMeter
from omegaconf import DictConfig, ListConfig
from omegaconf.base import ContainerMetadata, Metadata
from omegaconf.nodes import AnyNode

ISSUE = "https://github.com/facebookresearch/fairseq/issues/5610"
VERSIONS = "fairseq 0.12.2 and its main branch, with torch >= 2.6"

# NumPy 2 has renamed np.core.
_ARRAYS = (np._core if hasattr(np, "_core") else np.core).multiarray

CLASSES: list[Any] = [
    # the flags of a training, and what they hold
    Namespace,
    defaultdict,
    Any,
    dict,
    list,
    int,
    float,
    DictConfig,
    ListConfig,
    ContainerMetadata,
    Metadata,
    AnyNode,
    # the BLEU of --eval-bleu, which is NumPy's number
    _ARRAYS.scalar,
    _ARRAYS._reconstruct,
    np.ndarray,
    np.dtype,
    type(np.dtype(np.float64)),
    type(np.dtype(np.int64)),
    # takes a tensor's place while the first worker sends a checkpoint to the others
    _TensorPlaceholder,
]
# fairseq 0.9 and older pickled its meters, plain numbers, under the module's former name. Newer
# ones ignore them.
FORMER = [
    (meter, f"fairseq.meters.{meter.__name__}")
    for meter in (AverageMeter, StopwatchMeter, TimeMeter)
]


def apply() -> None:
    torch.serialization.add_safe_globals([*CLASSES, *FORMER])
