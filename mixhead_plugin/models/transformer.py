"""Encoder-decoder Transformer: architectures `<family>_transformer*`."""

from dataclasses import dataclass
from typing import Any

from fairseq.models import transformer as upstream

from mixhead_plugin.models.families import FamilyModel
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.layers import MixheadDecoder, MixheadEncoder
from mixhead_plugin.options import AttentionOptions, AttentionSite, refuse_relative


@dataclass
class TransformerConfig(AttentionOptions, upstream.TransformerConfig):
    """fairseq's nested Transformer config plus the flags of the plugin; build it with `from_namespace` only."""


class TransformerModel(FamilyModel, upstream.TransformerModel):
    """fairseq's Transformer with the plugin's attention in the encoder, the decoder and between them."""

    config = TransformerConfig

    @classmethod
    def attention_sites(cls, args: Any) -> dict[str, AttentionSite]:
        cfg = TransformerConfig.from_namespace(args)
        encoder = cls.shape("encoder", cfg.encoder.embed_dim, cfg.encoder.attention_heads, cfg.encoder.layers)
        decoder = cls.shape("decoder", cfg.decoder.embed_dim, cfg.decoder.attention_heads, cfg.decoder.layers)
        shapes = {"encoder-self": encoder, "decoder-self": decoder}
        return shapes if cfg.no_cross_attention else {**shapes, "cross": decoder}

    @classmethod
    def check_args(cls, args: Any) -> None:
        super().check_args(args)
        if getattr(args, "cross_self_attention", False) and args.attention_scope not in ("encoder", "cross"):
            refuse_relative(args, "with --cross-self-attention: the distance to the source is not defined")

    @classmethod
    def build_model(cls, args: Any, task: Any) -> "TransformerModel":
        args = cls.prepared(args)
        return super().build_model(TransformerConfig.from_namespace(args), task)

    @classmethod
    def build_encoder(cls, cfg: TransformerConfig, src_dict: Any, embed_tokens: Any) -> MixheadEncoder:
        return MixheadEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: TransformerConfig, tgt_dict: Any, embed_tokens: Any) -> MixheadDecoder:
        return MixheadDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def set_beam_size(self, beam: int) -> None:
        """Keep the encoder's output once for each sentence, not once for each beam; beam search calls this."""
        for module in self.decoder.modules():
            if isinstance(module, MixheadAttention) and module.encoder_decoder_attention:
                module.set_beam_size(beam)
