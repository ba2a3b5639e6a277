"""fairseq's Transformer layers, encoder and decoder, with the plugin's attention in the places that the flags name."""

from typing import Any, ClassVar, Dict, Type

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import FairseqDropout
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import nn

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.learning_rate import scale_learning_rate


def flags_of_attention(options: Any) -> Dict[str, Any]:
    """Arguments of `MixheadAttention` that the plugin's flags name, for every attention that they cover."""
    return {
        "normalizer": options.attention_normalizer,
        "head_mixing": options.head_mixing,
        "head_dim": options.head_dim,
        "impl": options.attention_impl,
        "value_init_scale": options.value_init_scale,
        "relative_gain": options.relative_gain,
    }


def at_its_rate(attention: MixheadAttention, options: Any) -> MixheadAttention:
    """`attention`, whose head mixing learns at the rate that --mixing-lr-scale gives it."""
    if attention.head_mixing is not None:
        scale_learning_rate(attention.head_mixing, options.mixing_lr_scale)
    return attention


def build_attention(
    embed_dim: int, num_heads: int, options: Any, site: str, layer: int, **stock: Any
) -> MixheadAttention:
    """The attention that `options` ask for at `place`, one of SCOPES['all'], in the layer of this number.

    `stock` are arguments of fairseq's own attention.
    """
    num_heads, num_mixed_heads = options.heads_at(site, layer) or (num_heads, num_heads)
    flags = flags_of_attention(options)
    if site == "cross":  # queries and keys do not stand in the same sentence
        del flags["relative_gain"]
    else:
        flags["relative_position"] = options.relative_position
    attention = MixheadAttention(
        embed_dim, num_heads, num_mixed_heads=num_mixed_heads, causal=site == "decoder-self", **flags, **stock
    )
    return at_its_rate(attention, options)


def _keep_dropout_names(module: nn.Module, stock: type) -> None:
    """fairseq names a dropout after the class around it; --retain-dropout-modules must find the stock names."""
    name = stock.__name__
    for child in module.children():
        if isinstance(child, FairseqDropout):
            child.module_name = name


def _wrapped(layer: nn.Module, cfg: Any) -> nn.Module:
    """Activation checkpointing and FSDP around a layer, as fairseq's `build_*_layer` do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


class _Numbered(nn.Module):
    """Mixin before a layer of fairseq, which builds its attention when it is made itself."""

    def __init__(self, *args: Any, layer: int, **kwargs: Any):
        self.layer = layer  # an int is no business of nn.Module's, which is not yet ready for others
        super().__init__(*args, **kwargs)


class MixheadEncoderLayer(_Numbered, TransformerEncoderLayerBase):
    def __init__(self, cfg: Any, return_fc: bool = False, *, layer: int = 0):
        super().__init__(cfg, return_fc=return_fc, layer=layer)
        _keep_dropout_names(self, TransformerEncoderLayerBase)

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        if not cfg.covers("encoder-self"):
            return super().build_self_attention(embed_dim, cfg)
        return build_attention(
            embed_dim,
            cfg.encoder.attention_heads,
            cfg,
            "encoder-self",
            self.layer,
            dropout=cfg.attention_dropout,
            self_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )


class MixheadDecoderLayer(_Numbered, TransformerDecoderLayerBase):
    def __init__(
        self,
        cfg: Any,
        no_encoder_attn: bool = False,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        *,
        layer: int = 0,
    ):
        super().__init__(cfg, no_encoder_attn, add_bias_kv, add_zero_attn, layer=layer)
        _keep_dropout_names(self, TransformerDecoderLayerBase)

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> nn.Module:
        if not cfg.covers("decoder-self"):
            return super().build_self_attention(embed_dim, cfg, add_bias_kv, add_zero_attn)
        return build_attention(
            embed_dim,
            cfg.decoder.attention_heads,
            cfg,
            "decoder-self",
            self.layer,
            dropout=cfg.attention_dropout,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            self_attention=not cfg.cross_self_attention,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        if not cfg.covers("cross"):
            return super().build_encoder_attention(embed_dim, cfg)
        return build_attention(
            embed_dim,
            cfg.decoder.attention_heads,
            cfg,
            "cross",
            self.layer,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            encoder_decoder_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )


def _next(stack: nn.Module) -> int:
    """The number of the layer that an encoder or a decoder builds now; fairseq builds them in turn and does not say."""
    stack.layers_built = getattr(stack, "layers_built", -1) + 1
    return stack.layers_built


class MixheadEncoder(TransformerEncoderBase):
    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, return_fc: bool = False):
        super().__init__(cfg, dictionary, embed_tokens, return_fc)
        self.dropout_module.module_name = "TransformerEncoder"  # see _keep_dropout_names

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        return _wrapped(MixheadEncoderLayer(cfg, return_fc=self.return_fc, layer=_next(self)), cfg)


class MixheadDecoder(TransformerDecoderBase):
    layer_type: ClassVar[Type[MixheadDecoderLayer]] = MixheadDecoderLayer

    def __init__(
        self,
        cfg: Any,
        dictionary: Any,
        embed_tokens: nn.Module,
        no_encoder_attn: bool = False,
        output_projection: Any = None,
    ):
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, output_projection)
        self.dropout_module.module_name = "TransformerDecoder"  # see _keep_dropout_names

    def upgrade_state_dict_named(self, state_dict: Dict[str, Any], name: str) -> Dict[str, Any]:
        super().upgrade_state_dict_named(state_dict, name)
        if self.adaptive_softmax is not None:
            # with --share-decoder-input-output-embed fairseq adds one for a projection that the model does not have
            state_dict.pop(f"{name}.output_projection.weight", None)
        return state_dict

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return _wrapped(self.layer_type(cfg, no_encoder_attn, layer=_next(self)), cfg)
