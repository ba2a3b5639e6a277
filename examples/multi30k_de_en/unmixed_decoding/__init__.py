"""Decode as the published Mixhead code does; for a comparison, not for use.

That code mixes heads only in the full forward pass, so its beam search uses a model that was never
trained. This --user-dir registers the task `unmixed_translation`: fairseq's `translation`, but
without mixing in the decoder's self-attention during beam search. The encoder mixes.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

import mixhead_plugin
from mixhead_plugin.fairseq.attention import MixheadAttention

mixhead_plugin.register()


def unmixed_step_by_step(attention: MixheadAttention) -> None:
    """Make this module leave the mixing out when it gets a cache; the full pass mixes."""
    forward = attention.forward

    def forward_unmixed(*args: Any, incremental_state: Any = None, **kwargs: Any) -> Any:
        if incremental_state is None:
            return forward(*args, **kwargs)
        mixing = attention.head_mixing
        attention.head_mixing = None
        try:
            return forward(*args, incremental_state=incremental_state, **kwargs)
        finally:
            attention.head_mixing = mixing

    attention.forward = forward_unmixed


@register_task("unmixed_translation", dataclass=TranslationConfig)
class UnmixedTranslation(TranslationTask):
    def build_generator(self, models: Any, *args: Any, **kwargs: Any) -> Any:
        for model in models:
            for module in model.decoder.modules():
                if isinstance(module, MixheadAttention) and not module.encoder_decoder_attention:
                    unmixed_step_by_step(module)
        return super().build_generator(models, *args, **kwargs)
