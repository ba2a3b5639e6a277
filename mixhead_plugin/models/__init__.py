"""fairseq's models with the plugin's attention; importing this package registers them."""

from mixhead_plugin.models.architectures import ARCHITECTURES
from mixhead_plugin.models.roberta import RobertaModel
from mixhead_plugin.models.synthesizer import SynthesizerLanguageModel
from mixhead_plugin.models.transformer import TransformerModel
from mixhead_plugin.models.transformer_lm import TransformerLanguageModel
from mixhead_plugin.models.transformer_xl import TransformerXLModel

__all__ = [
    "ARCHITECTURES",
    "RobertaModel",
    "SynthesizerLanguageModel",
    "TransformerLanguageModel",
    "TransformerModel",
    "TransformerXLModel",
]
