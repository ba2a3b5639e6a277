"""The flags of a model as fairseq's configs hold them: made flat, and filled in."""

import copy
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.options import FAMILIES, FLAGS, TOKENS_PER_SAMPLE, AttentionOptions


def flat_copy(args: Any) -> Any:
    """Return a flat copy of the flags that fairseq gives to `build_model`.

    Args:
        args: a DictConfig, a Namespace or a dataclass, which stays as it is

    Returns:
        a Namespace; a copy of the dataclass, if that was given
    """
    flags = _namespace_of(args) if OmegaConf.is_config(args) else copy.copy(args)
    _blank_references(flags)
    return flags


def _namespace_of(model: Any) -> Namespace:
    """Return the flags of the group `model` of a config, and those of `common`.

    fairseq's own converters drop the plugin's flags from a DictConfig. A YAML file keeps in
    `common` some flags that a command gives to the model.
    """
    whole = model._get_parent() or {}  # omegaconf has no public way to it
    own: Any = OmegaConf.to_container(model, resolve=True, enum_to_str=True)
    return Namespace(**{**whole.get("common", {}), **own})


def _blank_references(flags: Any) -> None:
    """Set flags that are references, such as ${task.tokens_per_sample}, to None.

    The dataclass that a program gives may have them as defaults, and no task to resolve them.
    """
    for name, value in vars(flags).items():
        is_reference = isinstance(value, str) and value.startswith("${")
        # `fill_in` knows what --head-dim is then.
        if is_reference and name != "head_dim":
            setattr(flags, name, None)


def fill_in(args: Any, family: str) -> None:
    """Set the missing flags of the plugin to the values of a family.

    Args:
        args: the flags of a model, changed in place
        family: a key of FAMILIES, or "" for none of them
    """
    preset = FAMILIES.get(family, {})
    for name in FLAGS:
        if not _is_set(args, name):
            setattr(args, name, preset.get(name, getattr(AttentionOptions, name)))
    if args.head_dim == TOKENS_PER_SAMPLE:
        args.head_dim = _input_length(args)


def _is_set(args: Any, name: str) -> bool:
    """Return whether a flag has a value already."""
    if getattr(AttentionOptions, name) is None:
        # None, as `null` in a YAML file, leaves out a flag whose default is None.
        return getattr(args, name, None) is not None
    # For any other flag the checks refuse None: who writes `head_mixing: null` may mean `none`.
    return hasattr(args, name)


def _input_length(args: Any) -> int:
    """Return --tokens-per-sample, the head size of family fixhead."""
    length = getattr(args, "tokens_per_sample", None)
    if not isinstance(length, int):
        raise OptionError(
            "--head-dim is missing: without --tokens-per-sample, family fixhead needs a head size"
        )
    return length


def set_missing(args: Any, defaults: Mapping[str, Any]) -> None:
    """Set those values of `args`, a Namespace or DictConfig, that are missing."""
    for name, value in defaults.items():
        if not hasattr(args, name):
            setattr(args, name, value)


def model_name(flags: Any) -> str | None:
    """Return the name of the architecture or of the model in the flags of a model."""
    return getattr(flags, "arch", None) or getattr(flags, "_name", None)
