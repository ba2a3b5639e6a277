"""Number windows of Transformer-XL; set up its task; count targets; refuse a text without a batch.

With --task truncated_bptt_lm fairseq does not tell a model which window of a text it gets.
fairseq-validate cannot set up the task. If a text has fewer windows than --batch-size,
fairseq-eval-lm prints a perplexity of 1. The last token of a window predicts nothing, but it counts
in the loss of fairseq-train and fairseq-validate: with windows of 8 tokens that is 7/8 of the true
one. adaptive_loss divides by 0 if a text in one row ends in a window of one token.
"""

import logging
from typing import Any

import torch

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.fairseq_examples import TruncatedBPTTLMTask
from mixhead_plugin.fairseq.replace import replaces
from mixhead_plugin.fairseq.task_marks import wants_window_numbers

logger = logging.getLogger(__name__)


def _setup_task(original, cls, cfg: Any, from_checkpoint: bool = False, **kwargs: Any) -> Any:
    if from_checkpoint:  # only fairseq-validate says so
        # The checkpoint has those of its training; for None the task takes those of this process.
        cfg.data_parallel_rank = None
        cfg.data_parallel_size = None
    return original(cls, cfg, **kwargs)


def _load_dataset(original, task: Any, split: str, *args: Any, **kwargs: Any) -> None:
    original(task, split, *args, **kwargs)
    dataset = task.datasets[split]
    windows = dataset.data
    in_one_row = len(dataset) == len(windows) > 0
    # A last window of one token has no target. If it is a whole batch, adaptive_loss divides by 0.
    if in_one_row and len(windows[len(windows) - 1]) == 1:
        dataset.my_indices = dataset.my_indices[:, :-1]  # [1, windows]


def _collate(original, task: Any, items: list[tuple[int, list[torch.Tensor]]]) -> dict[str, Any]:
    sample = original(task, items)
    # Criterions divide the loss by this number. fairseq counts every token of a window, but the
    # last one has no target: the word that follows is in the next window.
    sample["ntokens"] = int(sample["target"].ne(task.target_dictionary.pad()).sum())
    if wants_window_numbers(task):
        ((number, rows),) = items  # a batch of this task is one window of each text
        sample["net_input"]["window"] = int(number)
        # fairseq-interactive asks for the lengths.
        sample["net_input"]["src_lengths"] = torch.tensor([len(row) for row in rows])
    return sample


def _eval_lm_dataloader(original, task: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    windows = len(dataset.data)
    rows = task.cfg.batch_size
    if len(dataset) == 0:
        raise OptionError(
            f"--batch-size {rows}: must be at most {windows}, the number of windows of "
            f"--tokens-per-sample {task.cfg.tokens_per_sample} in the text"
        )
    if windows % rows:
        logger.warning(
            f"the last {windows % rows} windows fill no row and are left out; --batch-size 1 takes "
            "all"
        )
    return original(task, dataset, *args, **kwargs)


if TruncatedBPTTLMTask is not None:  # a fairseq with its examples
    replaces(TruncatedBPTTLMTask, "setup_task")(_setup_task)
    replaces(TruncatedBPTTLMTask, "load_dataset")(_load_dataset)
    replaces(TruncatedBPTTLMTask, "_collate_fn")(_collate)
    replaces(TruncatedBPTTLMTask, "eval_lm_dataloader")(_eval_lm_dataloader)
