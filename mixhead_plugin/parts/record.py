"""Save how a module was mixed in the metadata of its state dict, and compare it on loading.

Two variants may have the same tensors, so tensors alone cannot tell them apart.
"""

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import nn

from mixhead_plugin.parts.tables import PART_NAMES, PARTS
from mixhead_plugin.parts.variant import OPTIONS, Variant

# A tool may put another function around it.
_LOAD_STATE_DICT = inspect.unwrap(nn.Module.load_state_dict).__code__

METADATA_KEY = "mixhead"  # of the entry in the metadata of a module

# The field `calls` of an entry: how a module that is not ours calls its attention. The entry of a
# `MixedAttention` has no such field.
CALLS_SDPA = "sdpa"  # by F.scaled_dot_product_attention: `nn.load` mixes it again
CALLS_INTERFACE = "transformers"  # by the AttentionInterface: `hf.load` mixes it again

# The fields that an entry has. An older one, which lacks some of them, is of a module with these
# values.
DEFAULTS = {name: option.default for name, option in OPTIONS.items() if option.in_record}


def fields_of(variant: Variant) -> dict[str, Any]:
    """Return the fields of a variant by which its tensors were trained."""
    fields = dataclasses.asdict(variant)
    return {name: value for name, value in fields.items() if name in DEFAULTS}


def describe(variant: Variant, **numbers: Any) -> dict[str, Any]:
    """Return the entry of a module: its variant, and the numbers that it was built with."""
    return {"variant": fields_of(variant), **numbers}


def metadata_of(destination: Any, prefix: str) -> dict[str, Any]:
    """Return the metadata of a module in a state dict that torch is making; they may be changed.

    Args:
        destination: the state dict; a plain dict, which somebody may give, keeps no metadata, and
            what is written to those that are returned then is lost
        prefix: what the names of the module's tensors begin with: its own name and a dot, or
            nothing for the whole model
    """
    metadata = getattr(destination, "_metadata", None)
    if metadata is None:
        return {}
    return metadata[prefix.removesuffix(".")]


def write(destination: Any, prefix: str, entry: dict[str, Any]) -> None:
    """Put the entry of a module into a state dict that torch is making.

    Args:
        destination: the state dict
        prefix: what the names of the module's tensors begin with
        entry: what `describe` returns
    """
    metadata_of(destination, prefix)[METADATA_KEY] = entry


def compare(
    module: nn.Module,
    entry: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    errors: list[str],
) -> None:
    """Refuse a state dict that torch is loading if its module was mixed in another way.

    Args:
        module: what is loaded
        entry: the entry of the module
        prefix: what the names of the module's tensors begin with
        local_metadata: those of the module in the state dict. They may have no entry; those of the
            plugin's attention in fairseq have the values of its flags
        errors: torch raises them; the difference of the entries becomes one
    """
    saved = local_metadata.get(METADATA_KEY)
    problem = difference(saved, entry) if saved else _unlike_flags(local_metadata, entry)
    if problem:
        errors.append(f"{prefix[:-1] or type(module).__name__} {problem}.")


def add_missing_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Add each part that a state dict lacks wholly, with its start, so that a plain one loads.

    A differential mixing and a learned sink have no such start, so torch says what is missing.
    By `strict=False` a part stays as it is, and its tensors are among the missing ones.

    Args:
        module: what is loaded
        state_dict: the one that torch is loading, changed in place
        prefix: what the names of the module's tensors begin with
    """
    if not _is_strict():
        return
    for name in PART_NAMES:
        upgrade = getattr(getattr(module, name, None), "upgrade_state_dict_named", None)
        if upgrade is not None:
            upgrade(state_dict, f"{prefix}{name}")


def _is_strict() -> bool:
    """Return whether the state dict that torch is loading must have all tensors.

    torch does not tell modules: it calls each `_load_from_state_dict` with strict=True in either
    case. So the frame of `load_state_dict` tells. Whoever calls the module without it is strict.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _LOAD_STATE_DICT:
            return frame.f_locals["strict"]
        frame = frame.f_back
    return True


def entries(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries of a state dict by the name of the module."""
    metadata = getattr(state_dict, "_metadata", {})
    return {name: entry[METADATA_KEY] for name, entry in metadata.items() if METADATA_KEY in entry}


def difference(saved: Mapping[str, Any], own: Mapping[str, Any], what: str = "module") -> str:
    """Return what a saved module had that this one has not, in a few words; empty if nothing.

    Args:
        saved: its entry
        own: the entry of this one
        what: the word for this one
    """
    before = _flat(saved)
    now = _flat(own)
    ignored = {"variant"}
    if own.get("calls") == CALLS_SDPA:
        # Known from some examples alone. Tensors of a part that reads the input tell it, too.
        ignored.add("embed_dim")
    for name in sorted({*before, *now} - ignored):
        value_before = before.get(name, "unknown")
        value_now = now.get(name, "unknown")
        if value_before != value_now:
            return f"was saved with {name} {value_before}, this {what} has {value_now}"
    return ""


def _unlike_flags(flags: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Return what an attention of fairseq was trained with that a module has not; empty if nothing.

    Some values have no tensors by which torch could tell them, as the normalizer.

    Args:
        flags: the metadata of the attention: values of flags by their names, if it is the plugin's
        entry: the entry of the module
    """
    variant = entry["variant"]
    for name in ("normalizer", *PARTS):
        saved = flags.get(OPTIONS[name].flag)
        own = variant[name]
        if saved is None or saved == own:
            continue
        # A part that the attention did not have starts anew, but for one that has no start in which
        # it does nothing.
        if saved == "none" and not PARTS[name][own].leaves_no_trace:
            continue
        return f"was saved with {name} {saved}, this module has {own}"

    # 4 heads of 128 have tensors of the same shapes as 8 heads of 64.
    numbers = {
        "heads": (flags.get("attention_heads"), entry.get("heads")),
        "head_dim": (flags.get("head_dim"), variant["head_dim"]),
    }
    for name, (saved, own) in numbers.items():
        if None not in (saved, own) and saved != own:
            return f"was saved with {name} {saved}, this module has {own}"
    return ""


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and the fields of an entry, those that older files lack included."""
    flat = {**DEFAULTS, **entry, **entry["variant"]}
    if flat["value_head_dim"] is None:
        flat["value_head_dim"] = flat["head_dim"]
    return flat
