"""The few repairs that fairseq needs on current Python, torch and NumPy, each with its reason.

Applied by `import mixhead_plugin`.
"""

import argparse
import collections
import sys
import types
import typing
from types import TracebackType
from typing import Optional, Type

import numpy as np
import omegaconf
import torch

from mixhead_plugin.options import OptionError


def allow_fairseq_checkpoints() -> None:
    """torch >= 2.6 loads tensors and plain containers only; name the other plain classes of fairseq's checkpoints.

    Loading stays safe: a checkpoint that carries code is refused as before.
    """
    if not hasattr(torch.serialization, "add_safe_globals"):  # torch < 2.4 has no such list
        return
    numpy_core = np._core if hasattr(np, "_core") else np.core
    torch.serialization.add_safe_globals(
        [
            argparse.Namespace,
            collections.defaultdict,
            typing.Any,
            dict,
            list,
            int,
            float,
            omegaconf.DictConfig,
            omegaconf.ListConfig,
            omegaconf.base.ContainerMetadata,
            omegaconf.base.Metadata,
            omegaconf.nodes.AnyNode,
            # the BLEU that --eval-bleu keeps with a checkpoint is a NumPy number
            numpy_core.multiarray.scalar,
            numpy_core.multiarray._reconstruct,
            np.ndarray,
            np.dtype,
            type(np.dtype(np.float64)),
            type(np.dtype(np.int64)),
        ]
    )


def restore_numpy_long() -> None:
    """fairseq's token blocks (--sample-break-mode eos) and length filters ask for np.compat.long, gone with NumPy 2."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)


def report_option_errors_in_one_line() -> None:
    """fairseq's commands end every exception in a traceback; a mistyped flag deserves its one line instead."""
    previous = sys.excepthook

    def hook(kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]) -> None:
        cause: Optional[BaseException] = error
        # fairseq wraps what goes wrong while a checkpoint loads in an exception of its own
        while cause is not None and not isinstance(cause, OptionError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            previous(kind, error, traceback)
        else:
            print(f"{argparse.ArgumentParser().prog}: error: {cause}", file=sys.stderr)

    sys.excepthook = hook


def apply() -> None:
    allow_fairseq_checkpoints()
    restore_numpy_long()
    report_option_errors_in_one_line()
