"""Define what a variant adds to an attention: mixings, sinks, gates and relative positions.

All of it needs torch alone.

`Variant` is what is asked of one attention, `PARTS` has the tables of the parts, and `Assembly`
builds the parts and puts them to work. In a module that is not ours, `HostedAttention` does.
"""

from mixhead_plugin.parts.assembly import Assembly, build_part
from mixhead_plugin.parts.effect import first_part_with_effect
from mixhead_plugin.parts.half_precision import keep_float32, warn_of_half_precision
from mixhead_plugin.parts.hosted import HostedAttention, place_parts, remove_parts
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, PartError, PartKind
from mixhead_plugin.parts.parameters import (
    entries_of_heads,
    is_of_a_part,
    mixing_parameters,
    name_in_attention,
    parameter_groups,
    part_of,
)
from mixhead_plugin.parts.tables import MIXINGS, PART_NAMES, PARTS
from mixhead_plugin.parts.variant import OPTIONS, Option, Variant, check_any_given, check_keywords

__all__ = [
    "MIXINGS",
    "OPTIONS",
    "PARTS",
    "PART_NAMES",
    "Assembly",
    "AttentionSizes",
    "Axis",
    "HostedAttention",
    "Option",
    "PartError",
    "PartKind",
    "Variant",
    "build_part",
    "check_any_given",
    "check_keywords",
    "entries_of_heads",
    "first_part_with_effect",
    "is_of_a_part",
    "keep_float32",
    "mixing_parameters",
    "name_in_attention",
    "parameter_groups",
    "part_of",
    "place_parts",
    "remove_parts",
    "warn_of_half_precision",
]
