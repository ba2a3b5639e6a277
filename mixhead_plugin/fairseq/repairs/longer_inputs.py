"""Refuse to evaluate a text with inputs that are longer than the model's positions.

fairseq-eval-lm leaves inputs out of the perplexity that are longer than the model's positions.
"""

from typing import Any

import numpy as np
from fairseq.tasks.language_modeling import LanguageModelingTask

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import is_command, replaces
from mixhead_plugin.fairseq.task_marks import longest_input


@replaces(LanguageModelingTask, "eval_lm_dataloader")
def _eval_lm_dataloader(original, task: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    longest = int(np.max(dataset.sizes))
    most = kwargs.get("max_positions")
    marked = longest_input(task)
    if marked is not None:
        most = marked
        # This length counts the token that the task puts before each input; positions do not.
        if getattr(task.args, "add_bos_token", False):
            longest += 1
    if isinstance(most, int) and longest > most and is_command():
        raise OptionError(
            f"--tokens-per-sample {task.args.tokens_per_sample}: the data have an input of "
            f"{longest} tokens, must be at most {most}, the positions of the model; "
            "--sample-break-mode eos keeps whole sentences, and --shorten-method truncate "
            f"--tokens-per-sample {most} cuts off their rest, which then does not count"
        )
    return original(task, dataset, *args, **kwargs)
