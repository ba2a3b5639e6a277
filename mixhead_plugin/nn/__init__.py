"""Attention with mixed heads for any torch model; docs/python.md has examples.

It needs torch and nothing else.
"""

from mixhead_plugin.heads.attention import LayerHeads
from mixhead_plugin.nn.attention import MixedAttention, ShapeError
from mixhead_plugin.nn.heads import ablate, attentions, importance, prune
from mixhead_plugin.nn.loading import load
from mixhead_plugin.nn.mixing import mix, unmix
from mixhead_plugin.nn.viewing import view
from mixhead_plugin.parts import Variant, mixing_parameters, parameter_groups

__all__ = [
    "LayerHeads",
    "MixedAttention",
    "ShapeError",
    "Variant",
    "ablate",
    "attentions",
    "importance",
    "load",
    "mix",
    "mixing_parameters",
    "parameter_groups",
    "prune",
    "unmix",
    "view",
]
