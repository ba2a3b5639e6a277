"""Refuse a name in --model-overrides, --optimizer-overrides or --eval-bleu-args that nothing reads.

fairseq drops such a name without a word, so a misspelt one changes nothing, and the command ends
with status 0. The keywords of its hub are dropped alike. A text that is no dict ends in a
traceback.
"""

import ast
import difflib
import json
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from typing import Any

from fairseq import checkpoint_utils, options
from fairseq.data import encoders  # noqa: F401 (registers --bpe and --tokenizer)
from fairseq.dataclass.configs import FairseqConfig, GenerationConfig
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.optim import FairseqOptimizer
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from omegaconf import DictConfig, OmegaConf

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.repairs.unknown_fields import is_checked, known_fields
from mixhead_plugin.fairseq.replace import replaces

logger = logging.getLogger(__name__)

# Where the overrides of a command, of a program or of the hub come by, and what is checked there:
#
#   parse_args_and_arch      whether the text of a flag is a dict
#   load_checkpoint_to_cpu   whether anything reads a name in a checkpoint's config
#   overwrite_args_by_name   whether this checkpoint has the name; if not, only a warning
#   load_state_dict          whether the optimizer has a setting of this name
#   build_generator          whether the search has a setting of this name


# ---- the text of a flag --------------------------------------------------------------------------

# The flags that hold a dict: what reads them, and an example.
DICTS: dict[str, tuple[Callable[[str], Any], str]] = {
    "model_overrides": (ast.literal_eval, "\"{'dropout': 0.1}\""),
    "optimizer_overrides": (ast.literal_eval, "\"{'lr': 0.1}\""),
    "eval_bleu_args": (json.loads, "'{\"beam\": 5}'"),
    "eval_bleu_detok_args": (json.loads, "'{\"moses_no_dash_splits\": true}'"),
}


@replaces(options, "parse_args_and_arch")
def _parse(original, *args: Any, **kwargs: Any) -> Any:
    parsed = original(*args, **kwargs)
    # With parse_known, the words that are no flags come second.
    flags = parsed[0] if isinstance(parsed, tuple) else parsed
    for option, (read, example) in DICTS.items():
        text = getattr(flags, option, None)
        if text is not None and not is_dict(text, read):
            raise OptionError(f"{option_name(option)} {text}: must be a dict like {example}")
    return parsed


def is_dict(text: str, read: Callable[[str], Any]) -> bool:
    """Return whether fairseq will read a dict."""
    try:
        return isinstance(read(text), dict)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


# ---- names that nothing reads in any checkpoint --------------------------------------------------

# The parts of a config, such as `task` and `model`.
CONFIG_PARTS = frozenset(each.name for each in fields(FairseqConfig))
# What fairseq reads, although no part declares it.
UNDECLARED = frozenset(
    """
        _name arch task generation_args is_vocoder vocoder duration_temperature exclude_self_target
        ngram_predictor no_share_last_layer persistent_workers remove_head reuse_dataloader
        teacher_forcing adapter_layer_norm adapter_modules adapter_reuse_layer_norm bottleneck
        ffn_modules languages ln_before_adapter
    """.split()
)


# Commands, the hub and programs all come by here.
@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def _load(
    original, path: str, arg_overrides: dict | None = None, load_on_all_ranks: bool = False
) -> dict:
    refuse_unknown(arg_overrides or {})
    return original(path, arg_overrides, load_on_all_ranks)


def refuse_unknown(overrides: dict[str, Any], part: str = "") -> None:
    """Refuse an override that no part of fairseq, and nothing of a --user-dir, reads.

    Args:
        overrides: the values by name; the values of one part may be a dict, as in
            {'task': {'data': 'x'}}
        part: the part of the config where they stand, such as "task.", for the message
    """
    if not overrides:
        return
    known = known_names()
    for name, value in overrides.items():
        if name not in known:
            remedy = _remedy(name, known, otherwise="must be a flag of the model or the task")
            raise OptionError(f"{_override_as_written(part + str(name))} unknown; {remedy}")
        if name in CONFIG_PARTS and isinstance(value, dict):
            refuse_unknown(value, f"{name}.")


def known_names() -> set[str]:
    """Return all names that fairseq and each --user-dir can read from a checkpoint's config."""
    names = set(CONFIG_PARTS | UNDECLARED)
    for part in fields(FairseqConfig):
        if is_dataclass(part.type):
            names |= {field.name for field in fields(part.type)}

    # The classes of all models, tasks, criterions, ...: some declare fields, others add flags.
    classes = {*MODEL_REGISTRY.values(), *ARCH_MODEL_REGISTRY.values(), *TASK_REGISTRY.values()}
    for registry in REGISTRIES.values():
        classes |= set(registry["registry"].values())
        for config in registry["dataclass_registry"].values():
            names |= {field.name for field in fields(config)}
    for each in classes:
        parser = ArgumentParser(allow_abbrev=False, add_help=False)
        if hasattr(each, "add_args"):
            each.add_args(parser)
        names |= {action.dest for action in parser._actions}
    return names


# ---- names that one checkpoint does not read -----------------------------------------------------

# The config of a checkpoint is a dict of parts. A part is one of three kinds:
#
#   {"_name": "translation", "data": ...}           the fields of a task or model with a dataclass
#   Namespace(_name="transformer", dropout=0.1)     all flags of the training, for a model without
#   "sentencepiece" or None                         the name alone


@replaces(checkpoint_utils, "overwrite_args_by_name")
def _overwrite(original, cfg: DictConfig, overrides: dict[str, Any]) -> None:
    original(cfg, overrides)
    # Only a warning: an ensemble, or a language model beside the translation model, gets the
    # overrides of all.
    parts: Any = OmegaConf.to_container(cfg)
    for name, value in overrides.items():
        reason = why_unread(parts, name, value)
        if reason:
            logger.warning(f"{_override_as_written(name)} changes nothing, because {reason}")


def why_unread(parts: dict[str, Any], name: str, value: Any) -> str:
    """Return why an override has no effect; empty if it has one.

    Args:
        parts: the config of a checkpoint, after fairseq has applied the override
        name: the name of a field, or of a part of the config
        value: what the user wants
    """
    part = "model" if name == "arch" else name
    if part not in CONFIG_PARTS:
        if _may_read(parts, name):
            return ""
        return "no part of the checkpoint reads this field"

    content = parts.get(part)
    if isinstance(value, dict):  # the fields of one part, as in {'task': {'data': 'x'}}
        if isinstance(content, Namespace):
            return f"the {part} of this checkpoint takes fields without its name"
        return ""
    kept = _name_of_part(content)
    if kept == value:
        return ""
    return f"the checkpoint keeps its {part} {kept}"


def _name_of_part(content: Any) -> Any:
    """Return the name of the task, of the model, ... that a part of the config is for."""
    if isinstance(content, Namespace):
        return getattr(content, "_name", None)
    if isinstance(content, dict):
        return content.get("_name")
    return content


def _may_read(parts: dict[str, Any], name: str) -> bool:
    """Return whether a config has a field of this name, at any depth, or may read one."""
    for content in parts.values():
        if isinstance(content, Namespace) and _model_may_read(content, name):
            return True
        if isinstance(content, dict) and (name in content or _may_read(content, name)):
            return True
    return False


def _model_may_read(flags: Namespace, name: str) -> bool:
    """Return whether a model without a dataclass may read a flag.

    fairseq sets every override among its flags, read or not, so the model's class has to tell. Some
    classes read more than they declare. For these the answer is True: a warning would be a guess.
    """
    arch = getattr(flags, "_name", "")
    model_class = ARCH_MODEL_REGISTRY.get(arch)
    if model_class is None or not is_checked(model_class):
        return True
    return name in known_fields(model_class, arch)


# ---- the optimizer -------------------------------------------------------------------------------


@replaces(FairseqOptimizer, "load_state_dict")
def _load_optimizer(
    original, optimizer: FairseqOptimizer, state_dict: dict, optimizer_overrides: dict | None = None
):
    known: set[str] = set()
    for group in optimizer.param_groups:
        known |= set(group)
    for name in optimizer_overrides or {}:
        if name not in known:
            remedy = _remedy(name, known, otherwise=f"must be one of {', '.join(sorted(known))}")
            raise OptionError(f"--optimizer-overrides {name!r}: unknown; {remedy}")
    return original(optimizer, state_dict, optimizer_overrides)


# ---- the search ----------------------------------------------------------------------------------


# For --eval-bleu-args, and for the keywords of the hub's `translate`.
@replaces(FairseqTask, "build_generator")
def _build_generator(
    original, task: FairseqTask, models: Any, args: Any, *others: Any, **kwargs: Any
) -> Any:
    known = {field.name for field in fields(GenerationConfig)}
    for name in _names_in(args):
        # A program may hand over all flags of a command.
        if name not in known and name not in known_names():
            written = getattr(getattr(task, "cfg", None), "eval_bleu_args", None) or ""
            flag = "--eval-bleu-args" if f'"{name}"' in written else "generation:"
            remedy = _remedy(name, known, otherwise=f"must be one of {', '.join(sorted(known))}")
            raise OptionError(f"{flag} {name!r}: unknown; {remedy}")
    return original(task, models, args, *others, **kwargs)


def _names_in(args: Any) -> list[str]:
    """Return the names of the values in a dict, a config, flags or a dataclass."""
    if isinstance(args, (dict, DictConfig)):
        return list(map(str, args))
    return list(vars(args))


# ---- messages ------------------------------------------------------------------------------------


def _remedy(name: Any, known: Collection[str], otherwise: str) -> str:
    """Return what to write instead of an unknown name: names that are near, or `otherwise`."""
    near = difflib.get_close_matches(str(name), known, 2)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def _override_as_written(name: str) -> str:
    """Return an override as the user has written it."""
    flags = {word.partition("=")[0] for word in sys.argv}
    if option_name(name) in flags:  # fairseq-validate takes all its flags for overrides
        return f"{option_name(name)}:"
    if "--model-overrides" in flags:
        return f"--model-overrides {name!r}:"
    return f"arg_overrides {name!r}:"  # the keyword, in a program
