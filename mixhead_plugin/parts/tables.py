"""List the tables of the parts, each of which has one row for each value of its flag."""

from mixhead_plugin.parts.feature_mixing import FEATURE_MIXINGS
from mixhead_plugin.parts.gate import ATTENTION_GATES
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS, SCORE_MIXINGS
from mixhead_plugin.parts.relative_position import RELATIVE_POSITIONS
from mixhead_plugin.parts.sink import ATTENTION_SINKS

# An `Assembly` builds them in this order, each as the child module of its option's name.
PARTS = {
    "head_mixing": HEAD_MIXINGS,
    "score_mixing": SCORE_MIXINGS,
    "feature_mixing": FEATURE_MIXINGS,
    "attention_sink": ATTENTION_SINKS,
    "attention_gate": ATTENTION_GATES,
    "relative_position": RELATIVE_POSITIONS,
}

# The names of the modules that parts are. A module of somebody else may have such a name, too: in a
# model, the class `Part` tells; the names in a file tell only together with a model.
# The gain has no table, because it is a number that is asked for (`relative_gain`), not a kind.
PART_NAMES = (*PARTS, "relative_gain")

# The parts that mix heads; --mixing-lr-scale acts on them. `mixing_parameters` and `mixing_lr` are
# wider: they have gates, sinks and positions too.
MIXINGS = ("head_mixing", "score_mixing", "feature_mixing")
