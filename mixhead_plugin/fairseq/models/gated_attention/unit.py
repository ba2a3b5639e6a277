"""The gated attention unit, as a layer of fairseq's encoder and of its decoder.

Hua et al. 2022, 'Transformer Quality in Linear Time'.

B sentences, N positions, Nk keys; d is the size of the model, e = expansion * d, and s is the size
of queries and keys.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.modules import FairseqDropout, LayerNorm
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from mixhead_plugin.fairseq.padding import as_bool
from mixhead_plugin.fairseq.record import Recorded, record_of
from mixhead_plugin.fairseq.shared_methods import SharedMethods
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.ops.masks import as_added_mask
from mixhead_plugin.parts import Assembly


class Affine(nn.Module):
    """Scale and shift each feature: x * gamma + beta. It starts as the identity.

    `weight` is gamma [size], `bias` is beta [size], as in torch's normalisations.
    """

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        # Autocast lowers the linear maps before this one, but not these two parameters.
        return x * self.weight.to(x.dtype) + self.bias.to(x.dtype)


class GatedAttentionUnit(Recorded, Assembly, SharedMethods, FairseqIncrementalState, nn.Module):
    """One layer in place of an attention or of a feed-forward block.

        h = norm(x)
        Z = swish(h W_z),  Q = Z * gamma_q + beta_q,  K = Z * gamma_k + beta_k      [N, s]
        U = swish(h W_u),  V = swish(h W_v)                                         [N, e]
        A = normalizer(Q K^T / sqrt(s)), with rotary positions
        x + dropout((U * (dropout(A) V)) W_o)

    Its linear maps have no bias. Q = K at the start, so a position sees itself more than others,
    and A starts near the identity.

    Args:
        cfg: the nested config of fairseq's Transformer, with `gau_expansion`, `gau_query_dim` and
            the flags of `AttentionOptions`
        embed_dim: d, the size of the model
        causal: whether queries only see earlier keys; the caller's mask hides the others
    """

    def __init__(self, cfg: Any, embed_dim: int, causal: bool):
        super().__init__()
        # As ints of Python: the record of a checkpoint takes no numbers of NumPy.
        embed_dim = int(embed_dim)
        self.embed_dim = embed_dim
        self.query_dim = int(cfg.gau_query_dim)
        self.inner_dim = int(cfg.gau_expansion) * embed_dim
        self.scaling = self.query_dim**-0.5
        self.value_init_scale = cfg.value_init_scale

        self.layer_norm = LayerNorm(embed_dim, export=cfg.export)
        self.shared_proj = self._linear(cfg, embed_dim, self.query_dim)  # W_z
        self.query_affine = Affine(self.query_dim)
        self.key_affine = Affine(self.query_dim)
        self.gate_proj = self._linear(cfg, embed_dim, self.inner_dim)  # W_u
        self.v_proj = self._linear(cfg, embed_dim, self.inner_dim)
        self.out_proj = self._linear(cfg, self.inner_dim, embed_dim)  # W_o

        variant = replace(
            cfg.variant("decoder-self" if causal else "encoder-self"),
            relative_position="rotary",
            head_dim=self.query_dim,
            value_head_dim=self.inner_dim,
        )
        self.impl = variant.impl  # each call reads it here, so it may be changed
        self.add_parts(variant, variant.sizes(1, embed_dim, causal=causal))
        # TorchScript: no entry of a table by a name in a variable (ops/torchscript.md).
        self.normalize = NORMALIZERS[self.normalizer].weights

        # The name is for --retain-dropout-modules.
        module_name = GatedAttentionUnit.__name__
        self.dropout_module = FairseqDropout(cfg.attention_dropout, module_name)  # of A
        self.output_dropout_module = FairseqDropout(cfg.dropout, module_name)
        self.reset_parameters()

    @staticmethod
    def _linear(cfg: Any, inputs: int, outputs: int) -> Any:
        noise = cfg.quant_noise
        return quant_noise(nn.Linear(inputs, outputs, bias=False), noise.pq, noise.pq_block_size)

    def reset_parameters(self) -> None:
        """Initialise the linear maps and gamma and beta.

        Weights are drawn as fairseq draws those of its Transformer. Call this again after another
        initialisation: with that of BERT, deviation 0.02, queries and keys of a small model are so
        short that A starts near uniform, and not near the identity.
        """
        for linear in (self.shared_proj, self.gate_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(linear.weight)
        self.query_affine.reset_parameters()
        self.key_affine.reset_parameters()
        self.scale_values()

    def record(self) -> dict[str, Any]:
        """Return the flags that a checkpoint must share with this unit, with their values."""
        return {
            **record_of(self.variant),
            "gau_query_dim": self.query_dim,
            "gau_expansion": self.inner_dim // self.embed_dim,
        }

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Do nothing; fairseq's encoder calls this on each of its layers."""

    def forward_unit(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None,
    ) -> Tensor:
        """Return the output of the unit.

        Args:
            x: the input of the unit, [N, B, d]
            attn_mask: added to the scores, [N, Nk]; None for nothing
            key_padding_mask: [B, N], non-zero hides a key; None for no padding
            incremental_state: the cache of step-by-step decoding; None for a full pass

        Returns:
            [N, B, d]
        """
        h = self.layer_norm(x)
        z = F.silu(self.shared_proj(h))  # [N, B, s]
        u = F.silu(self.gate_proj(h))  # [N, B, e]
        q = self._one_head(self.query_affine(z))  # [B, 1, N, s]
        k = self._one_head(self.key_affine(z))  # [B, 1, N, s]
        v = self._one_head(F.silu(self.v_proj(h)))  # [B, 1, N, e]
        key_padding_mask = as_bool(key_padding_mask)
        if incremental_state is not None:
            k, v, key_padding_mask = self._after_cached(k, v, key_padding_mask, incremental_state)

        inputs = self.inputs_of(
            q,
            k,
            v,
            projected=q,
            x=h.transpose(0, 1),
            attn_mask=as_added_mask(attn_mask, 1, q.dtype),
            key_padding_mask=key_padding_mask,
            dropout_p=self.dropout_p(),
            scale=self.scaling,
        )
        if torch.jit.is_scripting():
            out = self.attend_by_definition(inputs)[0]
        else:
            out = self.attend(inputs, self.impl, need_weights=False)[0]
        out = out[:, 0].transpose(0, 1)  # [N, B, e]
        return x + self.output_dropout_module(self.out_proj(u * out))

    def _one_head(self, x: Tensor) -> Tensor:
        """Return [B, 1, N, C] from [N, B, C]."""
        return x.transpose(0, 1)[:, None]

    # ---- step-by-step decoding -----------------------------------------------------------------

    def _after_cached(
        self,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        incremental_state: dict[str, dict[str, Tensor | None]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys, values and padding mask with those of earlier steps first, and cache them.

        Keys are cached before they are rotated.

        Args:
            k: the keys of this step, [B, 1, N, s]
            v: the values of this step, [B, 1, N, e]
            key_padding_mask: the padding of this step, bool [B, N]; None for no padding
            incremental_state: the cache of step-by-step decoding

        Returns:
            [B, 1, Nk, s], [B, 1, Nk, e] and [B, Nk]
        """
        if key_padding_mask is None:
            key_padding_mask = torch.zeros(k.size(0), k.size(2), dtype=torch.bool, device=k.device)
        saved = self.get_incremental_state(incremental_state, "attn_state")
        if saved is not None:
            before_k = saved["prev_key"]
            before_v = saved["prev_value"]
            before_mask = saved["prev_key_padding_mask"]
            assert before_k is not None and before_v is not None and before_mask is not None
            k = torch.cat([before_k, k], dim=2)
            v = torch.cat([before_v, v], dim=2)
            key_padding_mask = torch.cat([before_mask, key_padding_mask], dim=1)
        # TorchScript: the type, because a dictionary of fairseq's cache may hold None.
        state: dict[str, Tensor | None] = {
            "prev_key": k,
            "prev_value": v,
            "prev_key_padding_mask": key_padding_mask,
        }
        self.set_incremental_state(incremental_state, "attn_state", state)
        return k, v, key_padding_mask

    @torch.jit.export
    def reorder_incremental_state(
        self,
        incremental_state: dict[str, dict[str, Tensor | None]] | None,
        new_order: Tensor,
    ) -> dict[str, dict[str, Tensor | None]] | None:
        """Let row i of the cache continue row `new_order[i]`, [B], as beam search chooses."""
        saved = self.get_incremental_state(incremental_state, "attn_state")
        if saved is None:
            return incremental_state
        for name in list(saved.keys()):
            rows = saved[name]
            if rows is not None:
                saved[name] = rows.index_select(0, new_order)
        return self.set_incremental_state(incremental_state, "attn_state", saved)


class GatedEncoderLayer(GatedAttentionUnit):
    """A unit with the call of fairseq's encoder layer."""

    # The arguments after cfg are those of `MixheadEncoderLayer`; a unit has no use for them.
    def __init__(self, cfg: Any, return_fc: bool = False, layer: int = 0):
        super().__init__(cfg, cfg.encoder.embed_dim, causal=False)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None) -> Tensor:
        """Return [N, B, d] for x [N, B, d] and a padding mask [B, N] or None."""
        return self.forward_unit(x, None, encoder_padding_mask, None)


class GatedDecoderLayer(GatedAttentionUnit):
    """A unit with the call of fairseq's decoder layer, for a decoder without an encoder."""

    # The arguments after cfg are those of `MixheadDecoderLayer`; a unit has no use for them.
    def __init__(self, cfg: Any, no_encoder_attn: bool = True, layer: int = 0):
        super().__init__(cfg, cfg.decoder.embed_dim, causal=True)

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        prev_self_attn_state: list[Tensor] | None = None,
        prev_attn_state: list[Tensor] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, list[Tensor | None] | None]:
        """Return [N, B, d] for x [N, B, d], and twice None.

        fairseq's decoder layer returns the weights of encoder-decoder attention there, which this
        one does not have.
        """
        out = self.forward_unit(x, self_attn_mask, self_attn_padding_mask, incremental_state)
        return out, None, None
