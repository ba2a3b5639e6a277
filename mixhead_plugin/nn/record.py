"""What a state dict tells of a mixed module beside its tensors, in the metadata that torch keeps.

Tensors do not show which normalizer they were trained with, or how a mixing has to be built.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mixhead_plugin.parts import OPTIONS, Variant

METADATA_KEY = "mixhead"  # of the entry in the metadata of a module

# What may differ between the module that was saved and the one that loads: which code computes the
# attention, and what an M started as that is loaded now.
_FREE = ("impl", "mixing_start")


def describe(variant: Variant, **numbers: Any) -> dict[str, Any]:
    """Return the entry of a module: its variant, and the numbers that it was built with."""
    fields = dataclasses.asdict(variant)
    return {"variant": {k: v for k, v in fields.items() if k not in _FREE}, **numbers}


def write(destination: Any, prefix: str, entry: dict[str, Any]) -> None:
    """Put the entry of a module into a state dict that torch is making.

    Args:
        destination: the state dict; a plain dict, which somebody may give, keeps no metadata
        prefix: what the names of the module's tensors begin with
    """
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        metadata[prefix[:-1]][METADATA_KEY] = entry


def entries(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries of a state dict by the name of the module."""
    metadata = getattr(state_dict, "_metadata", {})
    return {name: entry[METADATA_KEY] for name, entry in metadata.items() if METADATA_KEY in entry}


def variant_of(entry: Mapping[str, Any], impl: str) -> Variant:
    """Return the variant that an entry tells of; raise ValueError if it cannot be built here."""
    return Variant.of({**entry["variant"], "impl": impl})


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
    found = {name: option.default for name, option in OPTIONS.items() if name not in _FREE}
    found |= {**entry, **entry["variant"]}
    if found["value_head_dim"] is None:
        found["value_head_dim"] = found["head_dim"]
    return found
