"""Beam search as the published Mixhead code does it: a comparison for one report, no option of the plugin.

That code mixes heads in the full forward pass alone, so its step-by-step decoding runs a model that was never trained.
With this folder as fairseq-generate's --user-dir, `--task unmixed_translation` is `translation` whose decoder leaves
the mixing out of its self-attention wherever it decodes step by step. The encoder mixes.
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
# fairseq puts the folder around a --user-dir first, where the report's modules would hide others of their names.
sys.path[:] = [str(HERE.parents[3]), *(path for path in sys.path if path != str(HERE.parents[1]))]

from fairseq.tasks import register_task  # noqa: E402
from fairseq.tasks.translation import TranslationConfig, TranslationTask  # noqa: E402

import mixhead_plugin  # noqa: E402
from mixhead_plugin.modules.attention import MixheadAttention  # noqa: E402

mixhead_plugin.register()


def unmixed_step_by_step(attention: MixheadAttention) -> None:
    """Let this one module leave the mixing out where it is given a cache; the full pass mixes."""
    forward = attention.forward

    def forward_unmixed(*args: Any, incremental_state: Any = None, **kwargs: Any) -> Any:
        if incremental_state is None:
            return forward(*args, **kwargs)
        mixing, attention.head_mixing = attention.head_mixing, None
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
