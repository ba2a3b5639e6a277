"""The attentions of a model of fairseq, as `heads` studies them."""

from torch import nn

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.options import SCOPES
from mixhead_plugin.heads.assembly_attention import AssemblyAttention
from mixhead_plugin.heads.sites import where


def attentions_of(model: nn.Module) -> list[AssemblyAttention]:
    """Return the plugin's attentions in `model`, in its order; refuse a model without one."""
    adapters = []
    for name, module in model.named_modules():
        if isinstance(module, MixheadAttention):
            adapters.append(AssemblyAttention(name, module))
    if not adapters:
        name = type(model).__name__
        raise OptionError(
            f"model {name}: has no multi-head attention; must be a model with one, of fairseq or "
            "of mixhead_plugin"
        )
    return adapters


def prunable(loaded: Loaded) -> list[AssemblyAttention]:
    """Return the attentions in --attention-scope, whose heads a smaller model may lack.

    The flags of the model describe the numbers of only these heads.
    """
    scope = SCOPES[getattr(loaded.cfg.model, "attention_scope", "all")]
    adapters = attentions_of(loaded.model)
    return [attention for attention in adapters if where(attention.name).site in scope]
