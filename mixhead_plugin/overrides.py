"""--model-overrides, held against the checkpoints that they are for.

fairseq leaves out a flag that a checkpoint has not, without a word, and blames the checkpoint for a value that does not
fit.
"""

import ast
import difflib
import os
from argparse import ArgumentParser, Namespace
from typing import Any, Dict, List, Set

from fairseq import checkpoint_utils, models
from fairseq.dataclass.utils import overwrite_args_by_name
from omegaconf import DictConfig, OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.untrusted import first_line

USED = ("model", "task", "criterion")  # parts of a checkpoint's config; the others are of the command itself


def check(text: str, paths: List[str]) -> None:
    """Refuse what would not count.

    Args:
        text: as it was typed
        paths: of the checkpoints, each of which may lack flags that another one has

    Raises:
        OptionError: it is no dictionary, has a flag that no checkpoint has, or a value that does not fit
    """
    flags = _read(text)
    if not flags or not all(map(os.path.isfile, paths)):  # fairseq names the file that is not there
        return
    configs = [_config(checkpoint_utils.load_checkpoint_to_cpu(path)) for path in paths]
    known = set().union(*map(_names, configs))
    unknown = [name for name in flags if name not in known]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), known, 1)
        _refuse(text, f"{_several(paths)} no flag {unknown[0]}{f'; must be one such as {close[0]}' if close else ''}")
    for path, config in zip(paths, configs):
        _check_parts(text, flags, path, config)
        try:
            overwrite_args_by_name(config, flags)
        except Exception as error:  # of many kinds, omegaconf's and fairseq's
            _refuse(text, f"does not fit the config of {path}: {first_line(error)}; must be flags of it, and values")


def _read(text: str) -> Dict[str, Any]:
    try:
        flags = ast.literal_eval(text.strip())
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        flags = None
    if not isinstance(flags, dict):
        _refuse(text, "must be a dictionary such as \"{'dropout': 0.0}\"")
    return flags


def _refuse(text: str, problem: str) -> None:
    raise OptionError(f"--model-overrides {text}: {problem}")


def _several(paths: List[str]) -> str:
    return f"{paths[0]} has" if len(paths) == 1 else f"{', '.join(paths)} have"


def _config(state: Dict[str, Any]) -> DictConfig:
    if state.get("args") is not None:
        return DictConfig({"model": state["args"]}, flags={"allow_objects": True})
    return state["cfg"]


def _check_parts(text: str, flags: Dict[str, Any], path: str, config: DictConfig) -> None:
    """Of {'model': {'dropout': 0.0}}: that there is such a flag, and such a part, which a Namespace is not."""
    for part in USED:
        names = flags.get(part)
        if part not in config or not isinstance(names, dict):
            continue
        if not isinstance(config[part], DictConfig):
            _refuse(text, f"the {part} of {path} has its flags in no part of their own; must be {names}")
        for name in names:
            if name not in config[part]:
                close = difflib.get_close_matches(str(name), map(str, config[part]), 1)
                _refuse(text, f"the {part} of {path} has no flag {name}{f'; must be {close[0]}' if close else ''}")


def _names(config: DictConfig) -> Set[str]:
    """What a flag may be called."""
    parts = OmegaConf.to_container(config, resolve=False)
    found: Set[str] = set()
    for part in set(USED).intersection(parts):
        found |= {part, *_within(parts[part])}
    return found


def _within(part: Any) -> Set[str]:
    """At any depth, where fairseq looks for them too."""
    if isinstance(part, Namespace):
        return {*vars(part), *_flags(part)}
    return set(part).union(*map(_within, part.values())) if isinstance(part, dict) else set()


def _flags(model: Namespace) -> Set[str]:
    """Those of its architecture: a later version has flags that an older checkpoint lacks, and may be given."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    kind = models.ARCH_MODEL_REGISTRY.get(str(getattr(model, "arch", None)))
    if kind is not None:
        kind.add_args(parser)
    return {action.dest for action in parser._actions}
