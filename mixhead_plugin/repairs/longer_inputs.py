"""Refuse data with inputs that are longer than a model has scores for.

fairseq-eval-lm leaves inputs out of the perplexity that are longer than the model's positions.
"""

from typing import Any

import numpy as np
from fairseq.tasks.language_modeling import LanguageModelingTask

from mixhead_plugin.errors import OptionError
from mixhead_plugin.repairs.replace import replaces


@replaces(LanguageModelingTask, "eval_lm_dataloader")
def _eval_lm_dataloader(original, task: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
    most = getattr(task, "longest_input", None)  # set by a synthesizer
    longest = int(np.max(dataset.sizes)) + bool(getattr(task.args, "add_bos_token", False))
    if most is not None and longest > most:
        raise OptionError(
            f"--tokens-per-sample {task.args.tokens_per_sample}: the data have an input of {longest} tokens, must be "
            f"at most {most}, for which the --synthesizer has scores; --sample-break-mode eos keeps whole sentences"
        )
    return original(task, dataset, *args, **kwargs)
