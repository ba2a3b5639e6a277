"""Let fairseq take account of the plugin's flags, which it does not know.

These functions repair no fault: without them, flags of the plugin would have no effect. So they
are always installed, and MIXHEAD_REPAIRS does not choose among them.
"""

import functools
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fairseq import options
from fairseq.dataclass import utils as dataclass_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import FullyShardedDataParallel
from fairseq.models import ARCH_MODEL_REGISTRY, BaseFairseqModel
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import nn

from mixhead_plugin.fairseq.checkpoint import check_for_fairseq_model
from mixhead_plugin.fairseq.learning_rate import check_optimizer, scale_steps
from mixhead_plugin.fairseq.replace import install_all, replaces


@functools.cache  # once in a process
def install() -> None:
    """Install the functions of this module in fairseq."""
    install_all(sys.modules[__name__])


@replaces(options, "parse_args_and_arch")
def complete_own_architecture(original, *args: Any, **kwargs: Any) -> Any:
    """Let a model of the plugin complete the flags of an architecture of the user's own.

    The function of such an architecture may set fairseq's flags alone. For a language model fairseq
    then takes the defaults of the model's class, which no family has: it would train without the
    mixing.
    """
    parsed = original(*args, **kwargs)
    # With parse_known, the words that are no flags come second.
    flags = parsed[0] if isinstance(parsed, tuple) else parsed
    model = ARCH_MODEL_REGISTRY.get(getattr(flags, "arch", None))
    if hasattr(model, "complete_own_architecture"):
        model.complete_own_architecture(flags)
    return parsed


@replaces(dataclass_utils, "merge_with_parent")
def give_yaml_its_architecture(original, dc: Any, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """Give a YAML file what its architecture presets.

    fairseq fills in the defaults of the model's dataclass. They are those of one architecture,
    transformer_lm: with the name of another one it would train these sizes without a word.
    """
    name = cfg.get("_name")
    model = ARCH_MODEL_REGISTRY.get(name)
    # A config that was filled in has the type of its dataclass.
    if OmegaConf.get_type(cfg) is dict and hasattr(model, "dataclass_for_yaml"):
        dc = model.dataclass_for_yaml(dc, name)
    return original(dc, cfg, *args, **kwargs)


@replaces(Trainer, "_build_optimizer")
def scale_marked_steps(original, trainer: Trainer) -> None:
    """Multiply the steps of the parameters that --mixing-lr-scale marks.

    fairseq has one learning rate for all parameters.
    """
    original(trainer)
    scale_steps(trainer.optimizer.optimizer)


# What repairs refuse to train. Each function gets the whole config and the model.
TRAINING_CHECKS: list[Callable[[Any, nn.Module], None]] = []


@replaces(Trainer, "__init__")
def check_training(
    original, trainer: Trainer, cfg: Any, task: Any, model: Any, criterion: Any, *args, **kwargs
) -> None:
    """Call all checks of a training, before it begins.

    A model of the plugin may refuse its optimizer and its criterion, a criterion its model, and a
    repair what fairseq would not train as it was asked.

    fairseq builds a model in the same way to train it and to load it. It does not tell the model
    which of them it is, nor which criterion will read its outputs. The criterion sees its model in
    the first batch, and there it is late to refuse it.
    """
    # older programs give the flags of a command, which fairseq converts like this
    config = convert_namespace_to_omegaconf(cfg) if isinstance(cfg, Namespace) else cfg
    # what --ddp-backend fully_sharded has put around the model
    is_sharded = isinstance(model, FullyShardedDataParallel)
    inner = model.unwrapped_module if is_sharded else model

    for check in TRAINING_CHECKS:
        check(config, inner)
    check_optimizer(config)
    if hasattr(inner, "check_training"):
        inner.check_training(config, criterion)
    if hasattr(criterion, "check_model"):
        criterion.check_model(inner)
    original(trainer, cfg, task, model, criterion, *args, **kwargs)


@replaces(SequenceGeneratorWithAlignment, "__init__")
def warn_of_alignment(original, generator: Any, models: list[Any], *args, **kwargs) -> None:
    """Tell a model of the plugin that its attention weights will be shown as an alignment.

    fairseq takes the attention weights of any model for probabilities: --print-alignment prints
    them, and the hub returns them. It does not ask the model.
    """
    shown = kwargs.get("print_alignment", "hard")
    for model in models:
        if hasattr(model, "warn_of_alignment"):
            model.warn_of_alignment(shown)
    original(generator, models, *args, **kwargs)


@replaces(BaseFairseqModel, "load_state_dict")
def check_origin(original, model: Any, state_dict: dict[str, Any], *args, **kwargs) -> Any:
    """Refuse a checkpoint of the plugin in a model of fairseq's own that cannot compute as it does.

    The flags of a checkpoint travel beside its tensors, where fairseq does not look. A model of the
    plugin does so itself.
    """
    if not hasattr(model, "check_checkpoint"):
        check_for_fairseq_model(model, state_dict)
    return original(model, state_dict, *args, **kwargs)
