"""Begin a moving average (--store-ema) from any checkpoint, and keep its last layer norms.

fairseq deletes the tensors of the model from the checkpoint that it has loaded, and then looks for
them to begin the average. So a training with --store-ema ends in a traceback if it begins from a
checkpoint of a training without, as by --finetune-from-model. At each update fairseq loads the new
average like a checkpoint that has no `version`, so it takes it for an old one, and drops the layer
norms after the last layers (--encoder-normalize-before).
"""

import logging
from functools import partial
from typing import Any

from fairseq import checkpoint_utils
from fairseq.models import BaseFairseqModel
from fairseq.models.ema.ema import EMA
from fairseq.trainer import Trainer
from torch import Tensor, nn

from mixhead_plugin.fairseq.replace import replaces

logger = logging.getLogger(__name__)


@replaces(Trainer, "load_checkpoint")
def _load(original, trainer: Trainer, filename: str, *args: Any, **kwargs: Any) -> Any:
    if not trainer.cfg.ema.store_ema:
        return original(trainer, filename, *args, **kwargs)
    read = checkpoint_utils.load_checkpoint_to_cpu

    def read_with_average(*read_args: Any, **read_kwargs: Any) -> dict[str, Any]:
        state = read(*read_args, **read_kwargs)
        if "ema" not in state["extra_state"]:
            logger.warning(f"{filename}: has no moving average; it begins from the model's weights")
            state["extra_state"]["ema"] = {}
        return state

    # fairseq's method reads the file by this function, and keeps the content to itself.
    checkpoint_utils.load_checkpoint_to_cpu = read_with_average
    try:
        return original(trainer, filename, *args, **kwargs)
    finally:
        checkpoint_utils.load_checkpoint_to_cpu = read


@replaces(EMA, "restore")
def _restore(original, ema: EMA, state_dict: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
    # Without tensors the average stays what it is: a copy of the model that has just been loaded.
    if state_dict:
        original(ema, state_dict, *args, **kwargs)


@replaces(EMA, "_step_internal")
def _step(original, ema: EMA, *args: Any, **kwargs: Any) -> None:
    # FSDP has to gather its parameters
    if not isinstance(ema.model, BaseFairseqModel):
        return original(ema, *args, **kwargs)
    # fairseq computes the average, and calls `restore` with it. On loading a checkpoint, it calls
    # `restore`, too, where it has to be checked and upgraded.
    ema.restore = partial(_copy, ema.model)
    try:
        return original(ema, *args, **kwargs)
    finally:
        del ema.restore


def _copy(model: nn.Module, state_dict: dict[str, Any], build_fp32_params: bool = False) -> None:
    """Load tensors as torch does, not as fairseq's models do."""
    nn.Module.load_state_dict(model, state_dict, strict=False)
