"""fairseq's multi-head attention with a choice of normalizer, mixed heads and a free head size."""

from functools import partial
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.relative_position import RELATIVE_POSITIONS, DistanceGain
from mixhead_plugin.ops import NORMALIZERS, attention
from mixhead_plugin.ops.masks import additive_mask
from mixhead_plugin.ops.reference import attention_scores, mix_heads, upcast
from mixhead_plugin.ops.relative import RelativeScores, toeplitz


class Heads(NamedTuple):
    """What the heads of one attention did in one pass."""

    mixing: Optional[Tensor]  # M [H, H'] or [B, Nq, H, H']
    weights: Callable[[], Tensor]  # computes P [B, H, Nq, Nk], before mixing and dropout, in float32 or better


class HeadGates(NamedTuple):
    """Factors on what the heads of one attention give, for all sentences or, [B, ...], for each; None for 1."""

    source: Optional[Tensor] = None  # on the weights P_j where heads mix, [H] or [B, H]
    mixed: Optional[Tensor] = None  # on the outputs O_i, [H'] or [B, H']

    def on_sources(self, mixing: Optional[Tensor]) -> Optional[Tensor]:
        """M [H, H'] or [B, Nq, H, H'] with the gates of its source heads"""
        if self.source is None:
            return mixing
        if mixing is None:
            raise ValueError("gates on source heads where heads do not mix: a gate on the outputs is the same")
        gates = self.source[..., None]  # [H, 1] or [B, H, 1]
        if gates.dim() == 2:
            return mixing * gates
        return mixing * gates[:, None]  # [B, Nq or 1, H, H']

    def on_output(self, out: Tensor) -> Tensor:
        """O [B, H', Nq, D] with the gates of its heads"""
        return out if self.mixed is None else out * self.mixed[..., None, None]


class MixheadAttention(MultiheadAttention):
    """A drop-in for fairseq's `MultiheadAttention`: same call, buffers, parameter names and random initialisation.

    The same computation (mixhead eqs 8-12) runs in training, validation, step-by-step decoding and TorchScript.

    Args:
        embed_dim, ..., qn_block_size: as in fairseq
        normalizer: a key of `NORMALIZERS`
        head_mixing: a key of `HEAD_MIXINGS`
        head_dim: size of one head, of queries, keys and values alike; None for embed_dim / num_heads
        impl: which implementation of `ops.attention` computes it
        value_init_scale: factor on the initial weights of v_proj and out_proj
        num_mixed_heads: how many heads the mixing makes, of which each has values and a part of out_proj; None for
            num_heads, and without mixing nothing else
        relative_position: a key of `RELATIVE_POSITIONS`, for self-attention
        relative_gain: where the distances of the `DistanceGain` end, for self-attention; 0 for none
        causal: whether queries see earlier keys alone, which relative positions need to know
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: Optional[int] = None,
        vdim: Optional[int] = None,
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
        normalizer: str = "softmax",
        head_mixing: str = "none",
        head_dim: Optional[int] = None,
        impl: str = "auto",
        value_init_scale: float = 1.0,
        num_mixed_heads: Optional[int] = None,
        relative_position: str = "none",
        relative_gain: int = 0,
        causal: bool = False,
    ):
        # MultiheadAttention.__init__ insists on head_dim * num_heads == embed_dim, so its parent's is called instead.
        super(MultiheadAttention, self).__init__(dictionary)
        if head_dim is None and embed_dim % num_heads != 0:
            raise ValueError(f"num_heads {num_heads} does not divide embed_dim {embed_dim}: give a head_dim")
        self.embed_dim = embed_dim
        self.kdim = kdim if kdim is not None else embed_dim
        self.vdim = vdim if vdim is not None else embed_dim
        self.qkv_same_dim = self.kdim == embed_dim and self.vdim == embed_dim
        if self_attention and not self.qkv_same_dim:
            raise ValueError(f"self_attention needs kdim {kdim} and vdim {vdim} to equal embed_dim {embed_dim}")

        self.num_heads = num_heads
        self.num_mixed_heads = num_heads if num_mixed_heads is None else num_mixed_heads
        if head_mixing == "none" and self.num_mixed_heads != num_heads:
            raise ValueError(f"num_mixed_heads {num_mixed_heads}: without mixing there are num_heads {num_heads}")
        self.head_dim = head_dim if head_dim is not None else embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.self_attention = self_attention
        self.encoder_decoder_attention = encoder_decoder_attention
        # --retain-dropout-modules must find it under the stock name
        self.dropout_module = FairseqDropout(dropout, module_name=MultiheadAttention.__name__)

        # In fairseq's order: the same seed gives the same projections as the stock module.
        inner_dim, mixed_dim = num_heads * self.head_dim, self.num_mixed_heads * self.head_dim
        self.k_proj = quant_noise(nn.Linear(self.kdim, inner_dim, bias=bias), q_noise, qn_block_size)
        self.v_proj = quant_noise(nn.Linear(self.vdim, mixed_dim, bias=bias), q_noise, qn_block_size)
        self.q_proj = quant_noise(nn.Linear(embed_dim, inner_dim, bias=bias), q_noise, qn_block_size)
        self.out_proj = quant_noise(nn.Linear(mixed_dim, embed_dim, bias=bias), q_noise, qn_block_size)
        self.bias_k = nn.Parameter(torch.empty(1, 1, inner_dim)) if add_bias_kv else None
        self.bias_v = nn.Parameter(torch.empty(1, 1, mixed_dim)) if add_bias_kv else None
        self.add_zero_attn = add_zero_attn
        self.beam_size = 1
        self.reset_parameters()
        self.value_init_scale = value_init_scale
        self.scale_values()

        self.normalizer = normalizer
        self.normalize = NORMALIZERS[normalizer].weights
        self.head_mixing_kind = head_mixing
        build_mixing = HEAD_MIXINGS[head_mixing].build
        self.head_mixing = (
            None if build_mixing is None else build_mixing(num_heads, self.head_dim, self.num_mixed_heads)
        )
        self.relative_position_kind = relative_position
        build_position = RELATIVE_POSITIONS[relative_position].build
        constant_keys = add_bias_kv or add_zero_attn
        if (build_position or relative_gain) and (encoder_decoder_attention or constant_keys):
            raise ValueError("relative positions are for self-attention without constant keys, which have no place")
        self.relative_position = None if build_position is None else build_position(num_heads, self.head_dim, causal)
        self.relative_gain = DistanceGain(num_heads, relative_gain) if relative_gain else None
        self.impl = impl
        # For who wants to see or change what heads do, in training, evaluation and decoding, but not in TorchScript:
        self.gates: Optional[HeadGates] = None
        # called with the attention, its output [B, H, Nq, D] and its heads; returns the output
        self.hook: Optional[Callable[[MixheadAttention, Tensor, Heads], Tensor]] = None

        # Attributes of the stock module that code outside of it reads or sets.
        self.use_xformers = False
        self.onnx_trace = False
        self.skip_embed_dim_check = False

    def scale_values(self) -> None:
        """Shrink the initial W_V and W_O (l2 essay); to be called again after another initialisation like BERT's."""
        with torch.no_grad():
            self.v_proj.weight.mul_(self.value_init_scale)
            self.out_proj.weight.mul_(self.value_init_scale)

    def signature(self) -> Dict[str, Any]:
        """What a checkpoint must agree on with this module, by the flag that decides it."""
        return {
            "attention_normalizer": self.normalizer,
            "head_mixing": self.head_mixing_kind,
            "attention_heads": self.num_heads,
            "head_dim": self.head_dim,
            "mixed_heads": self.num_mixed_heads,
            "relative_position": self.relative_position_kind,
            "relative_gain": 0 if self.relative_gain is None else self.relative_gain.clip,
        }

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # Two normalizers have the same parameters: the metadata beside them tells a checkpoint of one from the other's.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata[prefix[:-1]].update(self.signature())

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor],
        value: Optional[Tensor],
        key_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Optional[Tensor] = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Attend, with fairseq's calling convention.

        Args:
            query: [Nq, B, embed_dim]
            key: [Nk, B, kdim]; may be None when `static_kv` finds it in the cache
            value: [Nk, B, vdim], likewise
            key_padding_mask: [B, Nk], non-zero hides a key
            incremental_state: the cache of step-by-step decoding
            need_weights: also return the mixed weights, averaged over the heads
            static_kv: keys and values of the first step serve all the others (encoder-decoder attention)
            attn_mask: [Nq, Nk] or [B * H, Nq, Nk]; floats are added to the scores, non-zeros of other types hide
            before_softmax: return the masked scores [B * H, Nq, Nk] and the values [B * H, Nk, D] instead
            need_head_weights: also return the mixed weights of every head

        Returns:
            output [Nq, B, embed_dim] and weights: None, [B, Nq, Nk], or [H, B, Nq, Nk] with `need_head_weights`
        """
        _, batch, embed_dim = query.size()
        if not self.skip_embed_dim_check:
            assert embed_dim == self.embed_dim, f"query dim {embed_dim} != {self.embed_dim}"

        q = self._split_heads(self.q_proj(query))  # [B, H, Nq, D]
        k, v, key_padding_mask = self._keys_and_values(
            query, key, value, key_padding_mask, incremental_state, static_kv
        )
        if self.bias_k is not None or self.add_zero_attn:
            k, v, key_padding_mask, attn_mask = self._append_constant_keys(k, v, key_padding_mask, attn_mask)
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.to(torch.bool)  # fairseq keeps them as floats in the cache
        if attn_mask is not None:
            attn_mask = self._as_additive(attn_mask, q)
        mixing: Optional[Tensor] = None
        if self.head_mixing is not None:
            mixing = self.head_mixing(q)  # [H, H] or [B, Nq, H, H]

        relative: Optional[RelativeScores] = None
        if self.relative_position is not None:
            q, k, relative = self.relative_position(q, k)

        beams = batch // k.size(0)
        if beams > 1:
            # Hypotheses of one sentence share its keys: to the attention they are further queries.
            q = self._fold_beams(q.transpose(1, 2), beams).transpose(1, 2)  # [B, H, beams * Nq, D]
            if mixing is not None and mixing.dim() == 4:
                mixing = self._fold_beams(mixing, beams)  # [B, beams * Nq, H, H]
            if attn_mask is not None:
                attn_mask = attn_mask.repeat(1, 1, beams, 1)

        if before_softmax:
            mask = self._mask(q, k, attn_mask, key_padding_mask)
            scores = attention_scores(q, k, mask, self.scaling, relative)
            return scores.flatten(0, 1).to(q.dtype), v.flatten(0, 1)

        dropout_p = 0.0
        if self.training or self.dropout_module.apply_during_inference:
            dropout_p = float(self.dropout_module.p)
        weights: Optional[Tensor] = None
        if torch.jit.is_scripting():
            out, weights = self._attend_by_definition(q, k, v, mixing, attn_mask, key_padding_mask, dropout_p, relative)
        else:
            out, weights = self._attend(
                q, k, v, mixing, attn_mask, key_padding_mask, dropout_p, need_weights or need_head_weights, relative
            )
        # out [B, H', Nq, D], weights [B, H', Nq, Nk] or None

        out = self._unfold_beams(out.transpose(1, 2), beams)  # [B, Nq, H', D]
        out = self.out_proj(out.flatten(2).transpose(0, 1))  # [Nq, B, embed_dim]
        if weights is None or not (need_weights or need_head_weights):
            return out, None
        weights = self._unfold_beams(weights.transpose(1, 2), beams)  # [B, Nq, H', Nk]
        if need_head_weights:
            return out, weights.permute(2, 0, 1, 3)
        return out, weights.mean(2)

    @torch.jit.export
    def reorder_incremental_state(
        self, incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]], new_order: Tensor
    ) -> Optional[Dict[str, Dict[str, Optional[Tensor]]]]:
        """Let row i of the cache go on from row `new_order[i]`, [B], as beam search chooses.

        A cache with one row per sentence stays as it is while hypotheses keep to their sentences, as they do in beam
        search. Every other order is followed too (fairseq's encoder-decoder attention ignores a permutation).
        """
        if incremental_state is None:
            return incremental_state
        saved = self._get_input_buffer(incremental_state)
        prev_beams = saved.get("prev_beams")
        if prev_beams is not None:
            sentences, beams = prev_beams.size(0), prev_beams.size(1)
            order = new_order // beams
            whole = order.size(0) % beams == 0
            if whole:
                groups = order.view(-1, beams)
                whole = bool((groups == groups[:, :1]).all())
            if whole:
                new_order = order[::beams]
                if torch.equal(new_order, torch.arange(sentences, device=new_order.device)):
                    return incremental_state
            else:  # equal sentences that were no beams, and part now
                saved["prev_beams"] = None
                for name in list(saved.keys()):
                    rows = saved[name]
                    if rows is not None:
                        saved[name] = rows.repeat_interleave(beams, 0)
        for name in list(saved.keys()):
            rows = saved[name]
            if rows is not None:
                saved[name] = rows.index_select(0, new_order)
        return self._set_input_buffer(incremental_state, saved)

    @torch.jit.unused
    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mixing: Optional[Tensor],
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        dropout_p: float,
        need_weights: bool,
        relative: Optional[RelativeScores] = None,
        causal: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        weights: Optional[Tensor] = None
        if self.gates is not None:
            mixing = self.gates.on_sources(mixing)
            if mixing is not None and mixing.dim() == 4:
                mixing = mixing.expand(-1, q.size(2), -1, -1)  # [B, Nq, H, H]
        if need_weights:
            with torch.autocast(q.device.type, enabled=False):  # the definition is float32 under --amp too
                out, weights = self._attend_by_definition(
                    q, k, v, mixing, attn_mask, key_padding_mask, dropout_p, relative, causal
                )
        else:
            out = attention(
                q,
                k,
                v,
                normalizer=self.normalizer,
                mixing=mixing,
                causal=causal,
                attn_mask=attn_mask,
                key_padding_mask=key_padding_mask,
                relative=relative,
                gain=self._gain(q, k),
                dropout_p=dropout_p,
                scale=self.scaling,
                impl=self.impl,
            )
        if self.gates is not None:
            out = self.gates.on_output(out)
        if self.hook is not None:
            out = self.hook(
                self, out, Heads(mixing, partial(self._weights, q, k, attn_mask, key_padding_mask, relative, causal))
            )
        return out, weights

    def _attend_by_definition(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mixing: Optional[Tensor],
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        dropout_p: float,
        relative: Optional[RelativeScores] = None,
        causal: bool = False,
    ) -> Tuple[Tensor, Tensor]:
        """The reference's steps one by one, for whom needs the weights or a graph that TorchScript understands."""
        weights = mix_heads(
            self._weights(q, k, attn_mask, key_padding_mask, relative, causal), mixing
        )  # [B, H, Nq, Nk]
        out = torch.matmul(F.dropout(weights, dropout_p), upcast(v))  # [B, H, Nq, D]
        return out.to(v.dtype), weights

    def _weights(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        relative: Optional[RelativeScores] = None,
        causal: bool = False,
    ) -> Tensor:
        """P [B, H, Nq, Nk], the weights before mixing and dropout, with the gains of their distances."""
        mask = self._mask(q, k, attn_mask, key_padding_mask, causal)
        weights = self.normalize(attention_scores(q, k, mask, self.scaling, relative))
        gain = self._gain(q, k)
        return weights if gain is None else weights * toeplitz(upcast(gain), q.size(2), k.size(2))

    def _gain(self, q: Tensor, k: Tensor) -> Optional[Tensor]:
        """Factors on the weights by distance, [H, Nq + Nk - 1]"""
        if self.relative_gain is None:
            return None
        return self.relative_gain(q.size(2), k.size(2))

    def _mask(
        self,
        q: Tensor,
        k: Tensor,
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        causal: bool = False,
    ) -> Optional[Tensor]:
        dtype = upcast(q).dtype
        return additive_mask(causal, attn_mask, key_padding_mask, q.size(2), k.size(2), q.device, dtype)

    def _keys_and_values(
        self,
        query: Tensor,
        key: Optional[Tensor],
        value: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]],
        static_kv: bool,
    ) -> Tuple[Tensor, Tensor, Optional[Tensor]]:
        """Keys and values [B, H, Nk, D] with what the cache holds of earlier steps, and their padding mask [B, Nk]."""
        k: Optional[Tensor] = None
        v: Optional[Tensor] = None
        saved: Dict[str, Optional[Tensor]] = {}
        if incremental_state is not None:
            saved = self._get_input_buffer(incremental_state)
        cached = "prev_key" in saved

        if self.self_attention:
            key = query
            value = query
        if not (cached and static_kv):
            assert key is not None and value is not None, "keys and values are neither given nor cached"
            if incremental_state is not None and self._comes_in_beams(query, key, value, key_padding_mask):
                # Every sentence is there once for each of its hypotheses; one copy of it is enough.
                key = key[:, :: self.beam_size]
                value = value[:, :: self.beam_size]
                if key_padding_mask is not None:
                    key_padding_mask = key_padding_mask[:: self.beam_size]
                # Says so by its shape: the cache takes nothing but tensors with a row for each sentence.
                saved["prev_beams"] = key.new_empty(key.size(1), self.beam_size, 0)
            k = self._split_heads(self.k_proj(key))
            v = self._split_heads(self.v_proj(value))

        if incremental_state is not None:
            if cached:
                prev_key, prev_value = saved["prev_key"], saved["prev_value"]
                assert prev_key is not None and prev_value is not None
                k = prev_key if k is None else torch.cat([prev_key, k], dim=2)
                v = prev_value if v is None else torch.cat([prev_value, v], dim=2)
            assert k is not None and v is not None
            prev_padding: Optional[Tensor] = None
            if "prev_key_padding_mask" in saved:
                prev_padding = saved["prev_key_padding_mask"]
            key_padding_mask = self._append_prev_key_padding_mask(
                key_padding_mask, prev_padding, k.size(0), k.size(2), static_kv
            )
            saved["prev_key"] = k
            saved["prev_value"] = v
            saved["prev_key_padding_mask"] = key_padding_mask
            self._set_input_buffer(incremental_state, saved)
        assert k is not None and v is not None
        return k, v, key_padding_mask

    def _comes_in_beams(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Optional[Tensor]) -> bool:
        """Whether [N, B * beams, ...] holds every sentence `beam_size` times in a row.

        It is looked at, not assumed: the beam size of an earlier search outlives it.
        """
        beams = self.beam_size
        if not self.encoder_decoder_attention or beams == 1 or query.size(1) != key.size(1) or key.size(1) % beams != 0:
            return False
        for rows in (key, value):
            rows = rows.unflatten(1, [-1, beams])  # [Nk, B, beams, kdim]
            if not bool((rows == rows[:, :, :1]).all()):
                return False
        if key_padding_mask is None:
            return True
        padding = key_padding_mask.unflatten(0, [-1, beams])  # [B, beams, Nk]
        return bool((padding == padding[:, :1]).all())

    def _append_constant_keys(
        self, k: Tensor, v: Tensor, key_padding_mask: Optional[Tensor], attn_mask: Optional[Tensor]
    ) -> Tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
        """The learned and the zero key, always visible and never cached."""
        batch = k.size(0)
        bias_k, bias_v = self.bias_k, self.bias_v
        if bias_k is not None and bias_v is not None:
            k = torch.cat([k, self._split_heads(bias_k.expand(1, batch, -1)).to(k.dtype)], dim=2)
            v = torch.cat([v, self._split_heads(bias_v.expand(1, batch, -1)).to(v.dtype)], dim=2)
            key_padding_mask, attn_mask = self._pad_masks(key_padding_mask, attn_mask)
        if self.add_zero_attn:
            k = F.pad(k, [0, 0, 0, 1])
            v = F.pad(v, [0, 0, 0, 1])
            key_padding_mask, attn_mask = self._pad_masks(key_padding_mask, attn_mask)
        return k, v, key_padding_mask, attn_mask

    def _as_additive(self, attn_mask: Tensor, q: Tensor) -> Tensor:
        """[Nq, Nk] or [B * H, Nq, Nk] of any type -> floats broadcastable to [B, H, Nq, Nk]."""
        if not attn_mask.is_floating_point():
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(attn_mask.to(torch.bool), float("-inf"))
        if attn_mask.dim() == 3:
            return attn_mask.view(q.size(0), self.num_heads, attn_mask.size(1), attn_mask.size(2))
        return attn_mask[None, None]

    def _split_heads(self, x: Tensor) -> Tensor:
        """[N, B, H * D] -> [B, H, N, D]"""
        return x.view(x.size(0), x.size(1), -1, self.head_dim).permute(1, 2, 0, 3)

    def _fold_beams(self, x: Tensor, beams: int) -> Tensor:
        """[B * beams, Nq, ...] -> [B, beams * Nq, ...]"""
        return x.unflatten(0, [-1, beams]).flatten(1, 2)

    def _unfold_beams(self, x: Tensor, beams: int) -> Tensor:
        """[B, beams * Nq, ...] -> [B * beams, Nq, ...]"""
        return x.unflatten(1, [beams, -1]).flatten(0, 1)
