"""Refuse to evaluate a text with inputs that are longer than the model's positions.

fairseq-eval-lm leaves inputs out of the perplexity that are longer than the model's positions.
"""

from typing import Any

import numpy as np
from fairseq.tasks.language_modeling import LanguageModelingTask

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import is_command, replaces


@replaces(LanguageModelingTask, "eval_lm_dataloader")
def _eval_lm_dataloader(original, task: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    longest, most = int(np.max(dataset.sizes)), kwargs.get("max_positions")
    # of a synthesizer, whose scores count the beginning
    if (own := getattr(task, "longest_input", None)) is not None:
        longest, most = longest + bool(getattr(task.args, "add_bos_token", False)), own
    if isinstance(most, int) and longest > most and is_command():
        raise OptionError(
            f"--tokens-per-sample {task.args.tokens_per_sample}: the data have an input of "
            f"{longest} tokens, must be "
            f"at most {most}, the positions of the model; --sample-break-mode eos keeps whole "
            "sentences, and "
            f"--shorten-method truncate --tokens-per-sample {most} cuts off their rest, which then "
            "does not count"
        )
    return original(task, dataset, *args, **kwargs)
