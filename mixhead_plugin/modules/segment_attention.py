"""Self-attention of Transformer-XL: over the previous segment too, by distance instead of position."""

from typing import Any

import torch
from torch import Tensor, nn

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.ops.masks import by_head
from mixhead_plugin.ops.relative import RelativeScores


def distance_encodings(length: int, dim: int, clamp: int, like: Tensor) -> Tensor:
    """Return R [length, dim] in the dtype of `like`: sinusoids of the distances length - 1 down to 0.

    All sines come before all cosines, as in the published code of Dai et al. The computation is in float32 or better:
    half precision cannot tell distances above 2048 apart.

    Distances above `clamp` count as `clamp`; 0 or less for none.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    distance = torch.arange(length - 1, -1, -1, dtype=dtype, device=like.device)
    if clamp > 0:
        distance = distance.clamp(max=clamp)
    frequency = 10000 ** (-torch.arange(0, dim, 2, dtype=dtype, device=like.device) / dim)  # [dim / 2]
    angle = distance[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], 1).to(like.dtype)


def segment_mask(n_queries: int, n_keys: int, span: int | None, like: Tensor) -> Tensor:
    """Return the additive mask [n_queries, n_keys] of a segment whose queries are at the last keys.

    Each query sees `span` keys, its own included; None is for all up to its own.
    """
    hidden = like.new_full((n_queries, n_keys), float("-inf"))
    past = n_keys - n_queries
    mask = hidden.triu(past + 1)
    return mask if span is None else mask.add_(hidden.tril(past - span))


class SegmentAttention(MixheadAttention):
    """Multi-head attention with content and position terms (Dai et al. 2019, section 3.3).

    The score of key k for query t is scale * ((q_t + u) . k_k + (q_t + v) . r_{t-k}), with r = position_proj(R). The
    caller gives u and v. Normalization and mixing are those of the base class. Position-wise mixing reads q_t without
    u and v; score mixing acts on the content terms. No projection has a bias. Arguments are those of the base class.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, **options: Any):
        super().__init__(embed_dim, num_heads, dropout=dropout, bias=False, self_attention=True, causal=True, **options)
        self.position_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=False)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        positions: Tensor,
        content_bias: Tensor,
        position_bias: Tensor,
        attn_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
    ) -> Tensor:
        """Attend to the segment and to its memory.

        Args:
            x: the segment, [Nq, B, embed_dim]
            memory: the states before it, [M, B, embed_dim], or None
            positions: R for the distances Nk - 1 to 0, [Nk, embed_dim], Nk = M + Nq. With `incremental_state` its
                length is the most keys that the step sees and the cache keeps.
            content_bias: u, [H, D]
            position_bias: v, [H, D]
            attn_mask: added to the scores, [Nq, Nk]; keys after the query are hidden without it
            incremental_state: the cache of step-by-step decoding, instead of `memory`

        Returns:
            [Nq, B, embed_dim]
        """
        q = self._split_heads(self.queries(x), self.num_heads)  # [B, H, Nq, D]
        source = x if memory is None else torch.cat([memory, x])
        k = self._split_heads(self.keys(source), self.num_heads)  # [B, H, Nk, D]
        v = self._split_heads(self.values(source), self.num_mixed_heads)
        if incremental_state is not None:
            saved = self._get_input_buffer(incremental_state)
            k = self._after_cached(saved, "prev_key", k)[:, :, -positions.size(0) :]
            v = self._after_cached(saved, "prev_value", v)[:, :, -positions.size(0) :]
            self._set_input_buffer(incremental_state, {"prev_key": k, "prev_value": v})
        r = self.position_proj(positions).view(-1, self.num_heads, self.head_dim).transpose(0, 1)  # [H, Nk, D]
        # Autocast lowers the projections but not the parameters u and v. `attention` does not scale relative scores.
        relative = RelativeScores((q + position_bias[:, None].to(q)) * self.scaling, r.to(q))
        content = q + content_bias[:, None].to(q)
        attn_mask = by_head(attn_mask, self.num_heads, q.dtype)
        inputs = self.inputs_of(
            content, k, v, q, x.transpose(0, 1), attn_mask=attn_mask, relative=relative, causal=True,
            dropout_p=self.dropout_p(), scale=self.scaling,
        )  # fmt: skip
        return self._output(inputs, x)[0]

    def cached(self, incremental_state: dict[str, dict[str, Tensor | None]]) -> int:
        """Return how many keys earlier steps have cached."""
        key = self._get_input_buffer(incremental_state).get("prev_key")
        return 0 if key is None else key.size(2)
