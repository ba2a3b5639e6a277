"""List the tables of the parts that flags add to an attention, by the option that chooses among each table's rows."""

from typing import Dict, Mapping, Optional

from torch import nn

from mixhead_plugin.modules.gate import ATTENTION_GATES
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS, SCORE_MIXINGS
from mixhead_plugin.modules.heads import AttentionSizes
from mixhead_plugin.modules.relative_position import RELATIVE_POSITIONS
from mixhead_plugin.modules.sink import ATTENTION_SINKS
from mixhead_plugin.ops import NORMALIZERS

# `MixheadAttention` builds them in this order, each as the child module of its option's name.
PARTS = {
    "head_mixing": HEAD_MIXINGS,
    "score_mixing": SCORE_MIXINGS,
    "attention_sink": ATTENTION_SINKS,
    "attention_gate": ATTENTION_GATES,
    "relative_position": RELATIVE_POSITIONS,
}


def sizes_of(
    head_mixing: str, num_heads: int, head_dim: int, embed_dim: int, causal: bool = False, mixed: Optional[int] = None
) -> AttentionSizes:
    """Return the sizes of an attention that has `mixed` heads after mixing; raise ValueError if it cannot have them."""
    kind = HEAD_MIXINGS[head_mixing]
    if num_heads % kind.group != 0:
        raise ValueError(f"num_heads {num_heads}: must be a multiple of {kind.group} with {head_mixing} mixing")
    usual = num_heads // kind.group
    if mixed not in (None, usual) and (kind.build is None or kind.uncut):
        raise ValueError(f"num_mixed_heads {mixed}: must be {usual} with {head_mixing} mixing")
    mixed = usual if mixed is None else mixed
    return AttentionSizes(num_heads, head_dim, mixed, head_dim * kind.group, embed_dim, causal)


def build_parts(chosen: Mapping[str, str], normalizer: str, sizes: AttentionSizes) -> Dict[str, Optional[nn.Module]]:
    """Return the part that each option of PARTS adds, None for `none`; raise ValueError for a sink without a place."""
    if chosen["attention_sink"] != "none" and not NORMALIZERS[normalizer].takes_sink:
        raise ValueError(f"attention_sink {chosen['attention_sink']}: must be none with the normalizer {normalizer}")
    parts: Dict[str, Optional[nn.Module]] = {}
    for option, table in PARTS.items():
        build = table[chosen[option]].build
        square = sizes._replace(mixed_heads=sizes.num_heads)  # scores have all heads
        parts[option] = None if build is None else build(square if option == "score_mixing" else sizes)
    return parts
