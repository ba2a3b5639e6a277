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
from collections.abc import Callable, Iterable, Iterator
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
PARTS = frozenset(each.name for each in fields(FairseqConfig))
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
DICTS = {
    "model_overrides": (ast.literal_eval, "\"{'dropout': 0.1}\""),
    "optimizer_overrides": (ast.literal_eval, "\"{'lr': 0.1}\""),
    "eval_bleu_args": (json.loads, "'{\"beam\": 5}'"),
    "eval_bleu_detok_args": (json.loads, "'{\"moses_no_dash_splits\": true}'"),
}


@replaces(options, "parse_args_and_arch")
def _parse(original, *args: Any, **kwargs: Any) -> Any:
    parsed = original(*args, **kwargs)
    flags = (
        parsed[0] if isinstance(parsed, tuple) else parsed
    )  # with parse_known, unknown words come second
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


@replaces(
    checkpoint_utils, "load_checkpoint_to_cpu"
)  # commands, the hub and programs all come by here
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
    for name, value in overrides.items():
        if reason := why_unread(OmegaConf.to_container(cfg), name, value):
            logger.warning(f"{_flag(name)} changes nothing, because {reason}")


@replaces(FairseqOptimizer, "load_state_dict")
def _load_optimizer(
    original, optimizer: FairseqOptimizer, state: dict, optimizer_overrides: dict | None = None
):
    known = {name for group in optimizer.param_groups for name in group}
    for name in optimizer_overrides or {}:
        if name not in known:
            raise OptionError(f"--optimizer-overrides {name!r}: unknown; {_remedy(name, known)}")
    return original(optimizer, state, optimizer_overrides)


@replaces(
    FairseqTask, "build_generator"
)  # for --eval-bleu-args, and for the keywords of the hub's `translate`
def _build_generator(
    original, task: FairseqTask, models: Any, args: Any, *others: Any, **kwargs: Any
) -> Any:
    known = {field.name for field in fields(GenerationConfig)}
    names = vars(args) if isinstance(args, Namespace) else args
    for name in names:
        # A program may hand over all flags of a command.
        if name not in known and name not in known_names():
            written = getattr(getattr(task, "cfg", None), "eval_bleu_args", None) or ""
            flag = "--eval-bleu-args" if f'"{name}"' in written else "generation:"
            raise OptionError(f"{flag} {name!r}: unknown; {_remedy(name, known)}")
    return original(task, models, args, *others, **kwargs)


def _remedy(name: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), known, 2)
    return (
        f"did you mean {' or '.join(near)}?"
        if near
        else f"must be one of {', '.join(sorted(known))}"
    )


def refuse_unknown(overrides: dict[str, Any], part: str = "") -> None:
    """Refuse an override that no part of fairseq, and nothing of a --user-dir, reads."""
    known = known_names() if overrides else set()
    for name, value in overrides.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 2)
            remedy = (
                f"did you mean {' or '.join(near)}?"
                if near
                else "must be a flag of the model or the task"
            )
            raise OptionError(f"{_flag(part + str(name))} unknown; {remedy}")
        if name in PARTS and isinstance(value, dict):
            refuse_unknown(value, f"{name}.")


def known_names() -> set[str]:
    """Return the names of all that fairseq and each --user-dir can read from the config of a
    checkpoint.
    """
    names = set(PARTS | UNDECLARED)
    for each in fields(FairseqConfig):
        if is_dataclass(each.type):
            names |= {field.name for field in fields(each.type)}

    kinds = {*MODEL_REGISTRY.values(), *ARCH_MODEL_REGISTRY.values(), *TASK_REGISTRY.values()}
    for registry in REGISTRIES.values():
        kinds |= set(registry["registry"].values())
        for config in registry["dataclass_registry"].values():
            names |= {field.name for field in fields(config)}
    for kind in kinds:
        names |= set(declared(kind))
    return names


def declared(kind: Any) -> Iterator[str]:
    """Yield the names of the flags of a model, task, criterion, ..."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    if hasattr(kind, "add_args"):
        kind.add_args(parser)
    for action in parser._actions:
        yield action.dest


def why_unread(cfg: dict[str, Any], name: str, value: Any) -> str:
    """Return why an override has no effect in the config of a checkpoint, which has it by now;
    empty if it has one.
    """
    part = {"arch": "model"}.get(name, name)
    if part not in PARTS:
        return "" if _has_field(cfg, name) else "no part of the checkpoint reads this field"
    if isinstance(value, dict):  # the fields of one part, as in {'task': {'data': 'x'}}
        return (
            f"the {part} of this checkpoint takes fields without its name"
            if _is_flags(cfg.get(part))
            else ""
        )
    own = cfg.get(part)
    own = own.get("_name") if isinstance(own, dict) else getattr(own, "_name", own)
    return "" if own == value else f"the checkpoint keeps its {part} {own}"


def _has_field(cfg: dict[str, Any], name: str) -> bool:
    """Return whether a config, at any depth, has a field of this name."""
    for part in cfg.values():
        if isinstance(part, dict) and (name in part or _has_field(part, name)):
            return True
        if _is_flags(part):
            # fairseq sets every override there, read or not.
            arch = getattr(part, "_name", None)
            kind = ARCH_MODEL_REGISTRY.get(arch)
            if kind is None or not is_checked(kind) or name in known_fields(kind, arch):
                return True
    return False


def _is_flags(part: Any) -> bool:
    """Return whether a part of a config is a Namespace: all flags of its training, where it has no
    dataclass.
    """
    return isinstance(part, Namespace)


def _flag(name: str) -> str:
    """Return an override as the user has written it: a flag of its own, one of a dict, or of a
    program's keywords.
    """
    flags = {word.partition("=")[0] for word in sys.argv}
    if option_name(name) in flags:  # fairseq-validate takes all its flags for overrides
        return f"{option_name(name)}:"
    return f"{'--model-overrides' if '--model-overrides' in flags else 'arg_overrides'} {name!r}:"
