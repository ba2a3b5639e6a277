"""Extend fairseq's multi-head attention by a choice of normalizer, mixed heads and a free head
size.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from mixhead_plugin.fairseq.cache import CachedAttention
from mixhead_plugin.fairseq.learning_rate import scale_learning_rate
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import by_head
from mixhead_plugin.ops.reference import (
    append_sink,
    apply_gain,
    masked_scores,
    mix_heads,
    weighted_values,
)
from mixhead_plugin.parts import MIXINGS, PARTS, Assembly, complete, sizes_of


class MixheadAttention(Assembly, CachedAttention):
    """Replace fairseq's `MultiheadAttention`: same call, buffers, parameter names and random
    initialisation.

    The same computation (mixhead eqs 8-12) runs in training, validation, step-by-step decoding and
    TorchScript.

    Args:
        embed_dim, ..., qn_block_size: as in fairseq
        head_dim: size of a head's queries, keys and values; None for embed_dim / num_heads
        impl: the implementation of `ops.attention`
        value_init_scale: factor on the initial weights of v_proj and out_proj
        num_mixed_heads: number of heads after mixing, each with its own values and part of
            out_proj; None for num_heads, or num_heads / 2 with differential mixing
        relative_gain: the farthest distance of the `DistanceGain`, for self-attention; 0 for none
        causal: whether queries only see earlier keys; relative positions depend on it
        mixing_lr_scale: factor on the learning rate of the head, score and feature mixing
        variant: the keywords of `parts.VARIANT`; relative positions are for self-attention
    """

    tables: ClassVar[dict[str, Any]] = PARTS  # of the options that a checkpoint must share

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: int | None = None,
        vdim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        self_attention: bool = False,
        encoder_decoder_attention: bool = False,
        dictionary: Any = None,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        *,
        head_dim: int | None = None,
        impl: str = "auto",
        value_init_scale: float = 1.0,
        num_mixed_heads: int | None = None,
        relative_gain: int = 0,
        causal: bool = False,
        mixing_lr_scale: float = 1.0,
        **variant: str,
    ):
        # MultiheadAttention.__init__ insists on head_dim * num_heads == embed_dim; skip it.
        super(MultiheadAttention, self).__init__(dictionary)
        if head_dim is None and embed_dim % num_heads != 0:
            raise ValueError(
                f"num_heads {num_heads} does not divide embed_dim {embed_dim}: give a head_dim"
            )
        self.embed_dim = embed_dim
        self.kdim = kdim if kdim is not None else embed_dim
        self.vdim = vdim if vdim is not None else embed_dim
        self.qkv_same_dim = self.kdim == embed_dim and self.vdim == embed_dim
        if self_attention and not self.qkv_same_dim:
            raise ValueError(
                f"self_attention needs kdim {kdim} and vdim {vdim} to equal embed_dim {embed_dim}"
            )

        self.num_heads = num_heads
        self.head_dim = head_dim if head_dim is not None else embed_dim // num_heads
        variant = complete(variant, impl)
        sizes = sizes_of(variant, num_heads, self.head_dim, embed_dim, causal, num_mixed_heads)
        self.num_mixed_heads = sizes.mixed_heads
        self.scaling = self.head_dim**-0.5
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        # --retain-dropout-modules looks for the name of fairseq's class.
        self.dropout_module = FairseqDropout(dropout, module_name=MultiheadAttention.__name__)

        # In fairseq's order, so that the same seed gives the same projections.
        inner_dim, mixed_dim = num_heads * self.head_dim, sizes.mixed_heads * sizes.value_dim
        self.k_proj = quant_noise(
            nn.Linear(self.kdim, inner_dim, bias=bias), q_noise, qn_block_size
        )
        self.v_proj = quant_noise(
            nn.Linear(self.vdim, mixed_dim, bias=bias), q_noise, qn_block_size
        )
        self.q_proj = quant_noise(
            nn.Linear(embed_dim, inner_dim, bias=bias), q_noise, qn_block_size
        )
        self.out_proj = quant_noise(
            nn.Linear(mixed_dim, embed_dim, bias=bias), q_noise, qn_block_size
        )
        self.bias_k = nn.Parameter(torch.empty(1, 1, inner_dim)) if add_bias_kv else None
        self.bias_v = nn.Parameter(torch.empty(1, 1, mixed_dim)) if add_bias_kv else None
        self.add_zero_attn = add_zero_attn
        self.beam_size = 1
        self.reset_parameters()
        self.value_init_scale = value_init_scale
        self.scale_values()

        relative = variant["relative_position"] != "none" or relative_gain
        if relative and (encoder_decoder_attention or add_bias_kv or add_zero_attn):
            raise ValueError(
                "relative positions need self-attention without constant keys, which have no "
                "position"
            )
        self.add_parts(variant, sizes, relative_gain)
        # TorchScript cannot look it up by name
        self.normalize = NORMALIZERS[self.normalizer].weights
        for mixing in (getattr(self, option) for option in MIXINGS):
            if mixing is not None:
                scale_learning_rate(mixing, mixing_lr_scale)
        self.impl = impl

        # Attributes of fairseq's module that other code reads or sets.
        self.use_xformers = False
        self.onnx_trace = False
        self.skip_embed_dim_check = False

    def scale_values(self) -> None:
        """Shrink the initial W_V and W_O (l2 essay); call it again after another initialisation,
        such as BERT's.
        """
        with torch.no_grad():
            self.v_proj.weight.mul_(self.value_init_scale)
            self.out_proj.weight.mul_(self.value_init_scale)

    def signature(self) -> dict[str, Any]:
        """Return the options that a checkpoint must share with this module, with their values."""
        return {
            "attention_normalizer": self.normalizer,
            **self.kinds,
            **({} if self.mixed_features is None else {"mixed_features": self.mixed_features}),
            "attention_heads": self.num_heads,
            "head_dim": self.head_dim,
            "mixed_heads": self.num_mixed_heads,
            "relative_gain": 0 if self.relative_gain is None else self.relative_gain.clip,
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # The tensors do not show which normalizer they belong to: store it as metadata.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata[prefix[:-1]].update(self.signature())

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with fairseq's calling convention.

        Args:
            query: [Nq, B, embed_dim]
            key: [Nk, B, kdim]; may be None if `static_kv` finds it in the cache
            value: [Nk, B, vdim], likewise
            key_padding_mask: [B, Nk], non-zero hides a key
            incremental_state: the cache of step-by-step decoding
            need_weights: also return the mixed weights, averaged over the heads
            static_kv: all steps use the keys and values of the first step (encoder-decoder
                attention)
            attn_mask: [Nq, Nk] or [B * H, Nq, Nk]; floats are added to the scores; in other types
                non-zero hides
            before_softmax: return the masked scores [B * H, Nq, Nk] and the values [B * H, Nk, D]
                instead
            need_head_weights: also return the mixed weights of every head

        Returns:
            output [Nq, B, embed_dim] and weights: None, [B, Nq, Nk], or [H', B, Nq, Nk] with
                `need_head_weights`
        """
        _, batch, embed_dim = query.size()
        if not self.skip_embed_dim_check:
            assert embed_dim == self.embed_dim, f"query dim {embed_dim} != {self.embed_dim}"

        q = self._split_heads(self.queries(query), self.num_heads)  # [B, H, Nq, D]
        k, v, key_padding_mask = self._keys_and_values(
            query, key, value, key_padding_mask, incremental_state, static_kv
        )
        bias_k, bias_v = self.bias_k, self.bias_v
        # constant keys are always visible, and never cached
        if bias_k is not None and bias_v is not None:
            bias_k, bias_v = bias_k.expand(1, k.size(0), -1), bias_v.expand(1, k.size(0), -1)
            k = torch.cat([k, self._split_heads(bias_k, self.num_heads).to(k.dtype)], dim=2)
            v = torch.cat([v, self._split_heads(bias_v, self.num_mixed_heads).to(v.dtype)], dim=2)
            key_padding_mask, attn_mask = self._pad_masks(key_padding_mask, attn_mask)
        if self.add_zero_attn:
            k, v = F.pad(k, [0, 0, 0, 1]), F.pad(v, [0, 0, 0, 1])
            key_padding_mask, attn_mask = self._pad_masks(key_padding_mask, attn_mask)
        attn_mask = by_head(attn_mask, self.num_heads, q.dtype)
        x = query.transpose(0, 1)  # [B, Nq, C]
        beams = batch // k.size(0)
        if beams > 1:
            q, x = (
                self._fold_beams(q.transpose(1, 2), beams).transpose(1, 2),
                self._fold_beams(x, beams),
            )
            if attn_mask is not None:
                attn_mask = attn_mask.repeat(1, 1, beams, 1)
        inputs = self.inputs_of(
            q,
            k,
            v,
            q,
            x,
            attn_mask=attn_mask,
            key_padding_mask=as_bool(key_padding_mask),
            dropout_p=self.dropout_p(),
            scale=self.scaling,
        )
        return self._output(inputs, query, beams, before_softmax, need_weights, need_head_weights)

    def dropout_p(self) -> float:
        """Return the probability of dropping a weight in this call."""
        if self.training or self.dropout_module.apply_during_inference:
            return float(self.dropout_module.p)
        return 0.0

    def _output(
        self,
        inputs: AttentionInputs,
        x: Tensor,
        beams: int = 1,
        before_softmax: bool = False,
        need_weights: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `forward` returns for its query `x`, where `beams` hypotheses share the keys
        of a sentence.
        """
        if before_softmax:
            return masked_scores(inputs).flatten(0, 1).to(inputs.value.dtype), inputs.value.flatten(
                0, 1
            )
        need_weights = need_weights or need_head_weights
        weights: Tensor | None = None
        if torch.jit.is_scripting():
            out, weights = self._attend_by_definition(inputs)
        else:
            out, weights = self._attend(inputs, need_weights)
        # out [B, H', Nq, D], weights [B, H', Nq, Nk] or None

        # [B, Nq, H', D]
        out = self.gated(self._unfold_beams(out.transpose(1, 2), beams), x.transpose(0, 1))
        out = self.out_proj(out.transpose(0, 1).flatten(2))  # [Nq, B, embed_dim]
        if weights is None or not need_weights:
            return out, None
        weights = self._unfold_beams(weights.transpose(1, 2), beams)  # [B, Nq, H', Nk]
        if need_head_weights:
            return out, weights.permute(2, 0, 1, 3)
        return out, weights.mean(2)

    @torch.jit.unused
    def _attend(self, inputs: AttentionInputs, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, H', Nq, D] and, where needed, the mixed weights [B, H', Nq, Nk]."""
        return self.attend(inputs, self.impl, need_weights)

    def _attend_by_definition(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Compute `reference_with_weights` step by step: TorchScript cannot look up a normalizer by
        its name.
        """
        weights = mix_heads(self._weights(inputs), inputs.mixing)  # [B, H', Nq, Nk]
        return weighted_values(weights, inputs), weights

    def _weights(self, inputs: AttentionInputs) -> Tensor:
        """Return P [B, H, Nq, Nk], with the gains of distances, before mixing and dropout."""
        weights = self.normalize(append_sink(masked_scores(inputs), inputs.sink))[
            ..., : inputs.key.size(2)
        ]
        return apply_gain(weights, inputs.gain)


def as_bool(mask: Tensor | None) -> Tensor | None:
    # fairseq keeps padding masks as floats in the cache
    return None if mask is None else mask.to(torch.bool)
