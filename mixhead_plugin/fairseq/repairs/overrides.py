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
from collections.abc import Callable, Collection, Iterator
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


# Commands, the hub and programs all come by here.
@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def _load(
    original, path: str, arg_overrides: dict | None = None, load_on_all_ranks: bool = False
) -> dict:
    refuse_unknown(arg_overrides or {})
    return original(path, arg_overrides, load_on_all_ranks)


@replaces(checkpoint_utils, "overwrite_args_by_name")
def _overwrite(original, cfg: DictConfig, overrides: dict[str, Any]) -> None:
    original(cfg, overrides)
    # Only a warning: an ensemble, or a language model beside the translation model, gets the
    # overrides of all.
    content: Any = OmegaConf.to_container(cfg)
    for name, value in overrides.items():
        reason = why_unread(content, name, value)
        if reason:
            logger.warning(f"{_override_as_written(name)} changes nothing, because {reason}")


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


def _remedy(name: Any, known: Collection[str], otherwise: str) -> str:
    """Return what to write instead of an unknown name: names that are near, or `otherwise`."""
    near = difflib.get_close_matches(str(name), known, 2)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


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
    for each in fields(FairseqConfig):
        if is_dataclass(each.type):
            names |= {field.name for field in fields(each.type)}

    registered = {*MODEL_REGISTRY.values(), *ARCH_MODEL_REGISTRY.values(), *TASK_REGISTRY.values()}
    for registry in REGISTRIES.values():
        registered |= set(registry["registry"].values())
        for config in registry["dataclass_registry"].values():
            names |= {field.name for field in fields(config)}
    for each in registered:
        names |= set(declared(each))
    return names


def declared(registered: Any) -> Iterator[str]:
    """Yield the names of the flags of the class of a model, task, criterion, ..."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    if hasattr(registered, "add_args"):
        registered.add_args(parser)
    for action in parser._actions:
        yield action.dest


def why_unread(cfg: dict[str, Any], name: str, value: Any) -> str:
    """Return why an override has no effect; empty if it has one.

    Args:
        cfg: the config of a checkpoint, after fairseq has applied the override
        name: the name of a field, or of a part of the config
        value: what the user wants
    """
    part = "model" if name == "arch" else name
    if part not in CONFIG_PARTS:
        return "" if _has_field(cfg, name) else "no part of the checkpoint reads this field"

    content = cfg.get(part)
    if isinstance(value, dict):  # the fields of one part, as in {'task': {'data': 'x'}}
        if _is_flags(content):
            return f"the {part} of this checkpoint takes fields without its name"
        return ""
    own = getattr(content, "_name", content)  # of flags, else a name alone
    if isinstance(content, dict):
        own = content.get("_name")
    return "" if own == value else f"the checkpoint keeps its {part} {own}"


def _has_field(cfg: dict[str, Any], name: str) -> bool:
    """Return whether a config, at any depth, has a field of this name."""
    for part in cfg.values():
        if isinstance(part, dict) and (name in part or _has_field(part, name)):
            return True
        if _is_flags(part):
            # fairseq sets every override there, read or not.
            arch = getattr(part, "_name", "")
            model_class = ARCH_MODEL_REGISTRY.get(arch)
            if model_class is None or not is_checked(model_class):
                return True  # what such a model reads is not known
            if name in known_fields(model_class, arch):
                return True
    return False


def _is_flags(part: Any) -> bool:
    """Return whether a part of a config has no dataclass: then it is all flags of the training."""
    return isinstance(part, Namespace)


def _override_as_written(name: str) -> str:
    """Return an override as the user has written it."""
    flags = {word.partition("=")[0] for word in sys.argv}
    if option_name(name) in flags:  # fairseq-validate takes all its flags for overrides
        return f"{option_name(name)}:"
    if "--model-overrides" in flags:
        return f"--model-overrides {name!r}:"
    return f"arg_overrides {name!r}:"  # the keyword, in a program
