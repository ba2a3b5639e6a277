"""Build the parts of one attention and put them to work.

fairseq's, torch's and Hugging Face's modules share this.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mixhead_plugin.ops import LowRank, RelativeScores
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.parts.hooks import Hooked
from mixhead_plugin.parts.kinds import AttentionSizes, PartKind
from mixhead_plugin.parts.relative_position import DistanceGain
from mixhead_plugin.parts.variant import Variant


def build_part(row: PartKind, variant: Variant, sizes: AttentionSizes) -> nn.Module | None:
    """Return a part of an attention; None for the value `none`.

    It is built with the fields of `variant` that it takes.
    """
    if row.build is None:
        return None
    return row.build(sizes, **{name: getattr(variant, name) for name in row.options})


class UsesParts:
    """A mixin: what the parts of one attention make of a call, wherever the parts lie.

    The class must set `normalizer`, and one attribute for each part: `head_mixing`, `score_mixing`,
    `feature_mixing`, `attention_sink`, `attention_gate`, `relative_position` and `relative_gain`.
    An attribute is None where the attention does not have the part.

    These are methods, and no functions of the parts, because TorchScript cannot pass modules to
    functions.
    """

    # For mypy. TorchScript: annotations of parts would become its types
    # (ops/torchscript.md).
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def inputs_of(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        projected: Tensor,
        x: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        relative: RelativeScores | None = None,
        causal: bool = False,
        dropout_p: float = 0.0,
        scale: float = 1.0,
    ) -> AttentionInputs:
        """Return the inputs of a call of `ops.attention` with what the parts make of it.

        Args:
            q: queries [B, H, Nq, D]
            k: keys [B, H, Nk, D]
            v: values [B, H', Nk, Dv]
            projected: the queries [B, H, Nq, D] that mixings read, before anything was added to
                them
            x: the attention's query input, [B, Nq, C]
            attn_mask: added to the scores, broadcastable to [B, H, Nq, Nk]; None for nothing
            key_padding_mask: bool [B, Nk], True hides a key; None for no padding
            relative: what distances add to the scores; None for nothing. An attention that gives it
                must refuse the part `relative_position`, which makes its own.
            causal: whether query t sees the keys up to t + (Nk - Nq) alone
            dropout_p: the probability of dropping a weight
            scale: factor on the products of queries and keys
        """
        placed_q = q
        placed_k = k
        if self.relative_position is not None:
            assert relative is None, "relative scores are given twice"
            placed_q, placed_k, relative = self.relative_position(q, k)

        mixing: Tensor | None = None
        left: Tensor | None = None
        right: Tensor | None = None
        diagonal: Tensor | None = None
        if self.head_mixing is not None:
            # TorchScript: compiles only the branch that fits the type of what this part returns.
            matrix = self.head_mixing(projected, x)
            if isinstance(matrix, LowRank):
                left = matrix.left
                right = matrix.right
                diagonal = matrix.diagonal
            else:
                mixing = matrix
        score_mixing: Tensor | None = None
        if self.score_mixing is not None:
            score_mixing = self.score_mixing(projected, x)
        sink: Tensor | None = None
        if self.attention_sink is not None:
            sink = self.attention_sink(q)
        gain: Tensor | None = None
        if self.relative_gain is not None:
            gain = self.relative_gain(q.size(2), k.size(2))

        return AttentionInputs(
            query=placed_q,
            key=placed_k,
            value=v,
            mixing=mixing,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            relative_query=None if relative is None else relative.query,
            relative_key=None if relative is None else relative.key,
            gain=gain,
            sink=sink,
            score_mixing=score_mixing,
            mixing_left=left,
            mixing_right=right,
            mixing_diagonal=diagonal,
            normalizer=self.normalizer,
            causal=causal,
            dropout_p=dropout_p,
            scale=scale,
        )

    def mix_and_gate_outputs(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of heads, mixed by `feature_mixing` and behind gates.

        Args:
            out: the outputs of mixed heads, [B, Nq, H', Dv]
            x: the query input, [B, Nq, C]

        Returns:
            [B, Nq, H', Dv]
        """
        if self.feature_mixing is not None:
            out = self.feature_mixing(out, "output")
        if self.attention_gate is not None:
            out = self.attention_gate(out, x)
        return out


class Assembly(UsesParts, Hooked, nn.Module):
    """A mixin: a module that holds the parts of its attention.

    They are those of `UsesParts`, and `add_parts` makes them. The class must also set the
    projections that it uses by one of these methods:

    queries    q_proj, which maps [..., C] to [..., H * D]
    keys       k_proj, likewise
    values     v_proj, which maps [..., C] to [..., H' * Dv]
    """

    # As in UsesParts.
    if TYPE_CHECKING:
        q_proj: Any  # None in an attention that never calls `queries`
        k_proj: nn.Linear
        v_proj: nn.Linear

        def __getattr__(self, name: str) -> Any: ...

    def add_parts(self, variant: Variant, sizes: AttentionSizes) -> None:
        """Build the parts of `variant`; each becomes a child module with the name of its field.

        Args:
            variant: what is asked for
            sizes: what `variant.sizes` returned for this attention
        """
        self.init_hooks()
        self.variant = variant
        # A copy. TorchScript: texts of a module, but not those of a record in it.
        self.normalizer = variant.normalizer
        for name, row in variant.part_kinds().items():
            if name == "score_mixing":
                # All heads have scores, also where fewer mixed heads follow.
                part = build_part(row, variant, sizes._replace(mixed_heads=sizes.num_heads))
            else:
                part = build_part(row, variant, sizes)
            setattr(self, name, part)
        self.relative_gain: DistanceGain | None = None
        if variant.relative_gain > 0:
            self.relative_gain = DistanceGain(sizes.num_heads, variant.relative_gain)

    # One method each, alike but for two names. TorchScript: no attribute by a name in a variable,
    # and no module as an argument of `project` (ops/torchscript.md).

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries [..., H * D] of x [..., C], with mixed features."""
        if self.feature_mixing is None:
            return self.q_proj(x)
        if not torch.jit.is_scripting():
            return self.feature_mixing.project(self.q_proj, x, "query")
        return self.feature_mixing(self.q_proj(x), "query")

    def keys(self, x: Tensor) -> Tensor:
        """Return the keys [..., H * D] of x [..., C], with mixed features."""
        if self.feature_mixing is None:
            return self.k_proj(x)
        if not torch.jit.is_scripting():
            return self.feature_mixing.project(self.k_proj, x, "key")
        return self.feature_mixing(self.k_proj(x), "key")

    def values(self, x: Tensor) -> Tensor:
        """Return the values [..., H' * Dv] of x [..., C], with mixed features."""
        if self.feature_mixing is None:
            return self.v_proj(x)
        if not torch.jit.is_scripting():
            return self.feature_mixing.project(self.v_proj, x, "value")
        return self.feature_mixing(self.v_proj(x), "value")
