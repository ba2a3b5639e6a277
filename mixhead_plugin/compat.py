"""The few repairs that fairseq needs on current Python, torch and NumPy, each with its reason.

Those of the whole process are applied by `import mixhead_plugin`, those of one task or command line by the model that
needs them.
"""

import argparse
import collections
import logging
import sys
import types
import typing
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Dict, List, Optional, Tuple, Type

import numpy as np
import omegaconf
import torch
from fairseq.distributed import utils as distributed

from mixhead_plugin.options import OptionError

logger = logging.getLogger(__name__)


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
            # what a checkpoint's tensors become while the first worker sends it to the others
            distributed._TensorPlaceholder,
        ]
    )


def restore_numpy_long() -> None:
    """fairseq's token blocks (--sample-break-mode eos) and length filters ask for np.compat.long, gone with NumPy 2."""
    if not hasattr(np, "compat"):
        np.compat = types.SimpleNamespace(long=int)


def train_in_bf16_without_tpu(args: argparse.Namespace) -> None:
    """fairseq takes --bf16 for a wish to train on a TPU and then looks for none but that; changes `args` in place."""
    if getattr(args, "bf16", False) and find_spec("torch_xla") is None:
        args.tpu = False


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


def set_up_from_checkpoints(task: Type[Any]) -> None:
    """Let fairseq-validate set up truncated_bptt_lm, given as `task`: its class takes no `from_checkpoint`.

    A checkpoint also has the worker and number of workers of its training, which are not those of the validation.
    """

    def setup_task(cls: Type[Any], cfg: Any, from_checkpoint: bool = False, **kwargs: Any) -> Any:
        if from_checkpoint:
            cfg.data_parallel_rank = cfg.data_parallel_size = None  # found out by the task
        return cls(cfg, **kwargs)

    task.setup_task = classmethod(setup_task)


class _NumberedWindows:
    """Collates a window of text as the task does, and lets the model know which one it is."""

    def __init__(self, collate: Any):
        self.collate = collate

    def __call__(self, items: List[Tuple[int, List[torch.Tensor]]]) -> Dict[str, Any]:
        sample = self.collate(items)
        ((number, rows),) = items
        # fairseq-interactive asks for the lengths
        sample["net_input"].update(window=int(number), src_lengths=torch.tensor([len(row) for row in rows]))
        return sample


def number_windows(task: Any) -> None:
    """Let batches of this one task say in `net_input` which window of its text they are.

    fairseq's truncated_bptt_lm has that number beside `net_input` alone, where no model sees it. A model with a memory
    could not know where a text begins: the memory of one epoch, or set, would go on into the next.
    """
    if isinstance(task._collate_fn, _NumberedWindows):  # several models may share a task
        return
    task._collate_fn = _NumberedWindows(task._collate_fn)
    stock = task.eval_lm_dataloader

    def eval_lm_dataloader(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuses what fairseq-eval-lm takes for a perplexity of 1: a text of fewer windows than rows."""
        if len(dataset) == 0:
            raise OptionError(
                f"--batch-size {task.cfg.batch_size}: the text has {len(dataset.data)} windows of --tokens-per-sample "
                f"{task.cfg.tokens_per_sample} and each row needs one; must be at most as many"
            )
        left_out = len(dataset.data) - len(dataset) * task.cfg.batch_size
        if left_out:
            logger.warning(f"the last {left_out} windows fill no row and are left out; --batch-size 1 takes all")
        return stock(dataset, *args, **kwargs)

    task.eval_lm_dataloader = eval_lm_dataloader


def refuse_longer_inputs(task: Any, max_length: int) -> None:
    """Let fairseq-eval-lm refuse what is too long: it would leave it out of the perplexity, with a warning.

    Blocks of 1024 tokens are its default. Nothing else calls this method of the task.
    """
    stock = getattr(task, "eval_lm_dataloader", None)
    if stock is None:
        return

    def eval_lm_dataloader(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        longest = int(np.max(dataset.sizes)) + bool(getattr(task.args, "add_bos_token", False))
        if longest > max_length:
            raise OptionError(
                f"--tokens-per-sample {task.args.tokens_per_sample}: the data have an input of {longest} tokens, the "
                f"--synthesizer has scores for {max_length}; use at most as many, and no --sample-break-mode eos if "
                "sentences are longer"
            )
        return stock(dataset, *args, **kwargs)

    task.eval_lm_dataloader = eval_lm_dataloader


def apply() -> None:
    allow_fairseq_checkpoints()
    restore_numpy_long()
    report_option_errors_in_one_line()
