"""Attention, layers and decoder of Transformer-XL (Dai et al. 2019), with a memory."""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import FairseqDecoder, FairseqIncrementalDecoder
from fairseq.modules import FairseqDropout, LayerNorm
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.models.transformer_xl.adaptive import (
    AdaptiveEmbedding,
    Band,
    BandedAdaptiveSoftmax,
)
from mixhead_plugin.fairseq.models.transformer_xl.segment_memory import SegmentMemory
from mixhead_plugin.fairseq.relative import refuse_relative_position
from mixhead_plugin.ops.masks import as_added_mask
from mixhead_plugin.ops.precision import upcast
from mixhead_plugin.ops.relative import RelativeScores


def distance_encodings(length: int, dim: int, clamp: int, like: Tensor) -> Tensor:
    """Return R [length, dim], the sinusoids of the distances length - 1 down to 0.

    All sines come before all cosines, as in the published code of Dai et al. The computation is in
    float32 or better, because half precision cannot tell distances above 2048 apart.

    Args:
        length: the number of keys
        dim: the number of sines and cosines, even
        clamp: larger distances count as this one; 0 or less for all distances as they are
        like: a tensor with the dtype and device of the result
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    distance = torch.arange(length - 1, -1, -1, dtype=dtype, device=like.device)
    if clamp > 0:
        distance = distance.clamp(max=clamp)
    exponent = torch.arange(0, dim, 2, dtype=dtype, device=like.device) / dim  # [dim / 2]
    frequency = 10000 ** (-exponent)
    angle = distance[:, None] * frequency  # [length, dim / 2]
    return torch.cat([angle.sin(), angle.cos()], 1).to(like.dtype)


def span_mask(n_queries: int, n_keys: int, span: int | None, like: Tensor) -> Tensor | None:
    """Return an additive mask [n_queries, n_keys], in which each query sees `span` keys.

    The last one is the query's own. Later keys are not hidden here. For a `span` of None, all are
    seen, and the mask is None.

        span 2, three queries after a memory of two     -inf  0    0    0    0
                                                        -inf -inf  0    0    0
                                                        -inf -inf -inf  0    0
    """
    if span is None:
        return None
    return like.new_full((n_queries, n_keys), float("-inf")).tril(n_keys - n_queries - span)


class SegmentAttention(MixheadAttention):
    """Multi-head attention with content and position terms (Dai et al. 2019, section 3.3).

    The score of key k for query t is

        scale * ((q_t + u) . k_k + (q_t + v) . r_{t-k}),   r = position_proj(R)

    The caller gives u and v. Normalization and mixing are those of the base class. Position-wise
    mixing reads q_t without u and v; score mixing acts on the content terms. No projection has a
    bias.

    Args:
        embed_dim: size of inputs and outputs
        num_heads: H, the number of source heads
        dropout: probability of dropping a weight
        options: further arguments of `MixheadAttention`

    Raises:
        ValueError: an argument that cannot work, such as a relative_position
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, **options: Any):
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=False,
            self_attention=True,
            causal=True,
            **options,
        )
        refuse_relative_position(self.variant, ", Transformer-XL has its own")
        self.position_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias=False)

    def forward(  # type: ignore[override]  # only TransformerXLLayer calls it
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
            positions: R for the distances Nk - 1 to 0, [Nk, embed_dim], Nk = M + Nq. With
                `incremental_state` its length is the most keys that the step sees and the cache
                keeps.
            content_bias: u, which is added to the queries of content terms, [H, D]
            position_bias: v, which is added to the queries of position terms, [H, D]
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
            k = self._append_to_cache(saved, "prev_key", k)[:, :, -positions.size(0) :]
            v = self._append_to_cache(saved, "prev_value", v)[:, :, -positions.size(0) :]
            self._set_input_buffer(incremental_state, {"prev_key": k, "prev_value": v})
        r = self.position_proj(positions).view(-1, self.num_heads, self.head_dim)  # [Nk, H, D]
        # Autocast lowers the projections, but not the parameters u and v.
        content = q + content_bias[:, None].to(q)
        by_position = q + position_bias[:, None].to(q)
        # `attention` scales the products of queries and keys, but no relative scores.
        relative = RelativeScores(by_position * self.scaling, r.transpose(0, 1).to(q))
        attn_mask = as_added_mask(attn_mask, self.num_heads, q.dtype)
        inputs = self.inputs_of(
            content,
            k,
            v,
            projected=q,
            x=x.transpose(0, 1),
            attn_mask=attn_mask,
            relative=relative,
            causal=True,
            dropout_p=self.dropout_p(),
            scale=self.scaling,
        )
        return self._attend_and_project(inputs, x)[0]

    def cached(self, incremental_state: dict[str, dict[str, Tensor | None]]) -> int:
        """Return how many keys earlier steps have cached."""
        key = self._get_input_buffer(incremental_state).get("prev_key")
        return 0 if key is None else key.size(2)


class TransformerXLLayer(nn.Module):
    """Attention and feed-forward block, each with a residual connection and a norm after it.

    Args:
        cfg: the config of the model, complete and checked
    """

    def __init__(self, cfg: Any):
        super().__init__()
        self.self_attn = SegmentAttention(
            cfg.d_model,
            cfg.n_head,
            dropout=cfg.dropatt,
            **cfg.attention_arguments("decoder-self"),
        )
        self.self_attn_layer_norm = LayerNorm(cfg.d_model)
        self.fc1 = nn.Linear(cfg.d_model, cfg.d_inner)
        self.fc2 = nn.Linear(cfg.d_inner, cfg.d_model)
        self.final_layer_norm = LayerNorm(cfg.d_model)
        self.dropout_module = FairseqDropout(cfg.dropout, module_name=type(self).__name__)

    def forward(self, x: Tensor, **attention: Any) -> Tensor:
        """Return [Nq, B, C].

        Args:
            x: the input of the layer, [Nq, B, C]
            attention: the other arguments of `SegmentAttention.forward`
        """
        attended = self.self_attn(x, **attention)
        x = self.self_attn_layer_norm(x + self.dropout_module(attended))
        inner = self.dropout_module(F.relu(self.fc1(x)))  # [Nq, B, d_inner]
        return self.final_layer_norm(x + self.dropout_module(self.fc2(inner)))


class MixheadTransformerXLDecoder(FairseqIncrementalDecoder):
    """Embeddings, layers and adaptive softmax; all layers share the two biases of the attention.

    Args:
        cfg: the config of the model, complete and checked
        dictionary: fairseq's dictionary of the words
        cutoffs: where each band of the vocabulary ends, see `AdaptiveEmbedding`
    """

    def __init__(self, cfg: Any, dictionary: Any, cutoffs: list[int]):
        super().__init__(dictionary)
        self.mem_len = cfg.mem_len
        self.clamp_len = cfg.clamp_len
        self.max_target_positions = cfg.max_target_positions
        # How many positions a token sees; None for all.
        self.span = cfg.mem_len if cfg.same_length else None
        self.embed_tokens = AdaptiveEmbedding(cutoffs, cfg.d_model, cfg.div_val)
        # --retain-dropout-modules looks for the name of fairseq's class.
        self.dropout_module = FairseqDropout(cfg.dropout, module_name="TransformerXLDecoder")
        # u and v of term (d) in section 3.3
        self.content_bias = nn.Parameter(torch.empty(cfg.n_head, cfg.head_dim))
        self.position_bias = nn.Parameter(torch.empty(cfg.n_head, cfg.head_dim))
        self.layers = nn.ModuleList()
        for _ in range(cfg.n_layer):
            layer = TransformerXLLayer(cfg)
            if cfg.checkpoint_activations or cfg.offload_activations:
                layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
            self.layers.append(layer)
        self.adaptive_softmax = BandedAdaptiveSoftmax(self.embed_tokens)
        self.memory = SegmentMemory(cfg.mem_len, cfg.max_target_positions)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as the published code; the head mixing keeps its own initialisation."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.01 if "projection" in name else 0.02)
                bias = getattr(module, "bias", None)
                if bias is not None:
                    nn.init.zeros_(bias)
            elif isinstance(module, Band) and module.cluster_weight is not None:
                nn.init.normal_(module.cluster_weight, std=0.02)
            elif name.endswith("layer_norm"):
                nn.init.normal_(module.weight, mean=1.0, std=0.02)
        for bias in (self.content_bias, self.position_bias):
            nn.init.normal_(bias, std=0.02)
        for module in self.modules():
            if isinstance(module, SegmentAttention):
                module.scale_values()

    # It calls `extract_features` and `output_layer`; that of the base class raises.
    forward = FairseqDecoder.forward

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        src_lengths: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        window: int | None = None,
        encoder_out: None = None,
    ) -> tuple[Tensor, None]:
        """Return the input of the adaptive softmax, [B, N, d_model] in float32 or better, and None.

        Args:
            prev_output_tokens: [B, N], with padding on the right only
            src_lengths: not used; fairseq passes them
            incremental_state: the cache of step-by-step decoding, which reads the last token and no
                memory
            window: the number of this window in its text, see `SegmentMemory`; None continues from
                the last call
            encoder_out: not used; fairseq's search passes one
        """
        if incremental_state is not None:
            prev_output_tokens = prev_output_tokens[:, -1:]
        x = self.dropout_module(self.embed_tokens(prev_output_tokens)).transpose(0, 1)  # [N, B, C]
        states_before: list[Tensor] = []  # [M, B, C] for each layer; empty without a memory
        mask: Tensor | None = None
        if incremental_state is None:
            states_before = self.memory.recall(window, x)
            n_keys = x.size(0)
            if states_before:
                n_keys += states_before[0].size(0)
            mask = span_mask(x.size(0), n_keys, self.span, x)
        else:
            first: Any = self.layers[0]  # each layer has cached as many keys
            n_keys = min(1 + first.self_attn.cached(incremental_state), self._most_keys())
        positions = distance_encodings(n_keys, x.size(2), self.clamp_len, x)  # [Nk, C]
        positions = self.dropout_module(positions)

        inputs = []
        for i, layer in enumerate(self.layers):
            inputs.append(x)
            x = layer(
                x,
                memory=states_before[i] if states_before else None,
                positions=positions,
                content_bias=self.content_bias,
                position_bias=self.position_bias,
                attn_mask=mask,
                incremental_state=incremental_state,
            )
        if incremental_state is None:
            self.memory.keep(window, states_before, inputs)
        x = self.dropout_module(x).transpose(0, 1)  # [B, N, C]
        # fairseq sums the adaptive loss in this dtype, and float16 ends at 65504.
        return upcast(x), None

    def _most_keys(self) -> int:
        """Return how many positions a token sees at most in step-by-step decoding.

        They are as many as the last token of a window sees in training.
        """
        if self.span is not None:
            return self.span
        return self.mem_len + self.max_target_positions

    def output_layer(self, features: Tensor, **kwargs: Any) -> Tensor:
        """Return `features`: criterion, scorer and search call `adaptive_softmax` themselves."""
        return features

    def max_positions(self) -> int:
        return 10**9  # positions are distances: no text is too long
