"""Compute self-attention without query-key products (Tay et al. 2020, Synthesizer).

Each score belongs to a key's absolute position, so inputs have a maximal length. The rest is
`MixheadAttention`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.padding import as_bool
from mixhead_plugin.fairseq.record import OWN_FLAGS, OwnFlag
from mixhead_plugin.fairseq.relative import refuse_relative_position
from mixhead_plugin.ops.masks import as_added_mask
from mixhead_plugin.ops.precision import upcast
from mixhead_plugin.parts import PartError
from mixhead_plugin.parts.variant import whole_number


class SyntheticScores(NamedTuple):
    """The unscaled scores query . key + bias, in the form that `ops.attention` takes."""

    query: Tensor  # [B, H, Nq, D], D chosen by the synthesizer
    key: Tensor  # [B, H, Nk, D]
    bias: Tensor | None  # broadcastable to [B, H, Nq, Nk]


class SynthesizerSizes(NamedTuple):
    """The sizes of an attention that its synthesizer needs."""

    num_heads: int
    head_dim: int
    max_length: int  # n, the largest number of tokens in an input
    rank_or_factor: int  # k of factorized-random, a of factorized-dense; 0 for the others


def _draw(tensor: Tensor, deviation: float) -> None:
    """Fill a parameter or a buffer with normal numbers of mean 0."""
    with torch.no_grad():
        tensor.copy_(torch.randn(tensor.shape) * deviation)


class TokenNetwork(nn.Module):
    """Compute W2 relu(W1 q + b1), scores by a network of the token; all heads share W2.

    `forward` gives relu(W1 q + b1), so that a kernel can multiply it by W2, which is `output`.
    `scores` gives the scores themselves.

    Args:
        sizes: the sizes of the attention
        outputs: the number of scores for each query, which are the rows of W2
    """

    def __init__(self, sizes: SynthesizerSizes, outputs: int):
        super().__init__()
        inner_dim = sizes.num_heads * sizes.head_dim
        self.hidden = nn.Linear(inner_dim, inner_dim)
        self.output = nn.Parameter(torch.empty(outputs, sizes.head_dim))  # [outputs, D]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw both weights; the bias of `hidden` is that of `nn.Linear`."""
        # as fairseq starts k_proj, which it replaces
        nn.init.xavier_uniform_(self.hidden.weight, gain=2**-0.5)
        # each row starts with a length of about 1
        _draw(self.output, self.output.size(1) ** -0.5)

    def forward(self, query: Tensor) -> Tensor:
        """Map q [B, H, Nq, D] to relu(W1 q + b1) [B, H, Nq, D]."""
        batch, heads, n_queries, head_dim = query.size()
        hidden = torch.relu(self.hidden(query.permute(2, 0, 1, 3).flatten(2)))  # [Nq, B, H * D]
        return hidden.view(n_queries, batch, heads, head_dim).permute(1, 2, 0, 3)

    def scores(self, query: Tensor, number: int) -> Tensor:
        """Return the first `number` scores of q [B, H, Nq, D], in float32 or better.

        Returns:
            [B, H, Nq, number]
        """
        return upcast(torch.matmul(self(query), self.output[:number].t()))


class DenseSynthesizer(nn.Module):
    """Compute the scores of all n keys from the query (Tay et al. 2020, Dense Synthesizer).

    W1 replaces the key projection, and all heads share W2: this gives the 248M parameters of the
    Mixhead paper.
    """

    def __init__(self, sizes: SynthesizerSizes):
        super().__init__()
        self.network = TokenNetwork(sizes, sizes.max_length)

    def forward(self, query: Tensor, n_keys: int) -> SyntheticScores:
        hidden = self.network(query)  # [B, H, Nq, D]
        key = self.network.output[:n_keys].to(hidden.dtype)
        return SyntheticScores(hidden, key.expand(hidden.size(0), hidden.size(1), -1, -1), None)


class FactorizedDenseSynthesizer(nn.Module):
    """Compute scores A[t, k mod a] B[t, k div a] by two networks of the token t.

    Tay et al. 2020, Factorized Dense: a factor of 3 gives key 0 the outputs A0 B0, key 1 A1 B0, key
    2 A2 B0, key 3 A0 B1, and so on.

    The scores are not a product of queries and keys, so memory holds all of them, [B, H, Nq, Nk].
    """

    def __init__(self, sizes: SynthesizerSizes):
        super().__init__()
        self.factor = sizes.rank_or_factor  # a
        self.first = TokenNetwork(sizes, self.factor)
        self.second = TokenNetwork(sizes, math.ceil(sizes.max_length / self.factor))

    def forward(self, query: Tensor, n_keys: int) -> SyntheticScores:
        rows = (n_keys + self.factor - 1) // self.factor  # how many outputs of B the keys need
        a = self.first.scores(query, self.factor)  # [B, H, Nq, a]
        b = self.second.scores(query, rows)  # [B, H, Nq, rows]
        scores = (b[..., :, None] * a[..., None, :]).flatten(3)  # [B, H, Nq, rows * a]
        return _bias_alone(query, n_keys, scores[..., :n_keys])


class RandomSynthesizer(nn.Module):
    """Give the same scores R[h, t, k] to all inputs; they are drawn from a normal distribution.

    Tay et al. 2020, Random and Fixed Random.

    Fixed scores are a buffer, so that checkpoints keep them.
    """

    def __init__(self, sizes: SynthesizerSizes, trained: bool):
        super().__init__()
        scores = torch.empty(sizes.num_heads, sizes.max_length, sizes.max_length)  # [H, n, n]
        self.scores = nn.Parameter(scores) if trained else nn.Buffer(scores)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _draw(self.scores, 1.0)

    def forward(self, query: Tensor, n_keys: int) -> SyntheticScores:
        first = n_keys - query.size(2)  # the position of the first query
        return _bias_alone(query, n_keys, self.scores[None, :, first:n_keys, :n_keys])


class FactorizedRandomSynthesizer(nn.Module):
    """Give the same scores R1[h, t] . R2[h, k] to all inputs (Tay et al. 2020, Factorized Random).

    At first their deviation is 1.
    """

    def __init__(self, sizes: SynthesizerSizes):
        super().__init__()
        shape = (sizes.num_heads, sizes.max_length, sizes.rank_or_factor)
        self.query = nn.Parameter(torch.empty(shape))  # [H, n, k]
        self.key = nn.Parameter(torch.empty(shape))  # [H, n, k]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Products of k pairs with deviations s have the deviation sqrt(k) s^2, here 1.
        deviation = self.query.size(2) ** -0.25
        _draw(self.query, deviation)
        _draw(self.key, deviation)

    def forward(self, query: Tensor, n_keys: int) -> SyntheticScores:
        batch = query.size(0)
        first = n_keys - query.size(2)  # the position of the first query
        rows = self.query[:, first:n_keys].to(query.dtype)
        columns = self.key[:, :n_keys].to(query.dtype)
        return SyntheticScores(
            rows.expand(batch, -1, -1, -1), columns.expand(batch, -1, -1, -1), None
        )


def _bias_alone(query: Tensor, n_keys: int, bias: Tensor) -> SyntheticScores:
    """Return `bias` beside queries and keys whose product is 0."""
    batch, heads, n_queries, _ = query.size()
    return SyntheticScores(
        query.new_zeros(batch, heads, n_queries, 1),
        query.new_zeros(batch, heads, n_keys, 1),
        bias,
    )


class SynthesizerKind(NamedTuple):
    """Describe one value of the flag --synthesizer."""

    # Returns a module that maps q [B, H, Nq, D] and Nk to SyntheticScores.
    build: Callable[[SynthesizerSizes], nn.Module]
    parameters: tuple[str, ...]  # the modules or tensors of which it consists
    reads_query: bool = False
    trained_bias: bool = False  # whether its bias needs a gradient
    multiplies: bool = False  # whether its scores are products of queries and keys
    # The option of its rank or factor; None if it has neither.
    size_option: str | None = None
    # Returns the default of this size for a maximal length.
    default_size: Callable[[int], int] = lambda length: 0


SYNTHESIZERS = {
    "dense": SynthesizerKind(DenseSynthesizer, ("network",), reads_query=True, multiplies=True),
    "random": SynthesizerKind(
        partial(RandomSynthesizer, trained=True), ("scores",), trained_bias=True
    ),
    "fixed-random": SynthesizerKind(partial(RandomSynthesizer, trained=False), ("scores",)),
    "factorized-dense": SynthesizerKind(
        FactorizedDenseSynthesizer,
        ("first", "second"),
        reads_query=True,
        trained_bias=True,
        size_option="synthesizer_factor",
        default_size=lambda length: math.ceil(length**0.5),
    ),
    "factorized-random": SynthesizerKind(
        FactorizedRandomSynthesizer,
        ("query", "key"),
        multiplies=True,
        size_option="synthesizer_rank",
        default_size=lambda length: 8,
    ),
}
OWN_FLAGS["synthesizer"] = OwnFlag(
    SYNTHESIZERS,
    to_be_without="an architecture *_transformer_lm",
    to_be_with="an architecture *_synthesizer_lm with this flag",
)


def row_of(synthesizer: Any) -> SynthesizerKind:
    """Return the row of a synthesizer; raise PartError for a name that the table does not have."""
    # A tuple, because a YAML file may hold a list here, which no dictionary looks up.
    names = tuple(SYNTHESIZERS)
    if synthesizer not in names:
        problem = f"must be one of {', '.join(names)}"
        raise PartError.of("synthesizer", synthesizer, problem, shown=repr(synthesizer))
    return SYNTHESIZERS[synthesizer]


def refuse_in_synthesizer(
    synthesizer: str, rank_or_factor: int | None, max_length: int, asked: Any
) -> None:
    """Refuse sizes that cannot work, and parts that read what a synthesizer does not have.

    Args:
        synthesizer: a key of `SYNTHESIZERS`
        rank_or_factor: the rank or the factor; None for the default, or for neither
        max_length: n, the largest number of tokens in an input
        asked: a `Variant` or the flags of a model; both have the fields that are read here

    Raises:
        PartError: in the words of Python; `checks.part_errors_as_option_errors` names the flag
    """
    row = row_of(synthesizer)
    whole_number("max_length", max_length, least=1)
    if rank_or_factor is not None:
        if row.size_option is None:
            problem = f"must be None, the synthesizer {synthesizer} has neither"
            raise PartError.of("rank_or_factor", rank_or_factor, problem)
        whole_number("rank_or_factor", rank_or_factor, least=1)
        if row.size_option == "synthesizer_factor" and rank_or_factor > max_length:
            problem = f"must be at most the length, {max_length}"
            raise PartError.of("rank_or_factor", rank_or_factor, problem)

    refuse_relative_position(asked, ", the scores are absolute")
    if asked.feature_mixing in ("heads", "shared") and asked.mixed_features != "v":
        raise PartError.of(
            "feature_mixing",
            asked.feature_mixing,
            "must be none or output, or the mixed features v; a Synthesizer has no queries and "
            "keys to mix",
        )
    if asked.score_mixing != "none" and not row.multiplies:
        others = ", ".join(name for name, other in SYNTHESIZERS.items() if other.multiplies)
        raise PartError.of(
            "score_mixing",
            asked.score_mixing,
            f"must be none, or the synthesizer one of {others}, whose products it can mix",
        )


class SynthesizerAttention(MixheadAttention):
    """Compute self-attention of a decoder with synthetic scores; called like `MixheadAttention`.

    It has no k_proj, and has q_proj only if the synthesizer or the head mixing reads the query:
    DistributedDataParallel refuses parameters without a gradient. The cache of decoding has values
    but no keys.

    Args:
        embed_dim: size of inputs and outputs
        num_heads: number of source heads
        options: further arguments of `MixheadAttention`
        max_length: n, the largest number of tokens in an input, cached ones included
        synthesizer: a key of `SYNTHESIZERS`
        rank_or_factor: the rank of factorized-random or the factor of factorized-dense; None for
            the default, and for the other synthesizers

    Raises:
        ValueError: an argument that cannot work, in one line that begins with its name
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        max_length: int,
        synthesizer: str = "dense",
        rank_or_factor: int | None = None,
        **options: Any,
    ):
        super().__init__(embed_dim, num_heads, self_attention=True, **options)
        refuse_in_synthesizer(synthesizer, rank_or_factor, max_length, self.variant)
        row = row_of(synthesizer)

        # Only now, when all four projections have been drawn: so the same seed gives those that
        # stay the numbers that it gives them in any other attention.
        del self.k_proj
        mixing_reads_query = any(
            part.reads == "query" for part in self.variant.part_kinds().values()
        )
        if not (row.reads_query or mixing_reads_query):
            self.q_proj = None
        self.synthesizer_name = synthesizer
        # As ints of Python: the record of a checkpoint takes no numbers of NumPy.
        self.max_length = int(max_length)
        self.scaling = 1.0
        if rank_or_factor is None:
            rank_or_factor = row.default_size(self.max_length)
        self.rank_or_factor = int(rank_or_factor)
        self.synthesizer = row.build(
            SynthesizerSizes(self.num_heads, self.head_dim, self.max_length, self.rank_or_factor)
        )
        for module in self.synthesizer.modules():
            if isinstance(module, nn.Linear):
                quant_noise(module, options.get("q_noise", 0.0), options.get("qn_block_size", 8))

    def reset_parameters(self) -> None:
        """Draw the projections as `MixheadAttention` does; the synthesizer draws its own weights.

        `MixheadAttention.__init__` calls it, too, while there still is a k_proj.
        """
        if hasattr(self, "k_proj"):
            super().reset_parameters()
            return
        for projection in (self.v_proj, self.q_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        self.scale_values()

    def record(self) -> dict[str, Any]:
        record = super().record()
        record["synthesizer"] = self.synthesizer_name
        record["max_target_positions"] = self.max_length
        size_option = SYNTHESIZERS[self.synthesizer_name].size_option
        if size_option is not None:
            record[size_option] = self.rank_or_factor
        return record

    def upgrade_state_dict_named(self, state_dict: dict[str, Tensor], name: str) -> None:
        """Give a checkpoint without head mixing the query projection that only a mixing reads."""
        super().upgrade_state_dict_named(state_dict, name)
        if self.q_proj is not None and not SYNTHESIZERS[self.synthesizer_name].reads_query:
            for key, value in self.q_proj.state_dict().items():
                state_dict.setdefault(f"{name}.q_proj.{key}", value)

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
        """Attend from `query` to itself, with the call and the result of `MixheadAttention`.

        `key`, `value` and `static_kv` are ignored.

        Raises:
            OptionError: the input, cached tokens included, is longer than `max_length`
        """
        v = self._split_heads(self.values(query), self.num_mixed_heads)
        if incremental_state is not None:
            saved = self._get_input_buffer(incremental_state)
            v = self._append_to_cache(saved, "prev_value", v)  # [B, H', Nk, Dv]
            key_padding_mask = self._append_padding(saved, key_padding_mask, v, static_kv=False)
            self._set_input_buffer(incremental_state, saved)
        n_keys = v.size(2)
        if n_keys > self.max_length:
            raise OptionError(
                f"--tokens-per-sample: an input has {n_keys} tokens, this --synthesizer has scores "
                f"for {self.max_length} (its length in training); must be at most that"
            )
        # [B, H, Nq, D]; only its shape matters if nothing reads it
        q = v.new_zeros(query.size(1), self.num_heads, query.size(0), self.head_dim)
        if self.q_proj is not None:
            q = self._split_heads(self.queries(query), self.num_heads)
        scores = self.synthesizer(q, n_keys)
        attn_mask = as_added_mask(attn_mask, self.num_heads, q.dtype)
        bias = scores.bias
        if bias is not None:
            attn_mask = bias if attn_mask is None else bias + attn_mask  # [1 or B, H, Nq, Nk]
        inputs = self.inputs_of(
            scores.query,
            scores.key,
            v,
            projected=q,
            x=query.transpose(0, 1),
            attn_mask=attn_mask,
            key_padding_mask=as_bool(key_padding_mask),
            dropout_p=self.dropout_p(),
            scale=self.scaling,
        )
        return self._attend_and_project(
            inputs,
            query,
            beams=1,
            before_softmax=before_softmax,
            need_weights=need_weights,
            need_head_weights=need_head_weights,
        )
