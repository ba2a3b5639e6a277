"""Self-attention whose scores come without query-key products (Tay et al. 2020, Synthesizer).

The scores of the query at position t name the keys by their absolute positions, so they exist up to a maximal length.
Normalizers, head mixing and everything behind the scores are those of `MixheadAttention`.
"""

import math
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.head_mixing import PositionWiseMixing
from mixhead_plugin.ops.reference import attention_scores, upcast


class Scores(NamedTuple):
    """The scores query . key + bias, unscaled: the shape of a product is what every `ops.attention` takes."""

    query: Tensor  # [B, H, Nq, D], D as the synthesizer likes
    key: Tensor  # [B, H, Nk, D]
    bias: Optional[Tensor]  # broadcastable to [B, H, Nq, Nk]


class Sizes(NamedTuple):
    """What the parameters of a synthesizer are cut to."""

    num_heads: int
    head_dim: int
    max_length: int  # n, of the input
    own: int  # the size that only this synthesizer has, see `OwnSize`; 0 if it has none


Linear = Callable[[int, int], nn.Module]  # input and output size -> a layer, with quantisation noise if there is any


class TokenNetwork(nn.Module):
    """W2 relu(W1 q + b1), from each token alone: what it gives are the products of `forward` with `output`.

    W1 acts on all heads together, W2 is shared by them. b2 would add nothing that a constant hidden unit does not.
    """

    def __init__(self, sizes: Sizes, outputs: int, linear: Linear):
        super().__init__()
        inner_dim = sizes.num_heads * sizes.head_dim
        self.hidden = linear(inner_dim, inner_dim)
        # each output starts as a vector of length about 1, whatever their number
        self.output = nn.Parameter(torch.randn(outputs, sizes.head_dim) * sizes.head_dim**-0.5)  # [outputs, D]

    def forward(self, query: Tensor) -> Tensor:
        """q [B, H, Nq, D] -> relu(W1 q + b1) [B, H, Nq, D]"""
        batch, heads, n_queries, head_dim = query.size()
        hidden = torch.relu(self.hidden(query.permute(2, 0, 1, 3).flatten(2)))  # [Nq, B, H * D]
        return hidden.view(n_queries, batch, heads, head_dim).permute(1, 2, 0, 3)


class DenseSynthesizer(nn.Module):
    """Scores of all n keys from a two-layer network of the token (Tay et al. 2020, Dense Synthesizer).

    The network reads the projected query, which position-wise mixing reads too. Of its Synthesizer the Mixhead paper
    prints no more than the count of its parameters, 248M; with W1 in the place of the key projection and W2 shared by
    the heads it comes out.
    """

    def __init__(self, sizes: Sizes, linear: Linear):
        super().__init__()
        self.network = TokenNetwork(sizes, sizes.max_length, linear)

    def forward(self, query: Tensor, n_keys: int) -> Scores:
        hidden = self.network(query)  # [B, H, Nq, D]
        key = self.network.output[:n_keys].to(hidden.dtype)
        return Scores(hidden, key.expand(hidden.size(0), hidden.size(1), -1, -1), None)


class FactorizedDenseSynthesizer(nn.Module):
    """Scores A[t, k mod a] B[t, k div a] of two networks of the token (Tay et al. 2020, Factorized Dense).

    The product has no form of queries and keys: it is in memory as a whole, [B, H, Nq, Nk], quadratic in the length.
    """

    def __init__(self, sizes: Sizes, linear: Linear):
        super().__init__()
        self.factor = sizes.own  # a
        self.first = TokenNetwork(sizes, self.factor, linear)
        self.second = TokenNetwork(sizes, math.ceil(sizes.max_length / self.factor), linear)

    def forward(self, query: Tensor, n_keys: int) -> Scores:
        rows = (n_keys + self.factor - 1) // self.factor  # of b that any key needs
        a = upcast(torch.matmul(self.first(query), self.first.output.t()))  # [B, H, Nq, a]
        b = upcast(torch.matmul(self.second(query), self.second.output[:rows].t()))  # [B, H, Nq, rows]
        bias = (b[..., :, None] * a[..., None, :]).flatten(3)[..., :n_keys]  # [B, H, Nq, Nk]
        return _bias_alone(query, n_keys, bias)


class RandomSynthesizer(nn.Module):
    """Scores R[h, t, k] that no token changes, trained or frozen (Tay et al. 2020, Random); normal at the start."""

    def __init__(self, sizes: Sizes, trained: bool):
        super().__init__()
        scores = torch.randn(sizes.num_heads, sizes.max_length, sizes.max_length)  # [H, n, n]
        if trained:
            self.scores = nn.Parameter(scores)
        else:
            self.register_buffer("scores", scores)  # checkpoints keep what acted

    def forward(self, query: Tensor, n_keys: int) -> Scores:
        bias = self.scores[:, n_keys - query.size(2) : n_keys, :n_keys]  # [H, Nq, Nk]
        return _bias_alone(query, n_keys, bias[None])


class FactorizedRandomSynthesizer(nn.Module):
    """Scores R1[h, t] . R2[h, k] (Tay et al. 2020, Factorized Random); of deviation 1 at the start."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        shape = (sizes.num_heads, sizes.max_length, sizes.own)
        self.query = nn.Parameter(torch.randn(shape) * sizes.own**-0.25)  # [H, n, k]
        self.key = nn.Parameter(torch.randn(shape) * sizes.own**-0.25)  # [H, n, k]

    def forward(self, query: Tensor, n_keys: int) -> Scores:
        batch = query.size(0)
        rows = self.query[:, n_keys - query.size(2) : n_keys].to(query.dtype)
        columns = self.key[:, :n_keys].to(query.dtype)
        return Scores(rows.expand(batch, -1, -1, -1), columns.expand(batch, -1, -1, -1), None)


def _bias_alone(query: Tensor, n_keys: int, bias: Tensor) -> Scores:
    """Beside queries and keys whose product is 0"""
    batch, heads, n_queries, _ = query.size()
    return Scores(query.new_zeros(batch, heads, n_queries, 1), query.new_zeros(batch, heads, n_keys, 1), bias)


class OwnSize(NamedTuple):
    """A size that one synthesizer alone has, and its flag."""

    option: str
    default: Callable[[int], int]  # of the maximal length
    default_text: str
    text: str


class SynthesizerKind(NamedTuple):
    """One entry of the flag `--synthesizer`."""

    build: Callable[[Sizes, Linear], nn.Module]  # called with q [B, H, Nq, D] and Nk it returns Scores
    reads_query: bool
    trained_bias: bool  # whether its bias wants a gradient
    formula: str
    source: str
    own_size: Optional[OwnSize] = None


_RANK = OwnSize("synthesizer_rank", lambda length: 8, "8", "rank of each head's scores")
_FACTOR = OwnSize(
    "synthesizer_factor",
    lambda length: math.ceil(length**0.5),
    "the root of the maximal length",
    "a, of which a b is the maximal length",
)

SYNTHESIZERS = {
    "dense": SynthesizerKind(
        DenseSynthesizer, True, False, "(W2 relu(W1 q_t + b1))[k]", "Tay et al. 2020, Dense Synthesizer"
    ),
    "random": SynthesizerKind(
        lambda sizes, linear: RandomSynthesizer(sizes, trained=True),
        False,
        True,
        "R[h, t, k]",
        "Tay et al. 2020, Random Synthesizer",
    ),
    "fixed-random": SynthesizerKind(
        lambda sizes, linear: RandomSynthesizer(sizes, trained=False),
        False,
        False,
        "R[h, t, k], frozen",
        "Tay et al. 2020, Fixed Random",
    ),
    "factorized-dense": SynthesizerKind(
        FactorizedDenseSynthesizer,
        True,
        True,
        "A[t, k mod a] B[t, k div a], A and B as in dense",
        "Tay et al. 2020, Factorized Dense",
        _FACTOR,
    ),
    "factorized-random": SynthesizerKind(
        lambda sizes, linear: FactorizedRandomSynthesizer(sizes),
        False,
        False,
        "R1[h, t] . R2[h, k]",
        "Tay et al. 2020, Factorized Random",
        _RANK,
    ),
}


class SynthesizerAttention(MixheadAttention):
    """Self-attention of a decoder with synthetic scores; called like `MixheadAttention`, but always with one input.

    It has no k_proj, and q_proj only if the synthesizer or the head mixing reads the query: a parameter without a
    gradient would stop torch's DistributedDataParallel. Decoding keeps the values, and no keys.

    Args:
        embed_dim, num_heads, dropout, q_noise, qn_block_size, options: as in `MixheadAttention`
        synthesizer: a key of `SYNTHESIZERS`
        max_length: of the input, with what decoding has cached
        own_size: of a synthesizer that has an `OwnSize`; None for its default
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_length: int,
        synthesizer: str = "dense",
        own_size: Optional[int] = None,
        dropout: float = 0.0,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        **options: Any,
    ):
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            self_attention=True,
            q_noise=q_noise,
            qn_block_size=qn_block_size,
            **options,
        )
        kind = SYNTHESIZERS[synthesizer]
        del self.k_proj
        if not (kind.reads_query or isinstance(self.head_mixing, PositionWiseMixing)):
            self.q_proj = None
        self.synthesizer_kind = synthesizer
        self.max_length = max_length
        self.scaling = 1.0

        def linear(inputs: int, outputs: int) -> nn.Module:
            layer = nn.Linear(inputs, outputs)
            nn.init.xavier_uniform_(layer.weight, gain=2**-0.5)  # as fairseq starts k_proj, in whose place it stands
            return quant_noise(layer, q_noise, qn_block_size)

        if kind.own_size is not None and own_size is None:
            own_size = kind.own_size.default(max_length)
        self.own_size = own_size or 0
        self.synthesizer = kind.build(Sizes(num_heads, self.head_dim, max_length, self.own_size), linear)

    def signature(self) -> Dict[str, Any]:
        size = SYNTHESIZERS[self.synthesizer_kind].own_size
        own = {} if size is None else {size.option: self.own_size}
        kind = {"synthesizer": self.synthesizer_kind}
        return {**kind, **super().signature(), "max_target_positions": self.max_length, **own}

    def upgrade_state_dict_named(self, state_dict: Dict[str, Tensor], name: str) -> None:
        """To a checkpoint without head mixing comes, with the mixing, the query that it alone reads."""
        super().upgrade_state_dict_named(state_dict, name)
        if self.q_proj is not None and not SYNTHESIZERS[self.synthesizer_kind].reads_query:
            for key, value in self.q_proj.state_dict().items():
                state_dict.setdefault(f"{name}.q_proj.{key}", value)

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
        """Attend to `query` itself; `key`, `value` and `static_kv` are there for fairseq's calling convention.

        Args, returns: as in `MixheadAttention.forward`

        Raises:
            OptionError: the input, with what is cached, is longer than `max_length`
        """
        v, key_padding_mask = self._values(query, key_padding_mask, incremental_state)  # [B, H, Nk, D], [B, Nk]
        n_queries, n_keys = query.size(0), v.size(2)
        if n_keys > self.max_length:
            raise OptionError(
                f"--tokens-per-sample: an input has {n_keys} tokens, this --synthesizer scores for {self.max_length}, "
                "as --max-target-positions or --tokens-per-sample was in training; must be at most as many"
            )
        # where nobody reads the query, any tensor of its shape will do
        q = v[:, :, n_keys - n_queries :]  # [B, H, Nq, D]
        if self.q_proj is not None:
            q = self._split_heads(self.q_proj(query))
        mixing: Optional[Tensor] = None
        if self.head_mixing is not None:
            mixing = self.head_mixing(q)  # [H, H] or [B, Nq, H, H]
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.to(torch.bool)  # fairseq keeps them as floats in the cache
        if attn_mask is not None:
            attn_mask = self._as_additive(attn_mask, q)
        scores = self.synthesizer(q, n_keys)
        bias = scores.bias
        if bias is not None:
            attn_mask = bias if attn_mask is None else bias + attn_mask  # [1 or B, H, Nq, Nk]

        if before_softmax:
            mask = self._mask(scores.query, scores.key, attn_mask, key_padding_mask)
            found = attention_scores(scores.query, scores.key, mask, self.scaling)
            return found.flatten(0, 1).to(q.dtype), v.flatten(0, 1)

        dropout_p = 0.0
        if self.training or self.dropout_module.apply_during_inference:
            dropout_p = float(self.dropout_module.p)
        weights: Optional[Tensor] = None
        if torch.jit.is_scripting():
            out, weights = self._attend_by_definition(
                scores.query, scores.key, v, mixing, attn_mask, key_padding_mask, dropout_p
            )
        else:
            need = need_weights or need_head_weights
            out, weights = self._attend(
                scores.query, scores.key, v, mixing, attn_mask, key_padding_mask, dropout_p, need
            )
        # out [B, H, Nq, D], weights [B, H, Nq, Nk] or None

        out = self.out_proj(out.permute(2, 0, 1, 3).flatten(2))  # [Nq, B, embed_dim]
        if weights is None or not (need_weights or need_head_weights):
            return out, None
        if need_head_weights:
            return out, weights.transpose(0, 1)
        return out, weights.mean(1)

    def _values(
        self,
        query: Tensor,
        key_padding_mask: Optional[Tensor],
        incremental_state: Optional[Dict[str, Dict[str, Optional[Tensor]]]],
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """Values [B, H, Nk, D] with those of earlier steps, and their padding mask [B, Nk]."""
        v = self._split_heads(self.v_proj(query))
        if incremental_state is None:
            return v, key_padding_mask
        saved = self._get_input_buffer(incremental_state)
        prev_padding: Optional[Tensor] = None
        if "prev_value" in saved:
            prev_value = saved["prev_value"]
            assert prev_value is not None
            v = torch.cat([prev_value, v], dim=2)
            prev_padding = saved["prev_key_padding_mask"]
        key_padding_mask = self._append_prev_key_padding_mask(
            key_padding_mask, prev_padding, v.size(0), v.size(2), False
        )
        saved["prev_value"] = v
        saved["prev_key_padding_mask"] = key_padding_mask
        self._set_input_buffer(incremental_state, saved)
        return v, key_padding_mask
