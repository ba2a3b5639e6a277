"""Define what flags add to an attention: mixings, sinks, gates and relative positions; needs torch
alone.
"""

from mixhead_plugin.parts.assembly import VARIANT, Assembly, complete, refuse_nothing, sizes_of
from mixhead_plugin.parts.kinds import AttentionSizes, Axis, PartError, PartKind
from mixhead_plugin.parts.parameters import (
    MIXINGS,
    PARTS,
    cut,
    effective,
    mixing_parameters,
    parameter_groups,
)
