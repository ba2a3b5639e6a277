"""Refuse to train a language model with --scale-attn, --scale-fc, --scale-heads or --scale-resids.

fairseq's transformer_lm has these flags and drops them: it trains the model without. The plugin's
computes with them, so the two would differ in more than the heads.
"""

from typing import Any

from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.trainer import Trainer

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.replace import replaces

SCALES = ("scale_attn", "scale_fc", "scale_heads", "scale_resids")


# Not where a model is built: those that were trained with the flags go on loading.
@replaces(Trainer, "__init__")
def _init(original, trainer: Trainer, cfg: Any, task: Any, model: Any, *args: Any, **kwargs: Any):
    inner = getattr(model, "module", model)  # behind FSDP
    if isinstance(inner, TransformerLanguageModel):
        for option in SCALES:
            if getattr(cfg.model, option, False):
                raise OptionError(
                    f"{option_name(option)}: must be left out, fairseq's transformer_lm drops it "
                    "without a word, and the plugin's computes with it"
                )
    original(trainer, cfg, task, model, *args, **kwargs)
