"""Build the parts of one attention and put them to work; fairseq's, torch's and Hugging Face's
modules share this.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS, RelativeScores
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.normalizers import sink_problem
from mixhead_plugin.parts.head_mixing import MIXING_STARTS
from mixhead_plugin.parts.hooks import Hooked
from mixhead_plugin.parts.kinds import AttentionSizes, PartError, PartKind
from mixhead_plugin.parts.parameters import PARTS
from mixhead_plugin.parts.relative_position import DistanceGain

# The keywords of a variant and their values; the first value is the default.
VARIANT: dict[str, Collection[str]] = {
    "normalizer": NORMALIZERS,
    **PARTS,
    "mixed_features": ("qkv", "qk", "qv", "kv", "q", "k", "v"),
    "mixing_start": MIXING_STARTS,
}


def complete(variant: Mapping[str, str], impl: str = "auto") -> dict[str, str]:
    """Return a variant with the defaults of what it leaves out; refuse an unknown keyword or value
    in one line.
    """
    tables = {**VARIANT, "impl": ("auto", *IMPLEMENTATIONS)}
    for name, value in {**variant, "impl": impl}.items():
        if name not in tables:
            raise ValueError(f"{name}: must be one of {', '.join(VARIANT)}")
        if value not in tables[name]:
            raise ValueError(f"{name} {value!r}: must be one of {', '.join(tables[name])}")
    return {name: variant.get(name, next(iter(table))) for name, table in VARIANT.items()}


def refuse_nothing(asked: Mapping[str, object]) -> None:
    """Raise ValueError without any keyword of a variant;
    plain attention has to be asked for, too.
    """
    if not asked:
        choices = "; ".join(f"{name}: {', '.join(table)}" for name, table in VARIANT.items())
        raise ValueError(f"nothing is asked for; must be at least one of {choices}")


def mixes_projections(variant: Mapping[str, str]) -> bool:
    """Return True if the feature mixing is one of queries, keys or values."""
    return "query" in PARTS["feature_mixing"][variant["feature_mixing"]].parameters


def sizes_of(
    variant: Mapping[str, str],
    num_heads: int,
    head_dim: int,
    embed_dim: int,
    causal: bool = False,
    mixed_heads: int | None = None,
) -> AttentionSizes:
    """Return the sizes of an attention that has `mixed_heads` heads after mixing; None for the
    usual number.

    Raise PartError if parts do not go together, or not with these numbers of heads.
    """
    sink, head_mixing = variant["attention_sink"], variant["head_mixing"]
    if sink != "none" and (problem := sink_problem(variant["normalizer"])):
        raise PartError("attention_sink", sink, problem)
    if variant["mixed_features"] != "qkv" and not mixes_projections(variant):
        problem = "has no effect without feature mixing of heads or shared; must be qkv"
        raise PartError("mixed_features", variant["mixed_features"], problem)
    kind = PARTS["head_mixing"][head_mixing]
    if variant["mixing_start"] != "identity" and not kind.starts:
        mixings = " or ".join(name for name, other in PARTS["head_mixing"].items() if other.starts)
        problem = (
            f"has no effect with head mixing {head_mixing}; must be identity, or the head mixing "
            f"{mixings}"
        )
        raise PartError("mixing_start", variant["mixing_start"], problem)
    if num_heads % kind.group != 0:
        raise PartError(
            "num_heads", num_heads, f"must be a multiple of {kind.group} with {head_mixing} mixing"
        )
    usual = num_heads // kind.group
    if mixed_heads not in (None, usual) and (kind.build is None or kind.uncut):
        raise PartError(
            "num_mixed_heads", mixed_heads, f"must be {usual} with {head_mixing} mixing"
        )
    mixed_heads, value_dim = usual if mixed_heads is None else mixed_heads, head_dim * kind.group
    return AttentionSizes(
        num_heads,
        head_dim,
        mixed_heads,
        value_dim,
        embed_dim,
        causal,
        mixed_features=variant["mixed_features"],
        mixing_start=variant["mixing_start"],
    )


class Assembly(Hooked, nn.Module):
    """A mixin: hold the parts of one attention, each under the name of its option, None where there
    is none.
    """

    # TorchScript would take annotations of parts and projections for its own types
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def add_parts(
        self, variant: Mapping[str, str], sizes: AttentionSizes, relative_gain: int = 0
    ) -> None:
        """Build the parts of a complete `variant`, and the gain of distances up to `relative_gain`
        if it is not 0.
        """
        self.add_hooks()
        self.normalizer = variant["normalizer"]
        self.kinds = {option: variant[option] for option in PARTS}
        # None if nothing mixes queries, keys or values
        self.mixed_features = variant["mixed_features"] if mixes_projections(variant) else None
        for option, table in PARTS.items():
            build = table[variant[option]].build
            # scores have all heads, and L always starts as the identity
            square = sizes._replace(mixed_heads=sizes.num_heads, mixing_start="identity")
            part = None if build is None else build(square if option == "score_mixing" else sizes)
            setattr(self, option, part)
        self.relative_gain = DistanceGain(sizes.num_heads, relative_gain) if relative_gain else None

    def parts(self) -> dict[str, PartKind]:
        """Return the row of each table in PARTS that this attention has, by option."""
        return {option: table[self.kinds[option]] for option, table in PARTS.items()}

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries [..., H * D] of x [..., C], with mixed features."""
        if self.feature_mixing is None:
            return self.q_proj(x)
        if not torch.jit.is_scripting():  # which passes no module to a function
            return self.feature_mixing.project(self.q_proj, x, "query")
        return self.feature_mixing(self.q_proj(x), "query")

    def keys(self, x: Tensor) -> Tensor:
        """Return the keys [..., H * D], likewise."""
        if self.feature_mixing is None:
            return self.k_proj(x)
        if not torch.jit.is_scripting():
            return self.feature_mixing.project(self.k_proj, x, "key")
        return self.feature_mixing(self.k_proj(x), "key")

    def values(self, x: Tensor) -> Tensor:
        """Return the values [..., H' * Dv], likewise."""
        if self.feature_mixing is None:
            return self.v_proj(x)
        if not torch.jit.is_scripting():
            return self.feature_mixing.project(self.v_proj, x, "value")
        return self.feature_mixing(self.v_proj(x), "value")

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
            q, k, v, attn_mask, ..., scale: as in `ops.attention`
            projected: the queries [B, H, Nq, D] that mixings read, before anything was added to
                them
            x: the attention's query input, [B, Nq, C]
        """
        if self.relative_position is not None:
            q, k, relative = self.relative_position(q, k)
        return AttentionInputs(
            query=q,
            key=k,
            value=v,
            mixing=None if self.head_mixing is None else self.head_mixing(projected, x),
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            relative_query=None if relative is None else relative.query,
            relative_key=None if relative is None else relative.key,
            gain=None if self.relative_gain is None else self.relative_gain(q.size(2), k.size(2)),
            sink=None if self.attention_sink is None else self.attention_sink(q),
            score_mixing=None if self.score_mixing is None else self.score_mixing(projected, x),
            normalizer=self.normalizer,
            causal=causal,
            dropout_p=dropout_p,
            scale=scale,
        )

    def gated(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the outputs of heads [B, Nq, H', Dv], mixed and behind gates, for the query input
        x [B, Nq, C].
        """
        if self.feature_mixing is not None:
            out = self.feature_mixing(out, "output")
        if self.attention_gate is not None:
            out = self.attention_gate(out, x)
        return out
