"""Mixed heads in models of `transformers`, from 5.4 on; docs/huggingface.md has examples.

Importing this module patches `PreTrainedModel` and `Trainer` of transformers and, where it is
installed, PEFT. They save, load and make models without asking the modules inside, so a mixing
could be lost without a word. The patches put checks in front; plain models pass them unchanged.
`saving.guard_models` and `peft_guards.guard_adapters` say why each one is needed.
"""

from mixhead_plugin.heads.attention import LayerHeads
from mixhead_plugin.hf import attend, peft_guards, saving, trial
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
    "ablate",
    "attentions",
    "fold",
    "importance",
    "load",
    "mix",
    "mixing_parameters",
    "parameter_groups",
    "prune",
    "unmix",
    "view",
]

attend.register()
trial.register()
saving.guard_models()
peft_guards.guard_adapters()
