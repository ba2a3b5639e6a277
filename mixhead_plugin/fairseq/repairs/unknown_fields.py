"""Refuse to train a Transformer or RoBERTa with a field of `model` in YAML that nothing reads.

fairseq checks the fields where the name is that of a model with a dataclass. For other models, and
for architectures such as transformer_lm_gpt, it takes a misspelt field, or the plugin's field of a
model without the plugin, and trains the defaults.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import fields
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import OmegaConf
from torch import nn

from mixhead_plugin.errors import OptionError, unknown_field
from mixhead_plugin.fairseq.hooks import TRAINING_CHECKS
from mixhead_plugin.fairseq.plugin_model import PluginModel

# Names, and what a model reads that has no task beside it.
BESIDE_FLAGS = {"_name", "arch", "tokens_per_sample", "tpu"}


def apply() -> None:
    # Not where a model is built: older checkpoints may have such fields, and go on loading.
    TRAINING_CHECKS.append(refuse_unknown_fields)


def refuse_unknown_fields(cfg: Any, model: nn.Module) -> None:
    """Refuse a field of `model` that nothing reads.

    Args:
        cfg: the whole config of a training
        model: the model that it trains
    """
    model_class = type(model)
    # The flags of a command are no config: their parser has refused what it does not know.
    # Without a name, the fields are one level deeper, below that of a model with a dataclass.
    if OmegaConf.is_config(cfg.model) and "_name" in cfg.model and is_checked(model_class):
        known = known_fields(model_class, cfg.model._name)
        for name in cfg.model:
            if name not in known:
                raise OptionError(unknown_field("model", name, known))


def is_checked(model_class: type) -> bool:
    """Return whether all fields that a model reads are known.

    Other models of fairseq read more than they declare.
    """
    if issubclass(model_class, PluginModel):
        return True
    return model_class in (TransformerModel, TransformerLanguageModel, RobertaModel)


def known_fields(model_class: Any, name: str) -> set[str]:
    """Return the fields of an architecture.

    They are its flags, what it presets, and the fields of the config that it is built by.

    Args:
        model_class: the class of the model that the architecture builds
        name: the name of the architecture
    """
    known = set(BESIDE_FLAGS)
    known |= {each.name for each in fields(TransformerConfig)}

    # Not the function that the plugin has registered: it also checks the flags, which are not here.
    is_of_plugin = issubclass(model_class, PluginModel)
    presets = model_class.presets if is_of_plugin else ARCH_CONFIG_REGISTRY
    values = Namespace()
    if name in presets:
        presets[name](values)
    known |= set(vars(values))

    config = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(name, name))
    if config is not None:
        return known | {each.name for each in fields(config)}
    parser = ArgumentParser(allow_abbrev=False)
    model_class.add_args(parser)
    return known | {action.dest for action in parser._actions}
