"""Encoder-decoder Transformer: architectures `<family>_transformer*`."""

from dataclasses import dataclass
from typing import Any, Dict

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig as StockConfig
from fairseq.models.transformer import TransformerModel as StockModel
from fairseq.models.transformer import base_architecture

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.models.families import FamilyModel, register_families
from mixhead_plugin.models.stock_flags import check_vocabulary
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.layers import MixheadDecoder, MixheadEncoder
from mixhead_plugin.options import AttentionOptions, AttentionShape, as_namespace


@dataclass
class TransformerConfig(AttentionOptions, StockConfig):
    """fairseq's nested Transformer config plus the flags of the plugin; build it with `from_namespace` only."""


class TransformerModel(FamilyModel, StockModel):
    """fairseq's Transformer with the plugin's attention in encoder, decoder and between them."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        gen_parser_from_dataclass(parser, TransformerConfig(), delete_default=True, with_prefix="")

    @classmethod
    def options_of(cls, args: Any) -> TransformerConfig:
        return TransformerConfig.from_namespace(args)

    @classmethod
    def attention_shapes(cls, args: Any) -> Dict[str, AttentionShape]:
        cfg = TransformerConfig.from_namespace(args)
        encoder = cls.shape("encoder", cfg.encoder.embed_dim, cfg.encoder.attention_heads, cfg.encoder.layers)
        decoder = cls.shape("decoder", cfg.decoder.embed_dim, cfg.decoder.attention_heads, cfg.decoder.layers)
        shapes = {"encoder-self": encoder, "decoder-self": decoder}
        return shapes if cfg.no_cross_attention else {**shapes, "cross": decoder}

    @classmethod
    def check_args(cls, args: Any) -> None:
        for name in ("encoder_layers_to_keep", "decoder_layers_to_keep"):
            kept = getattr(args, name, None)
            if isinstance(kept, (list, tuple)):  # as fairseq's parser reads it, and its code does not take it
                setattr(args, name, ",".join(map(str, kept)))
        if getattr(args, "tie_adaptive_weights", False):
            raise OptionError("--tie-adaptive-weights: needs --adaptive-input, which language models alone have")
        super().check_args(args)
        if not getattr(args, "cross_self_attention", False) or args.attention_scope in ("encoder", "cross"):
            return
        for name, off in (("relative_position", "none"), ("relative_gain", 0)):
            if getattr(args, name) != off:  # padding of the source would count as distance
                raise OptionError(
                    f"{option_name(name)} {getattr(args, name)}: must be {off} with --cross-self-attention, whose keys "
                    "have no distance"
                )

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerModel":
        args = as_namespace(args)
        base_architecture(args)
        cls.check_args(args)
        check_vocabulary(args, len(task.target_dictionary))
        if args.share_all_embeddings and task.source_dictionary != task.target_dictionary:
            raise OptionError("--share-all-embeddings: needs one dictionary of both languages, --joined-dictionary")
        return super().build_model(TransformerConfig.from_namespace(args), task)

    @classmethod
    def build_encoder(cls, cfg: TransformerConfig, src_dict: Any, embed_tokens: Any) -> MixheadEncoder:
        return MixheadEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: TransformerConfig, tgt_dict: Any, embed_tokens: Any) -> MixheadDecoder:
        return MixheadDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def set_beam_size(self, beam: int) -> None:
        """Called by beam search: attention to the encoder then keeps every sentence once, not once a beam."""
        for module in self.decoder.modules():
            if isinstance(module, MixheadAttention) and module.encoder_decoder_attention:
                module.set_beam_size(beam)


MODELS = register_families(TransformerModel, "transformer")
