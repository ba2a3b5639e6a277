"""fairseq's Transformer layers, encoder and decoder, with the plugin's attention.

The flags say at which sites. Here `cfg` is fairseq's nested config of a Transformer, which has no
place for flags of others. It can be asked for them all the same, as in `cfg.covers("cross")`,
because the model's config, such as `MixheadTransformerConfig`, inherits `options.AttentionOptions`.
"""

from typing import TYPE_CHECKING, Any, ClassVar

from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import FairseqDropout
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import nn

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.sites import side_of


def _wrapped(layer: nn.Module, cfg: Any) -> nn.Module:
    """Wrap a layer for activation checkpointing, as fairseq's `build_*_layer` do.

    They also wrap it for FSDP, with which the plugin's models refuse to train.
    """
    if cfg.checkpoint_activations:
        return checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return layer


class _Layer(nn.Module):
    """A mixin before a layer of fairseq.

    The __init__ of fairseq's layer builds its attentions. How many heads they have may depend on
    the number of the layer, so this one stores the number first.
    """

    fairseq_class: ClassVar[type]

    # Set by fairseq's __init__. TorchScript: annotations would become its types
    # (ops/torchscript.md).
    if TYPE_CHECKING:
        quant_noise: float
        quant_noise_block_size: int

    def __init__(self, *args: Any, layer: int = 0, **kwargs: Any):
        self.layer = layer  # nn.Module lets a plain int be set before its own __init__ ran
        super().__init__(*args, **kwargs)
        for child in self.children():
            # --retain-dropout-modules looks for the name of fairseq's class
            if isinstance(child, FairseqDropout):
                child.module_name = self.fairseq_class.__name__

    def _build_attention(
        self, embed_dim: int, cfg: Any, site: str, **arguments: Any
    ) -> MixheadAttention:
        """Return the attention that the flags ask for.

        Args:
            embed_dim: size of the attention's query input
            cfg: the config of the model
            site: where the attention is, one of SITES
            arguments: further arguments of `MixheadAttention`
        """
        num_heads = getattr(cfg, side_of(site)).attention_heads
        num_mixed_heads = None
        pruned = cfg.heads_at(site, self.layer)
        if pruned is not None:
            num_heads, num_mixed_heads = pruned
        return MixheadAttention(
            embed_dim,
            num_heads,
            num_mixed_heads=num_mixed_heads,
            causal=site == "decoder-self",
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            **cfg.attention_arguments(site),
            **arguments,
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
        # With --cross-self-attention the queries see the source, too, as further keys.
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


def _layer_number(stack: Any) -> int:
    """Return the number of the layer that an encoder or a decoder builds now.

    fairseq builds the layers in order, but does not tell the hook which one it wants.
    """
    number = getattr(stack, "layers_built", 0)
    stack.layers_built = number + 1
    return number


class MixheadEncoder(TransformerEncoderBase):
    layer_type: ClassVar[type[nn.Module]] = MixheadEncoderLayer

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.dropout_module.module_name = "TransformerEncoder"  # for --retain-dropout-modules

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        layer = self.layer_type(cfg, return_fc=self.return_fc, layer=_layer_number(self))
        return _wrapped(layer, cfg)


class MixheadDecoder(TransformerDecoderBase):
    layer_type: ClassVar[type[nn.Module]] = MixheadDecoderLayer

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.dropout_module.module_name = "TransformerDecoder"  # for --retain-dropout-modules

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        layer = self.layer_type(cfg, no_encoder_attn, layer=_layer_number(self))
        return _wrapped(layer, cfg)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> dict[str, Any]:
        super().upgrade_state_dict_named(state_dict, name)
        if self.adaptive_softmax is not None:
            # Under --share-decoder-input-output-embed fairseq adds the weight of a projection that
            # the model lacks.
            state_dict.pop(f"{name}.output_projection.weight", None)
        return state_dict
