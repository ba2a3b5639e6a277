"""Encoder-decoder Transformer: architectures `<family>_transformer*`."""

from dataclasses import dataclass
from typing import Any, Dict

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerConfig as StockConfig
from fairseq.models.transformer import TransformerModel as StockModel
from fairseq.models.transformer import base_architecture

from mixhead_plugin.models.families import FamilyModel, register_families
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
    def build_model(cls, args: Any, task: Any) -> "TransformerModel":
        args = as_namespace(args)
        base_architecture(args)
        cls.check_args(args)
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
