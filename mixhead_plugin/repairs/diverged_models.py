"""Refuse to save a model with NaN parameters, and do not count a validation loss of NaN.

fairseq looks for NaN only in gradients. It replaces a good checkpoint by a model that the last update broke. After a
NaN validation loss, any next loss counts as the best. The repair skips models of --ddp-backend fully_sharded.
"""

import logging
import math

from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.repairs.checkpoint_files import is_bad
from mixhead_plugin.repairs.replace import replaces

logger = logging.getLogger(__name__)


@replaces(checkpoint_utils, "save_checkpoint")
def _save(original, cfg, trainer, epochs, loss: float | None):
    # Each worker sees its own part of a sharded model; one that stopped here would leave the others waiting.
    if cfg.no_save or trainer.is_fsdp:
        return original(cfg, trainer, epochs, loss)
    bad = next((name for name, value in trainer.model.state_dict().items() if is_bad(name, value)), None)
    if bad is not None:
        raise OptionError(
            f"the model has NaN or infinite parameters after update {trainer.get_num_updates()}, the first is {bad}, "
            "and is not saved; a smaller --lr or --clip-norm may help"
        )
    if loss is not None and math.isnan(loss):
        logger.warning(f"--best-checkpoint-metric {cfg.best_checkpoint_metric}: is NaN, not counted as the best")
        loss = None
    return original(cfg, trainer, epochs, loss)
