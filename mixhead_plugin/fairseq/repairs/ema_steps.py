"""Copy the average of --store-ema into its model, without what is done to a checkpoint.

fairseq loads each average like a checkpoint that has no `version`, so it takes it for an old one: a
decoder with --decoder-normalize-before loses its final norm in the average, at the first update.
"""

from functools import partial
from typing import Any

from fairseq.models import BaseFairseqModel
from fairseq.models.ema.ema import EMA
from torch import nn

from mixhead_plugin.fairseq.replace import replaces


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
