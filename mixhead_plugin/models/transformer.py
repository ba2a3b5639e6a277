"""Encoder-decoder Transformer: architectures `<family>_transformer*`."""

from dataclasses import dataclass
from typing import Any, Dict

from fairseq.models.transformer import TransformerConfig as StockConfig
from fairseq.models.transformer import TransformerModel as StockModel

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.models.families import FamilyModel
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.layers import MixheadDecoder, MixheadEncoder
from mixhead_plugin.options import AttentionOptions, AttentionShape


@dataclass
class TransformerConfig(AttentionOptions, StockConfig):
    """fairseq's nested Transformer config plus the flags of the plugin; build it with `from_namespace` only."""


class TransformerModel(FamilyModel, StockModel):
    """fairseq's Transformer with the plugin's attention in encoder, decoder and between them."""

    config = TransformerConfig

    @classmethod
    def add_args(cls, parser: Any) -> None:
        for side in ("encoder", "decoder"):  # fairseq's parser would read lists, which its models cannot take
            parser.add_argument(f"--{side}-layers-to-keep", help="layers to keep when pruning, as in 0,2,4")
        super().add_args(parser)

    @classmethod
    def attention_shapes(cls, args: Any) -> Dict[str, AttentionShape]:
        cfg = TransformerConfig.from_namespace(args)
        encoder = cls.shape("encoder", cfg.encoder.embed_dim, cfg.encoder.attention_heads, cfg.encoder.layers)
        decoder = cls.shape("decoder", cfg.decoder.embed_dim, cfg.decoder.attention_heads, cfg.decoder.layers)
        shapes = {"encoder-self": encoder, "decoder-self": decoder}
        return shapes if cfg.no_cross_attention else {**shapes, "cross": decoder}

    @classmethod
    def check_args(cls, args: Any) -> None:
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
        args = cls.prepared(args)
        return super().build_model(TransformerConfig.from_namespace(args), task)

    @classmethod
    def build_encoder(cls, cfg: TransformerConfig, src_dict: Any, embed_tokens: Any) -> MixheadEncoder:
        return MixheadEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: TransformerConfig, tgt_dict: Any, embed_tokens: Any) -> MixheadDecoder:
        return MixheadDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def set_beam_size(self, beam: int) -> None:
        """Let attention to the encoder keep every sentence once instead of once a beam; beam search calls this."""
        for module in self.decoder.modules():
            if isinstance(module, MixheadAttention) and module.encoder_decoder_attention:
                module.set_beam_size(beam)
