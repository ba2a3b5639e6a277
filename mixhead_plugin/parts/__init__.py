"""Define what flags add to an attention: mixings, sinks, gates and relative positions; needs torch alone."""

from mixhead_plugin.parts.assembly import VARIANT, Assembly, check_parts, complete, refuse_nothing, sizes_of
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, PartError, PartKind
from mixhead_plugin.parts.parameters import cut, effective, mixing_parameters, parameter_groups
from mixhead_plugin.parts.table import MIXINGS, PARTS

__all__ = [
    "MIXINGS",
    "PARTS",
    "VARIANT",
    "Assembly",
    "AttentionSizes",
    "Axis",
    "PartError",
    "PartKind",
    "check_parts",
    "complete",
    "cut",
    "effective",
    "mixing_parameters",
    "parameter_groups",
    "refuse_nothing",
    "sizes_of",
]
