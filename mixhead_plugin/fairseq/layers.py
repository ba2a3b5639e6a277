"""fairseq's Transformer layers, encoder and decoder, with the plugin's attention at the sites that
the flags cover.

`options` and `cfg` have the plugin's flags, as `options.AttentionOptions`; modules do not import
that class.
"""

from typing import Any, ClassVar

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import FairseqDropout
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import nn

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.parts import VARIANT


def flags_of_attention(options: Any) -> dict[str, Any]:
    """Return the arguments of `MixheadAttention` that the plugin's flags set for every attention
    they cover.
    """
    return {
        "normalizer": options.attention_normalizer,
        **{
            option: getattr(options, option)
            for option in VARIANT
            if option not in ("normalizer", "relative_position")
        },
        "head_dim": options.head_dim,
        "impl": options.attention_impl,
        "value_init_scale": options.value_init_scale,
        "mixing_lr_scale": options.mixing_lr_scale,
        "relative_gain": options.relative_gain,
    }


def _wrapped(layer: nn.Module, cfg: Any) -> nn.Module:
    """Wrap a layer for activation checkpointing and FSDP, as fairseq's `build_*_layer` do."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )


class _Layer(nn.Module):
    """Mixin before a layer of fairseq; the attentions that fairseq's __init__ builds depend on the
    layer's number.
    """

    fairseq_class: ClassVar[type]

    def __init__(self, *args: Any, layer: int = 0, **kwargs: Any):
        self.layer = layer  # nn.Module takes a plain int before its own __init__
        super().__init__(*args, **kwargs)
        for child in self.children():
            # --retain-dropout-modules looks for the name of fairseq's class
            if isinstance(child, FairseqDropout):
                child.module_name = self.fairseq_class.__name__

    def _build_attention(
        self, embed_dim: int, cfg: Any, site: str, **arguments: Any
    ) -> MixheadAttention:
        """Return the attention that the flags ask for at `site`; `arguments` are of fairseq's
        attention.
        """
        side = cfg.encoder if site == "encoder-self" else cfg.decoder
        num_heads, num_mixed_heads = cfg.heads_at(site, self.layer) or (side.attention_heads, None)
        flags = flags_of_attention(cfg)
        if site == "cross":  # queries and keys are in different sentences: they have no distance
            del flags["relative_gain"]
        else:
            flags["relative_position"] = cfg.relative_position
        flags |= {"dropout": cfg.attention_dropout, "causal": site == "decoder-self"}
        flags |= {"q_noise": self.quant_noise, "qn_block_size": self.quant_noise_block_size}
        return MixheadAttention(
            embed_dim, num_heads, num_mixed_heads=num_mixed_heads, **flags, **arguments
        )


class MixheadEncoderLayer(_Layer, TransformerEncoderLayerBase):
    fairseq_class = TransformerEncoderLayerBase

    def build_self_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        if not cfg.covers("encoder-self"):
            return super().build_self_attention(embed_dim, cfg)
        return self._build_attention(embed_dim, cfg, "encoder-self", self_attention=True)


class MixheadDecoderLayer(_Layer, TransformerDecoderLayerBase):
    fairseq_class = TransformerDecoderLayerBase

    def build_self_attention(self, embed_dim: int, cfg: Any, **constant_keys: bool) -> nn.Module:
        if not cfg.covers("decoder-self"):
            return super().build_self_attention(embed_dim, cfg, **constant_keys)
        alone = not cfg.cross_self_attention
        return self._build_attention(
            embed_dim, cfg, "decoder-self", self_attention=alone, **constant_keys
        )

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> nn.Module:
        if not cfg.covers("cross"):
            return super().build_encoder_attention(embed_dim, cfg)
        size = cfg.encoder.embed_dim
        return self._build_attention(
            embed_dim, cfg, "cross", kdim=size, vdim=size, encoder_decoder_attention=True
        )


def _layer_number(stack: nn.Module) -> int:
    """Return the number of the layer that an encoder or a decoder builds now; fairseq builds them
    in order.
    """
    stack.layers_built = getattr(stack, "layers_built", -1) + 1
    return stack.layers_built


class MixheadEncoder(TransformerEncoderBase):
    layer_type: ClassVar[type[nn.Module]] = MixheadEncoderLayer

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.dropout_module.module_name = "TransformerEncoder"  # for --retain-dropout-modules

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        return _wrapped(
            self.layer_type(cfg, return_fc=self.return_fc, layer=_layer_number(self)), cfg
        )


class MixheadDecoder(TransformerDecoderBase):
    layer_type: ClassVar[type[nn.Module]] = MixheadDecoderLayer

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.dropout_module.module_name = "TransformerDecoder"  # for --retain-dropout-modules

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        return _wrapped(self.layer_type(cfg, no_encoder_attn, layer=_layer_number(self)), cfg)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        super().upgrade_state_dict_named(state_dict, name)
        if self.adaptive_softmax is not None:
            # Under --share-decoder-input-output-embed fairseq adds the weight of a projection that
            # the model lacks.
            state_dict.pop(f"{name}.output_projection.weight", None)
        return state_dict
