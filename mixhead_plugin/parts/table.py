"""List the tables of the parts that flags add to an attention, by the option that chooses among each table's rows."""

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

# The options whose parameters mix heads; --mixing-lr-scale acts on them.
MIXINGS = ("head_mixing", "score_mixing", "feature_mixing")
