"""Refuse to evaluate a text with inputs that are longer than the model's positions.

fairseq-eval-lm leaves inputs out of the perplexity that are longer than the model's positions.
"""

from typing import Any

import numpy as np
from fairseq.tasks.language_modeling import LanguageModelingTask

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import is_command, replaces

_LONGEST_INPUT = "mixhead_longest_input"  # an attribute of a task


def set_longest_input(task: Any, length: int) -> None:
    """Let a task refuse longer texts; a model whose inputs have a largest length calls this.

    Args:
        task: of the model
        length: in tokens, with the one at the beginning, unlike the positions of a model
    """
    setattr(task, _LONGEST_INPUT, length)


@replaces(LanguageModelingTask, "eval_lm_dataloader")
def _eval_lm_dataloader(original, task: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    longest = int(np.max(dataset.sizes))
    most = kwargs.get("max_positions")
    longest_input = getattr(task, _LONGEST_INPUT, None)
    if longest_input is not None:
        most = longest_input
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
