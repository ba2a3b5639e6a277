"""Refuse to save NaN parameters; ignore a NaN loss (but not with --ddp-backend fully_sharded).

fairseq looks for NaN only in gradients. If an update makes the parameters NaN, it overwrites a good
checkpoint with them. After a NaN validation loss, it counts any next loss as the best.
"""

import logging
import math

from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs.checkpoint_files import is_bad
from mixhead_plugin.fairseq.replace import replaces

logger = logging.getLogger(__name__)


@replaces(checkpoint_utils, "save_checkpoint")
def _save(original, cfg, trainer, epoch_itr, val_loss: float | None):
    # A worker sees only its part of a sharded model. If one worker stopped here, the others would
    # wait for ever.
    if cfg.no_save or trainer.is_fsdp:
        return original(cfg, trainer, epoch_itr, val_loss)
    for name, value in trainer.model.state_dict().items():
        if is_bad(name, value):
            updates = trainer.get_num_updates()
            raise OptionError(
                f"the model has NaN or infinite parameters after update {updates}, the first is "
                f"{name}, and is not saved; a smaller --lr or --clip-norm may help"
            )
    if val_loss is not None and math.isnan(val_loss):
        logger.warning(
            f"--best-checkpoint-metric {cfg.best_checkpoint_metric}: is NaN, not counted as the "
            "best"
        )
        val_loss = None
    return original(cfg, trainer, epoch_itr, val_loss)
