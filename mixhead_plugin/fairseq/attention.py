"""fairseq's multi-head attention with normalizers, mixed heads and a free head size."""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from mixhead_plugin.fairseq.cache import CachedAttention
from mixhead_plugin.fairseq.learning_rate import mark_learning_rate
from mixhead_plugin.fairseq.padding import as_bool
from mixhead_plugin.fairseq.record import Recorded, record_of
from mixhead_plugin.fairseq.relative import refuse_relative
from mixhead_plugin.fairseq.shared_methods import SharedMethods
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import as_added_mask
from mixhead_plugin.ops.reference import exact_scores, masked_scores
from mixhead_plugin.parts import MIXINGS, Assembly, Variant
from mixhead_plugin.parts.variant import whole_number


class MixheadAttention(Recorded, Assembly, SharedMethods, CachedAttention):
    """Replace fairseq's `MultiheadAttention`.

    It has the same `forward`, buffers, parameter names and random initialisation. Its constructor
    takes the same arguments but those of xformers, which would compute the attention. The same
    computation (mixhead eqs 8-12) runs in training, validation, step-by-step decoding and
    TorchScript.

    The docstring of `mixhead_plugin/fairseq/__init__.py` shows the way of a flag to the kernel. Its
    last steps are in this class.

    What is defined elsewhere:

        record.py             Recorded: `record` goes into checkpoints
        parts/assembly.py     Assembly: `add_parts`, `queries`, `keys`, `values`, `inputs_of`,
                              `mix_and_gate_outputs`
        shared_methods.py     SharedMethods: `attend_by_definition`, `dropout_p`, `scale_values`
        parts/hooks.py        Hooked, a base of Assembly: `attend`, `register_attention_hook`
        cache.py              CachedAttention: `_keys_and_values`, `_fold_beams`, `_split_heads`
        fairseq               MultiheadAttention: `reset_parameters`, `_pad_masks`, buffers of the
                              cache

    Args:
        embed_dim: size of the query input and of the output
        num_heads: H, the number of source heads
        kdim: size of the key input; None for embed_dim
        vdim: size of the value input; None for embed_dim
        dropout: probability of dropping a weight
        bias: whether the projections have biases
        add_bias_kv: whether a learned key and value are added to those of the inputs
        add_zero_attn: whether a key and a value of zeros are added
        self_attention: whether queries, keys and values have the same input
        encoder_decoder_attention: whether keys and values come from an encoder
        dictionary: not used; fairseq passes one
        q_noise: quantisation noise of the projections, 0 for none
        qn_block_size: the size of the blocks that this noise quantises
        variant: what is asked of this attention; None for the fields in `keywords`
        num_mixed_heads: number of heads after mixing, each with its own values and part of
            out_proj; None for num_heads, or num_heads / 2 with differential mixing
        causal: whether queries only see earlier keys; the relative position 't5' depends on it
        value_init_scale: factor on the initial weights of v_proj and out_proj
        mixing_lr_scale: factor on the learning rate of the head, score and feature mixing
        keywords: the fields of `Variant`, in place of `variant`. relative_position and
            relative_gain are for self-attention.

    Raises:
        ValueError: an argument that cannot work, in one line that begins with its name
    """

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
        variant: Variant | None = None,
        num_mixed_heads: int | None = None,
        causal: bool = False,
        value_init_scale: float = 1.0,
        mixing_lr_scale: float = 1.0,
        **keywords: Any,
    ):
        # MultiheadAttention.__init__ insists on head_dim * num_heads == embed_dim. This call goes
        # past it, and also past the __init__ of every mixin: none has one, see `Hooked.init_hooks`.
        super(MultiheadAttention, self).__init__(dictionary)

        if variant is None:
            variant = Variant.of(keywords)
        elif keywords:
            raise ValueError(f"{next(iter(keywords))}: must be left out where a variant is given")
        sizes = variant.sizes(num_heads, embed_dim, causal=causal, mixed_heads=num_mixed_heads)
        if self_attention:
            _check_input("kdim", kdim, embed_dim)
            _check_input("vdim", vdim, embed_dim)
        if encoder_decoder_attention:
            refuse_relative(variant, " in encoder-decoder attention")
        if add_bias_kv:
            refuse_relative(variant, " with add_bias_kv, a key without a position")
        if add_zero_attn:
            refuse_relative(variant, " with add_zero_attn, a key without a position")

        # The arguments may be numbers of NumPy. Those of `sizes` are Python's, as the record in a
        # checkpoint needs them: `torch.load` refuses others.
        embed_dim = sizes.embed_dim
        num_heads = sizes.num_heads
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else whole_number("kdim", kdim, least=1)
        self.vdim = embed_dim if vdim is None else whole_number("vdim", vdim, least=1)
        self.num_heads = num_heads
        self.num_mixed_heads = sizes.mixed_heads
        self.head_dim = sizes.head_dim
        self.value_head_dim = variant.value_size(sizes.head_dim)
        # Of a mixed head: value_head_dim, or twice it with differential mixing.
        self.value_dim = sizes.value_dim
        self.scaling = self.head_dim**-0.5
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        self.add_zero_attn = add_zero_attn
        self.beam_size = 1
        self.impl = variant.impl  # each call reads it here, so it may be changed
        # --retain-dropout-modules looks for the name of fairseq's class.
        self.dropout_module = FairseqDropout(dropout, module_name=MultiheadAttention.__name__)

        # What other methods of fairseq's class read or set.
        self.qkv_same_dim = self.kdim == embed_dim and self.vdim == embed_dim
        self.onnx_trace = False
        self.skip_embed_dim_check = False

        def projection(inputs: int, outputs: int) -> Any:
            return quant_noise(nn.Linear(inputs, outputs, bias=bias), q_noise, qn_block_size)

        # In fairseq's order, so that the same seed gives the same projections.
        inner_dim = num_heads * sizes.head_dim
        mixed_dim = sizes.mixed_heads * sizes.value_dim
        self.k_proj = projection(self.kdim, inner_dim)
        self.v_proj = projection(self.vdim, mixed_dim)
        self.q_proj = projection(embed_dim, inner_dim)
        self.out_proj = projection(mixed_dim, embed_dim)
        self.bias_k = nn.Parameter(torch.empty(1, 1, inner_dim)) if add_bias_kv else None
        self.bias_v = nn.Parameter(torch.empty(1, 1, mixed_dim)) if add_bias_kv else None
        self.value_init_scale = value_init_scale
        self.reset_parameters()

        self.add_parts(variant, sizes)
        for name in MIXINGS:
            mixing = getattr(self, name)
            if mixing is not None:
                mark_learning_rate(mixing, mixing_lr_scale)
        # TorchScript: no entry of a table by a name in a variable (ops/torchscript.md).
        self.normalize = NORMALIZERS[self.normalizer].weights

    def reset_parameters(self) -> None:
        """Draw the projections as fairseq does, with `value_init_scale`; parts have their own."""
        super().reset_parameters()
        self.scale_values()

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint must share with this module, by the names of flags."""
        return {
            **record_of(self.variant),
            "attention_heads": self.num_heads,
            "head_dim": self.head_dim,
            "mixed_heads": self.num_mixed_heads,
            "value_head_dim": self.value_head_dim,
        }

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
            query: the input of the queries, [Nq, B, embed_dim]
            key: the input of the keys, [Nk, B, kdim]; None if `static_kv` finds them in the cache
            value: the input of the values, [Nk, B, vdim]; None as for `key`
            key_padding_mask: [B, Nk], non-zero hides a key; None for no padding
            incremental_state: the cache of step-by-step decoding; None for a full pass
            need_weights: also return the mixed weights, averaged over the heads. `reference` alone
                holds them, so it computes this call, whatever `impl` is
            static_kv: all steps use the keys and values of the first step (encoder-decoder
                attention)
            attn_mask: [Nq, Nk] or [B * H, Nq, Nk]; floats are added to the scores; in other types
                non-zero hides
            before_softmax: return the masked scores [B * H, Nq, Nk] and the values
                [B * H', Nk, Dv] instead
            need_head_weights: also return the mixed weights of every head

        Returns:
            output [Nq, B, embed_dim] and weights: None, [B, Nq, Nk], or [H', B, Nq, Nk] with
                `need_head_weights`
        """
        batch = query.size(1)
        if not self.skip_embed_dim_check:
            size = query.size(2)
            assert size == self.embed_dim, f"query dim {size} != {self.embed_dim}"

        q = self._split_heads(self.queries(query), self.num_heads)  # [B, H, Nq, D]
        k, v, key_padding_mask = self._keys_and_values(
            query, key, value, key_padding_mask, incremental_state, static_kv
        )

        k, v, key_padding_mask, attn_mask = self._add_constant_keys(
            k, v, key_padding_mask, attn_mask
        )
        attn_mask = as_added_mask(attn_mask, self.num_heads, q.dtype)  # [1 or B, 1 or H, Nq, Nk]
        x = query.transpose(0, 1)  # [B, Nq, C]

        # In beam search the hypotheses of a sentence share its keys: they become further queries,
        # one hypothesis after the other. B is then the number of sentences. Where queries and keys
        # have the same batch, there are no beams; an empty batch is such a case, and could not be
        # divided by.
        beams = 1
        if batch > k.size(0):
            beams = batch // k.size(0)
            q = self._fold_heads(q, beams)  # [B, H, beams * Nq, D]
            x = self._fold_beams(x, beams)  # [B, beams * Nq, C]
            if attn_mask is not None and attn_mask.size(0) == 1:
                attn_mask = attn_mask.repeat(1, 1, beams, 1)
            elif attn_mask is not None:
                attn_mask = self._fold_heads(attn_mask, beams)

        inputs = self.inputs_of(
            q,
            k,
            v,
            projected=q,
            x=x,
            attn_mask=attn_mask,
            key_padding_mask=as_bool(key_padding_mask),
            dropout_p=self.dropout_p(),
            scale=self.scaling,
        )
        return self._attend_and_project(
            inputs, query, beams, before_softmax, need_weights, need_head_weights
        )

    def _add_constant_keys(
        self,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return keys and values with those of add_bias_kv and add_zero_attn, and longer masks.

        All queries see these keys. They are never cached.

        Args:
            k: the projected keys, [B, H, Nk, D]
            v: the projected values, [B, H', Nk, Dv]
            key_padding_mask: [B, Nk], non-zero hides a key; None for no padding
            attn_mask: [Nq, Nk] or [B * H, Nq, Nk]; None for no mask
        """
        # TorchScript: local names become tensors after `is not None`, attributes do not.
        bias_k = self.bias_k
        bias_v = self.bias_v
        if bias_k is not None and bias_v is not None:
            new_k = self._split_heads(bias_k.expand(1, k.size(0), -1), self.num_heads)
            new_v = self._split_heads(bias_v.expand(1, v.size(0), -1), self.num_mixed_heads)
            k = torch.cat([k, new_k.to(k.dtype)], dim=2)
            v = torch.cat([v, new_v.to(v.dtype)], dim=2)
            key_padding_mask, attn_mask = self._pad_masks(key_padding_mask, attn_mask)
        if self.add_zero_attn:
            k = F.pad(k, [0, 0, 0, 1])
            v = F.pad(v, [0, 0, 0, 1])
            key_padding_mask, attn_mask = self._pad_masks(key_padding_mask, attn_mask)
        return k, v, key_padding_mask, attn_mask

    def _attend_and_project(
        self,
        inputs: AttentionInputs,
        query: Tensor,
        beams: int = 1,
        before_softmax: bool = False,
        need_weights: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `forward` returns.

        Args:
            inputs: all that a kernel needs; hypotheses that share keys are further queries in it
            query: the argument of `forward`, [Nq, B, embed_dim]
            beams: how many hypotheses share the keys of a sentence
            before_softmax: return scores and values instead
            need_weights: also return the mean of the mixed weights over the heads
            need_head_weights: also return the mixed weights of every head
        """
        if before_softmax:
            scores = masked_scores(inputs) if torch.jit.is_scripting() else exact_scores(inputs)
            scores = scores.transpose(1, 2)  # [B, Nq, H, Nk]
            scores = self._unfold_beams(scores, beams).transpose(1, 2)  # [B, H, Nq, Nk]
            values = inputs.value.repeat_interleave(beams, 0)  # [B, H', Nk, Dv]
            return scores.flatten(0, 1).to(values.dtype), values.flatten(0, 1)

        need_weights = need_weights or need_head_weights
        weights: Tensor | None = None
        if torch.jit.is_scripting():
            out, weights = self.attend_by_definition(inputs)
        else:
            out, weights = self.attend(inputs, self.impl, need_weights)
        # out [B, H', Nq, Dv], weights [B, H', Nq, Nk] or None

        out = self._unfold_beams(out.transpose(1, 2), beams)  # [B, Nq, H', Dv]
        out = self.mix_and_gate_outputs(out, query.transpose(0, 1))
        out = self.out_proj(out.transpose(0, 1).flatten(2))  # [Nq, B, embed_dim]
        if weights is None or not need_weights:  # TorchScript always computes them
            return out, None
        weights = self._unfold_beams(weights.transpose(1, 2), beams)  # [B, Nq, H', Nk]
        if need_head_weights:
            return out, weights.permute(2, 0, 1, 3)
        return out, weights.mean(2)


def _check_input(name: str, size: int | None, embed_dim: int) -> None:
    """Refuse keys or values of another size than the queries, which self-attention cannot have."""
    if size is not None and size != embed_dim:
        raise ValueError(f"{name} {size}: must be embed_dim {embed_dim} in self-attention")
