"""Refuse to train with a field of `model` in a YAML file that nothing reads, for Transformers and RoBERTa.

fairseq checks the fields of models that have a dataclass. For the others it takes a misspelt field, or the plugin's
field of a model without the plugin, and trains the defaults.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import fields
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerConfig, TransformerModel
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError, unknown_field
from mixhead_plugin.repairs.replace import replaces

# Names, and what a model reads that has no task beside it.
BESIDE_FLAGS = {"_name", "arch", "tokens_per_sample", "tpu"}


@replaces(Trainer, "__init__")  # not where a model is built: older checkpoints may have such fields
def _init(original, trainer: Trainer, cfg: Any, task: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    kind = type(getattr(model, "module", model))  # behind FSDP
    if OmegaConf.is_config(cfg.model) and is_checked(kind):
        known = known_fields(kind, cfg.model._name)
        for name in cfg.model:
            if name not in known:
                raise OptionError(unknown_field("model", name, known))
    original(trainer, cfg, task, model, *args, **kwargs)


def is_checked(kind: type) -> bool:
    """Return whether all fields that a model reads are known: other models of fairseq read more than they declare."""
    own = hasattr(kind, "presets") and not kind.by_dataclass
    return own or kind in (TransformerModel, RobertaModel)


def known_fields(kind: Any, name: str) -> set[str]:
    """Return the fields of an architecture: its flags, what it presets, and those of the config that it is built by."""
    parser = ArgumentParser(allow_abbrev=False)
    kind.add_args(parser)
    preset = Namespace()
    # The plugin's function also checks the flags, which are not there.
    presets = getattr(kind, "presets", ARCH_CONFIG_REGISTRY)
    presets.get(name, lambda args: None)(preset)
    known = {action.dest for action in parser._actions} | vars(preset).keys() | BESIDE_FLAGS
    return known | {each.name for each in fields(TransformerConfig)}
