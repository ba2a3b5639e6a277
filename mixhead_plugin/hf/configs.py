"""What the configs of a mixed model tell of it, and what makes `from_pretrained` refuse them.

`save_pretrained` writes the config of the outermost model into config.json.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mixhead_plugin.hf import saving
from mixhead_plugin.hf.finding import is_inside
from mixhead_plugin.hf.layouts import MIXHEAD, FoundAttention
from mixhead_plugin.parts import OPTIONS, Variant

# of the entry that names the classes of the attentions that are mixed
ATTENTIONS = "mixhead_attentions"
# Files without that entry are older: these classes, and those with a row, were mixed then.
OLDER_ATTENTIONS = {
    "BartAttention",
    "BertCrossAttention",
    "BertSelfAttention",
    "DistilBertSelfAttention",
    "ElectraCrossAttention",
    "ElectraSelfAttention",
    "GPT2Attention",
    "GemmaAttention",
    "LlamaAttention",
    "MBartAttention",
    "MT5Attention",
    "MarianAttention",
    "MistralAttention",
    "OPTAttention",
    "PhiAttention",
    "Qwen2Attention",
    "Qwen3Attention",
    "RobertaCrossAttention",
    "RobertaSelfAttention",
    "T5Attention",
    "ViTAttention",
    "WhisperAttention",
    "XLMRobertaCrossAttention",
    "XLMRobertaSelfAttention",
}
# The attribute of a mixed module that names the attention of transformers that it had before.
FORMER = "mixhead_former_attention"
# Entries of config.json with a value that transformers does not know. So `from_pretrained`, which
# would drop the mixing, raises an error that shows the value. It looks at the second entry alone
# where it is told to use another attention, as by attn_implementation="sdpa". `hf.load` overrides
# both.
_ADVICE = "mixed heads, load this model by mixhead_plugin.hf.load"
REFUSED = {
    "attn_implementation": _ADVICE,
    "experts_implementation": _ADVICE,
}


def saved_fields(variant: Variant) -> dict[str, Any]:
    """Return what config.json keeps of a variant; `Variant.of` reads it.

    It lacks `impl`, which belongs to the machine, and what the model has by itself, such as its
    head size: `mix` refuses other values of these.
    """
    fields = dataclasses.asdict(variant)
    del fields["impl"]
    return {name: value for name, value in fields.items() if not OPTIONS[name].of_projections}


def give_configs(model: nn.Module, attentions: Sequence[FoundAttention], variant: Variant) -> None:
    """Give a model and its modules configs of their own, which tell of the variant.

    Args:
        model: gets them
        attentions: its attentions that are mixed
        variant: what they compute
    """
    classes = {attention.class_name for attention in attentions}
    entries = {MIXHEAD: saved_fields(variant), ATTENTIONS: sorted(classes), **REFUSED}
    # Attentions of models that know eager alone may be causal without saying so: with the masks of
    # eager they need not say it.
    of_eager = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not module._supports_sdpa:
            of_eager.add(id(module.config))

    # Two modules may share a config, and `set_attn_implementation` would miss one of two copies. So
    # `memo` gives both the same copy, and the second module finds the mixing in it already: the
    # former attention is read before.
    memo: dict[int, Any] = {}
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "config", None), PreTrainedConfig):
            continue  # it has none, or one of another library
        knows_eager_alone = id(module.config) in of_eager
        former = module.config._attn_implementation
        config: Any = copy.deepcopy(module.config, memo)
        module.config = config
        if not any(is_inside(attention.name, name) for attention in attentions):
            continue  # another tower, which stays as it is

        vars(module)[FORMER] = former
        vars(config).update(entries)
        # transformers gives weights (`output_attentions`) under the name "eager" alone.
        wants_weights = config.output_attentions and config._attn_implementation == "eager"
        if not wants_weights and not knows_eager_alone:
            config._attn_implementation_internal = MIXHEAD


def forget(config: PreTrainedConfig, attn_implementation: str | None = None) -> None:
    """Remove all that `mix` and `prune` have written into a config, and into those inside it.

    Args:
        config: of a mixed model, or read from its folder
        attn_implementation: the attention of transformers that it has then; None for the one that
            a config asks for, or else the one that transformers chooses
    """
    if MIXHEAD in vars(config):
        asks_for = config._attn_implementation_internal
        if asks_for in (MIXHEAD, _ADVICE):
            asks_for = None
        config._attn_implementation_internal = attn_implementation or asks_for
        if saving.auto_map_of(config):  # which is empty if it is not ours
            vars(config).pop("auto_map", None)
    for name in (MIXHEAD, ATTENTIONS, saving.PRUNED, *REFUSED):
        vars(config).pop(name, None)
    for inner in vars(config).values():
        if isinstance(inner, PreTrainedConfig):
            forget(inner, attn_implementation)
