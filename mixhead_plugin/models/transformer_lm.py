"""Transformer language model, adaptive inputs included: architectures `<family>_transformer_lm*`."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Dict

from fairseq import options as fairseq_options
from fairseq.models.transformer_lm import DEFAULT_MAX_TARGET_POSITIONS
from fairseq.models.transformer_lm import TransformerLanguageModel as StockModel
from fairseq.models.transformer_lm import TransformerLanguageModelConfig as StockConfig
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from torch import nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.models.families import FamilyModel, family_config, register_families
from mixhead_plugin.models.stock_flags import check_vocabulary
from mixhead_plugin.models.transformer import TransformerConfig
from mixhead_plugin.modules.layers import MixheadDecoder
from mixhead_plugin.options import AttentionOptions, AttentionShape, as_namespace


@dataclass
class TransformerLanguageModelConfig(AttentionOptions, StockConfig):
    """fairseq's flat language-model config plus the flags of the plugin."""


class TransformerLanguageModel(FamilyModel, StockModel):
    """fairseq's decoder-only Transformer with the plugin's attention."""

    @classmethod
    def options_of(cls, args: Any) -> TransformerLanguageModelConfig:
        return TransformerLanguageModelConfig.from_namespace(args)

    @classmethod
    def attention_shapes(cls, args: Any) -> Dict[str, AttentionShape]:
        cfg = TransformerLanguageModelConfig.from_namespace(args)
        return {
            "decoder-self": cls.shape("decoder", cfg.decoder_embed_dim, cfg.decoder_attention_heads, cfg.decoder_layers)
        }

    @classmethod
    def check_args(cls, args: Any) -> None:
        task = getattr(args, "task", None)  # on the command line alone
        if isinstance(task, str) and not hasattr(args, "tokens_per_sample"):
            raise OptionError(f"--task {task}: a language model needs one with --tokens-per-sample, language_modeling")
        if getattr(args, "adaptive_input", False) and not getattr(args, "adaptive_input_cutoff", None):
            raise OptionError("--adaptive-input: needs --adaptive-input-cutoff, the words where its bands end")
        if getattr(args, "adaptive_input", False) and not getattr(args, "adaptive_input_cutoff", None):
            raise OptionError("--adaptive-input: needs --adaptive-input-cutoff, the words where its bands end")
        super().check_args(args)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerLanguageModel":
        args = as_namespace(args)
        for name, default in vars(TransformerLanguageModelConfig()).items():
            if not hasattr(args, name) and not str(default).startswith("${"):  # an architecture named in a YAML file
                setattr(args, name, default)
        cls.check_args(args)
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if getattr(args, "max_target_positions", None) is None:
            args.max_target_positions = getattr(args, "tokens_per_sample", DEFAULT_MAX_TARGET_POSITIONS)
        if args.offload_activations:
            args.checkpoint_activations = True
        if args.tie_adaptive_weights:
            _check_tied(args)
        check_vocabulary(args, len(task.target_dictionary))
        return cls(cls.build_decoder(args, task.target_dictionary, cls.build_input(args, task.source_dictionary)))

    @classmethod
    def build_decoder(cls, args: Any, dictionary: Any, embed_tokens: nn.Module) -> MixheadDecoder:
        return MixheadDecoder(TransformerConfig.from_namespace(args), dictionary, embed_tokens, no_encoder_attn=True)

    @classmethod
    def build_input(cls, args: Any, dictionary: Any) -> nn.Module:
        """What embeds the tokens: plain, adaptive (Baevski & Auli) or by characters."""
        if args.character_embeddings:
            return CharacterTokenEmbedder(
                dictionary,
                fairseq_options.eval_str_list(args.character_filters, type=tuple),
                args.character_embedding_dim,
                args.decoder_embed_dim,
                args.char_embedder_highway_layers,
            )
        if args.adaptive_input:
            return AdaptiveInput(
                len(dictionary),
                dictionary.pad(),
                args.decoder_input_dim,
                args.adaptive_input_factor,
                args.decoder_embed_dim,
                fairseq_options.eval_str_list(args.adaptive_input_cutoff, type=int),
                args.quant_noise_pq,
                args.quant_noise_pq_block_size,
            )
        return cls.build_embedding(args, dictionary, args.decoder_input_dim)


def _check_tied(args: Any) -> None:
    """--tie-adaptive-weights needs the adaptive input and the adaptive softmax to have the same shape."""
    if not args.adaptive_input:
        raise OptionError("--tie-adaptive-weights: needs --adaptive-input")
    for left, right in (
        ("adaptive_softmax_factor", "adaptive_input_factor"),
        ("adaptive_softmax_cutoff", "adaptive_input_cutoff"),
        ("decoder_output_dim", "decoder_input_dim"),
    ):
        if getattr(args, left) != getattr(args, right):
            flags = [f"--{name.replace('_', '-')} {getattr(args, name)}" for name in (left, right)]
            raise OptionError(f"{flags[0]}: must equal {flags[1]} with --tie-adaptive-weights")


MODELS = register_families(
    TransformerLanguageModel, "transformer_lm", partial(family_config, TransformerLanguageModelConfig)
)
