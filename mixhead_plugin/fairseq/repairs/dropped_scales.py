"""Refuse to train a language model with --scale-attn, --scale-fc, --scale-heads or --scale-resids.

fairseq's transformer_lm has these flags and drops them: it trains the model without. The plugin's
computes with them, so the two would differ in more than the heads.
"""

from typing import Any

from fairseq.models.transformer_lm import TransformerLanguageModel
from torch import nn

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.hooks import TRAINING_CHECKS

SCALES = ("scale_attn", "scale_fc", "scale_heads", "scale_resids")


def apply() -> None:
    # Not where a model is built: those that were trained with the flags go on loading.
    TRAINING_CHECKS.append(refuse_scales)


def refuse_scales(cfg: Any, model: nn.Module) -> None:
    """Refuse the flags that fairseq's language model drops.

    Args:
        cfg: the whole config of a training
        model: the model that it trains
    """
    if not isinstance(model, TransformerLanguageModel):
        return
    for option in SCALES:
        if getattr(cfg.model, option, False):
            raise OptionError(
                f"{option_name(option)}: must be left out, fairseq's transformer_lm drops it "
                "without a word, and the plugin's computes with it"
            )
