"""Self-attention of Transformer-XL: over the segment before as well, by distance instead of place."""

from typing import Any, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.ops.relative import RelativeScores


def distance_encodings(length: int, dim: int, clamp: int, like: Tensor) -> Tensor:
    """R, [length, dim] in the dtype of `like`: the sinusoids of the distances length - 1 down to 0.

    All sines come before all cosines, as in the published code of Dai et al. Computed in float32 or better: half
    precision cannot tell distances above 2048 apart.

    Args:
        clamp: distances beyond it count as this one; 0 or less for none
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    distance = torch.arange(length - 1, -1, -1, dtype=dtype, device=like.device)
    if clamp > 0:
        distance = distance.clamp(max=clamp)
    frequency = 10000 ** (-torch.arange(0, dim, 2, dtype=dtype, device=like.device) / dim)  # [dim / 2]
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], 1).to(like.dtype)


def segment_mask(n_queries: int, n_keys: int, span: Optional[int], like: Tensor) -> Tensor:
    """What a segment's queries, which stand at the last keys, may see: 0 or -inf, [n_queries, n_keys].

    Args:
        span: how many keys each query sees, itself among them; None for all up to itself
    """
    hidden = like.new_full((n_queries, n_keys), float("-inf"))
    past = n_keys - n_queries
    mask = hidden.triu(past + 1)
    return mask if span is None else mask.add_(hidden.tril(past - span))


class SegmentAttention(MixheadAttention):
    """Multi-head attention with content and position terms (Dai et al. 2019, section 3.3).

    The score of key k for query t is scale * ((q_t + u) . k_k + (q_t + v) . r_{t-k}), with u and v given by the caller
    and r = position_proj(R); what normalizes and mixes the heads is that of the base class. Position-wise mixing reads
    q_t itself. No projection has a bias.

    Args:
        embed_dim: size of the states
        num_heads: number of heads
        dropout: of the attention weights
        options: `normalizer`, `head_mixing`, `head_dim`, `impl`, `value_init_scale` and `relative_gain` of the base
            class
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, **options: Any):
        super().__init__(embed_dim, num_heads, dropout=dropout, bias=False, self_attention=True, causal=True, **options)
        self.position_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=False)

    def forward(
        self,
        x: Tensor,
        memory: Optional[Tensor],
        positions: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        attn_mask: Optional[Tensor] = None,
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]] = None,
    ) -> Tensor:
        """Attend to what comes before the segment and to the segment.

        Args:
            x: the segment, [Nq, B, embed_dim]
            memory: what comes before it, [M, B, embed_dim], or None
            positions: R for the distances Nk - 1 to 0, [Nk, embed_dim]; with `incremental_state` its length limits
                how many keys the step sees and the cache holds, else Nk = M + Nq
            content_bias: u, [H, D]
            position_bias: v, [H, D]
            attn_mask: added to the scores, [Nq, Nk]; -inf hides a key, beside those that come after the query
            incremental_state: keys and values of earlier steps, instead of `memory`

        Returns:
            [Nq, B, embed_dim]
        """
        q = self._split_heads(self.q_proj(x))  # [B, H, Nq, D]
        source = x if memory is None else torch.cat([memory, x])
        k = self._split_heads(self.k_proj(source))  # [B, H, Nk, D]
        v = self._split_heads(self.v_proj(source))
        if incremental_state is not None:
            k, v = self._with_cached(k, v, positions.size(0), incremental_state)
        r = self.position_proj(positions).view(-1, self.num_heads, self.head_dim).transpose(0, 1)  # [H, Nk, D]
        # Parameters stay float32 under autocast, the projections do not; nothing scales the relative scores but this.
        relative = RelativeScores((q + position_bias[:, None].to(q)) * self.scaling, r.to(q))
        mixing = None if self.head_mixing is None else self.head_mixing(q)  # [H, H] or [B, Nq, H, H]
        acts = self.training or self.dropout_module.apply_during_inference
        out, _ = self._attend(
            q + content_bias[:, None].to(q),
            k,
            v,
            mixing,
            None if attn_mask is None else self._as_additive(attn_mask, q),
            None,
            float(self.dropout_module.p) if acts else 0.0,
            False,
            relative,
            causal=True,
        )
        return self.out_proj(out.transpose(1, 2).flatten(2).transpose(0, 1))  # [Nq, B, embed_dim]

    def cached(self, incremental_state: Dict[str, Dict[str, Optional[Tensor]]]) -> int:
        """How many keys earlier steps have left"""
        key = self._get_input_buffer(incremental_state).get("prev_key")
        return 0 if key is None else key.size(2)

    def _with_cached(
        self, k: Tensor, v: Tensor, limit: int, incremental_state: Dict[str, Dict[str, Optional[Tensor]]]
    ) -> Tuple[Tensor, Tensor]:
        """Keys and values [B, H, Nk, D] behind those of earlier steps, the last `limit` of them"""
        saved = self._get_input_buffer(incremental_state)
        if "prev_key" in saved:
            k = torch.cat([saved["prev_key"], k], 2)[:, :, -limit:]
            v = torch.cat([saved["prev_value"], v], 2)[:, :, -limit:]
        # base class names: it reorders them with the beams
        self._set_input_buffer(incremental_state, {"prev_key": k, "prev_value": v})
        return k, v
