"""Mixed heads in models of `transformers`, from 5.4 on; docs/huggingface.md has examples."""

from mixhead_plugin.heads.attention import LayerHeads
from mixhead_plugin.hf import adapters, attend, saving, trial
from mixhead_plugin.hf.heads import ablate, attentions, importance, prune
from mixhead_plugin.hf.layouts import LAYOUTS, MIXHEAD, Layout
from mixhead_plugin.hf.loading import load
from mixhead_plugin.hf.mixing import fold, mix, unmix
from mixhead_plugin.hf.viewing import view
from mixhead_plugin.parts import PARTS, Variant, mixing_parameters, parameter_groups

__all__ = [
    "LAYOUTS",
    "MIXHEAD",
    "PARTS",
    "LayerHeads",
    "Layout",
    "Variant",
    "mixing_parameters",
    "parameter_groups",
]
__all__ += ["ablate", "attentions", "fold", "importance", "load", "mix", "prune", "unmix", "view"]

attend.register()
trial.register()
saving.watch_models()
adapters.watch_adapters()
