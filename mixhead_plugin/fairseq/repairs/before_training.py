"""Let a model of the plugin refuse its criterion before it is trained.

fairseq builds a model in the same way to train it and to load it. It does not tell the model which
of them it is, nor which criterion will read its outputs.
"""

from typing import Any

from fairseq.trainer import Trainer

from mixhead_plugin.fairseq.repairs.replace import replaces


@replaces(Trainer, "__init__")
def _init(
    original,
    trainer: Trainer,
    cfg: Any,
    task: Any,
    model: Any,
    criterion: Any,
    *args: Any,
    **kwargs: Any,
):
    # FSDP has the attributes of the model that it wraps
    check = getattr(model, "check_training", None)
    if check is not None:
        check(cfg, criterion)
    original(trainer, cfg, task, model, criterion, *args, **kwargs)
