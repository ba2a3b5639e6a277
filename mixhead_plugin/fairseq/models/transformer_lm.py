"""Transformer language model, also with adaptive inputs: `<family>_transformer_lm*`."""

from dataclasses import dataclass
from typing import Any, ClassVar

from fairseq import options as fairseq_options
from fairseq.models import transformer_lm as upstream
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from torch import nn

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.layers import MixheadDecoder
from mixhead_plugin.fairseq.models.families import FamilyModel
from mixhead_plugin.fairseq.models.transformer import MixheadTransformerConfig
from mixhead_plugin.fairseq.options import AttentionOptions
from mixhead_plugin.fairseq.sites import SiteSizes

# With --tie-adaptive-weights, the two flags of a pair must have the same value.
TIED = {
    "adaptive_input_factor": "adaptive_softmax_factor",
    "adaptive_input_cutoff": "adaptive_softmax_cutoff",
    "decoder_input_dim": "decoder_output_dim",
}


@dataclass
class MixheadLanguageModelConfig(AttentionOptions, upstream.TransformerLanguageModelConfig):
    """fairseq's flat language-model config plus the flags of the plugin."""


class MixheadLanguageModel(FamilyModel, upstream.TransformerLanguageModel):
    """fairseq's decoder-only Transformer with the plugin's attention."""

    config = MixheadLanguageModelConfig
    by_dataclass = True
    decoder_config: ClassVar[type[MixheadTransformerConfig]] = MixheadTransformerConfig
    decoder_type: ClassVar[type[MixheadDecoder]] = MixheadDecoder

    @classmethod
    def attention_sites(cls, args: Any) -> dict[str, SiteSizes]:
        cfg = MixheadLanguageModelConfig.from_namespace(args)
        sizes = cls.site_sizes(
            "decoder", cfg.decoder_embed_dim, cfg.decoder_attention_heads, cfg.decoder_layers
        )
        return {"decoder-self": sizes}

    @classmethod
    def check_args(cls, args: Any) -> None:
        super().check_args(args)
        cfg = cls.config.from_namespace(args)
        if not cfg.tie_adaptive_weights:
            return
        if not cfg.adaptive_input:
            raise OptionError("--tie-adaptive-weights: needs --adaptive-input")
        for name, other in TIED.items():
            value = getattr(cfg, name)
            wanted = getattr(cfg, other)
            if value != wanted:
                raise OptionError(
                    f"{option_name(name)} {value}: must be {wanted}, as {option_name(other)}, with "
                    "--tie-adaptive-weights"
                )

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "MixheadLanguageModel":
        """Build the model as fairseq's method does, which has no hook for the decoder."""
        args = cls.prepared(args)
        if args.decoder_layers_to_keep:  # of a checkpoint, for a smaller model
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if getattr(args, "max_target_positions", None) is None:
            length = getattr(args, "tokens_per_sample", None)
            args.max_target_positions = length or upstream.DEFAULT_MAX_TARGET_POSITIONS
        if args.offload_activations:
            args.checkpoint_activations = True
        cfg = cls.decoder_config.from_namespace(args)
        embed_tokens = cls.build_input(args, task.source_dictionary)
        decoder = cls.decoder_type(cfg, task.target_dictionary, embed_tokens, no_encoder_attn=True)
        return cls(decoder)

    @classmethod
    def build_input(cls, args: Any, dictionary: Any) -> nn.Module:
        """Return the embedding of the tokens: plain, adaptive (Baevski & Auli) or by characters."""
        if getattr(args, "character_embeddings", False):
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
