"""Let Transformer-XL use fairseq's task truncated_bptt_lm: windows say their number, and fairseq-validate works."""

import logging
from typing import Any, Dict, List, Tuple, Type

import torch

from mixhead_plugin.errors import OptionError

logger = logging.getLogger(__name__)


def set_up_from_checkpoints(task: Type[Any]) -> None:
    """Let fairseq-validate set up the class `task`, whose `setup_task` takes no `from_checkpoint`.

    A checkpoint also holds the worker and the number of workers of its training; the validation has its own.
    """

    def setup_task(cls: Type[Any], cfg: Any, from_checkpoint: bool = False, **kwargs: Any) -> Any:
        if from_checkpoint:
            cfg.data_parallel_rank = cfg.data_parallel_size = None  # the task finds them out
        return cls(cfg, **kwargs)

    task.setup_task = classmethod(setup_task)


class _NumberedWindows:
    """Collates a window of text as the task does, and adds its number for the model."""

    def __init__(self, collate: Any):
        self.collate = collate

    def __call__(self, items: List[Tuple[int, List[torch.Tensor]]]) -> Dict[str, Any]:
        sample = self.collate(items)
        ((number, rows),) = items
        # fairseq-interactive asks for the lengths
        sample["net_input"].update(window=int(number), src_lengths=torch.tensor([len(row) for row in rows]))
        return sample


def number_windows(task: Any) -> None:
    """Put the number of each window of the text into `net_input`, for this one task.

    fairseq's task has the number only beside `net_input`, where no model sees it. Without it a memory would go on from
    the end of one epoch, or set, into the next.
    """
    if isinstance(task._collate_fn, _NumberedWindows):  # several models may share a task
        return
    task._collate_fn = _NumberedWindows(task._collate_fn)
    original = task.eval_lm_dataloader

    def eval_lm_dataloader(dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse a text of fewer windows than rows, of which fairseq-eval-lm gives a perplexity of 1."""
        if len(dataset) == 0:
            raise OptionError(
                f"--batch-size {task.cfg.batch_size}: the text has {len(dataset.data)} windows of --tokens-per-sample "
                f"{task.cfg.tokens_per_sample} and each row needs one; must be at most as many"
            )
        left_out = len(dataset.data) - len(dataset) * task.cfg.batch_size
        if left_out:
            logger.warning(f"the last {left_out} windows fill no row and are left out; --batch-size 1 takes all")
        return original(dataset, *args, **kwargs)

    task.eval_lm_dataloader = eval_lm_dataloader
