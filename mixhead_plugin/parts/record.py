"""What a state dict tells of a mixed module beside its tensors, in the metadata that torch keeps.

Tensors do not show which normalizer they were trained with, or how a mixing has to be built.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from mixhead_plugin.parts.parameters import PART_NAMES
from mixhead_plugin.parts.variant import OPTIONS, Variant

METADATA_KEY = "mixhead"  # of the entry in the metadata of a module

# What may differ between the module that was saved and the one that loads: which code computes the
# attention, and what an M started as that is loaded now.
_FREE = ("impl", "mixing_start")


def fields_of(variant: Variant) -> dict[str, Any]:
    """Return the fields of a variant by which its tensors were trained."""
    fields = dataclasses.asdict(variant)
    return {name: value for name, value in fields.items() if name not in _FREE}


def describe(variant: Variant, **numbers: Any) -> dict[str, Any]:
    """Return the entry of a module: its variant, and the numbers that it was built with."""
    return {"variant": fields_of(variant), **numbers}


def write(destination: Any, prefix: str, entry: dict[str, Any]) -> None:
    """Put the entry of a module into a state dict that torch is making.

    Args:
        destination: the state dict; a plain dict, which somebody may give, keeps no metadata
        prefix: what the names of the module's tensors begin with
    """
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        metadata[prefix[:-1]][METADATA_KEY] = entry


def read(
    module: nn.Module,
    entry: dict[str, Any],
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    is_whole: bool,
    errors: list[str],
) -> None:
    """Compare the entry of a state dict that torch is loading, and complete its parts.

    Args:
        module: what is loaded
        entry: that of the module
        state_dict: a part that it lacks wholly is added to it, with its start
        prefix: what the names of the module's tensors begin with
        local_metadata: those of the module in the state dict
        is_whole: whether the state dict has the module; otherwise parts stay as they are
        errors: torch raises them; the difference of the entries becomes one
    """
    saved = local_metadata.get(METADATA_KEY)
    problem = difference(saved, entry) if saved else ""
    if problem:
        errors.append(f"{prefix[:-1] or type(module).__name__} {problem}.")
    if not is_whole:
        return
    for name in PART_NAMES:
        upgrade = getattr(getattr(module, name, None), "upgrade_state_dict_named", None)
        if upgrade is not None:
            upgrade(state_dict, f"{prefix}{name}")


def entries(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries of a state dict by the name of the module."""
    metadata = getattr(state_dict, "_metadata", {})
    return {name: entry[METADATA_KEY] for name, entry in metadata.items() if METADATA_KEY in entry}


def difference(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return what a saved module had that this one has not, in a few words; empty if nothing."""
    flat = [_flat(saved), _flat(own)]
    ignored = {"variant"}
    if own.get("calls") == "sdpa":
        # Known from some examples alone. Tensors of a part that reads the input tell it, too.
        ignored.add("embed_dim")
    for name in sorted({*flat[0], *flat[1]} - ignored):
        values = [entry.get(name, "unknown") for entry in flat]
        if values[0] != values[1]:
            return f"was saved with {name} {values[0]}, this module has {values[1]}"
    return ""


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers and the fields of an entry, those that older files lack included."""
    flat = {name: option.default for name, option in OPTIONS.items() if name not in _FREE}
    flat |= {**entry, **entry["variant"]}
    if flat["value_head_dim"] is None:
        flat["value_head_dim"] = flat["head_dim"]
    return flat
