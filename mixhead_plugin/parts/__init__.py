"""Define what flags add to an attention: mixings, sinks, gates and relative positions; needs torch alone."""

from mixhead_plugin.parts.assembly import VARIANT, Assembly, check_parts, complete, sizes_of
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, PartError, PartKind
from mixhead_plugin.parts.table import PARTS

__all__ = [
    "PARTS",
    "VARIANT",
    "Assembly",
    "AttentionSizes",
    "Axis",
    "PartError",
    "PartKind",
    "check_parts",
    "complete",
    "sizes_of",
]
