"""Mixed heads in models of Hugging Face's `transformers`, from 5.3 on; docs/huggingface.md has examples."""

from mixhead_plugin.hf.attend import NAME
from mixhead_plugin.hf.heads import LayerHeads, ablate, attentions, importance
from mixhead_plugin.hf.layouts import LAYOUTS, Layout
from mixhead_plugin.hf.loading import load
from mixhead_plugin.hf.mixing import fold, mix, unmix
from mixhead_plugin.hf.pruning import prune
from mixhead_plugin.hf.viewing import view
from mixhead_plugin.parts import PARTS, VARIANT, mixing_parameters, parameter_groups

__all__ = ["LAYOUTS", "NAME", "PARTS", "VARIANT", "LayerHeads", "Layout", "mixing_parameters", "parameter_groups"]
__all__ += ["ablate", "attentions", "fold", "importance", "load", "mix", "prune", "unmix", "view"]
