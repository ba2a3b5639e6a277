"""Refuse a checkpoint whose units have other flags, in one line, before torch lists tensors."""

from typing import Any

from torch import Tensor, nn

from mixhead_plugin.errors import CheckpointError, option_name
from mixhead_plugin.fairseq.checkpoint import records_in_metadata
from mixhead_plugin.fairseq.checkpoint_from_tensors import tensors_of
from mixhead_plugin.fairseq.checkpoint_messages import (
    difference,
    warn_of_what_leaves_no_trace,
    without_trace,
)
from mixhead_plugin.fairseq.models.gated_attention.unit import GatedAttentionUnit


def check_units(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    """Refuse a `state_dict` whose gated attention units are not those of `model`.

    A checkpoint of the plugin has a record of each unit beside its tensors, see
    `GatedAttentionUnit.record`. An average of several has none: then only tensors can contradict
    the model, and a flag that leaves none is warned of.

    Raises:
        CheckpointError: with the flag that would fit
    """
    units = {}
    for name, module in model.named_modules():
        if isinstance(module, GatedAttentionUnit):
            units[name] = module

    records = records_in_metadata(units, state_dict)
    if not any(records.values()):
        flags = set()
        for unit in units.values():
            for option, value in without_trace(unit.variant):
                if option in unit.record():  # rotary positions are in every unit
                    flags.add((option, value))
        warn_of_what_leaves_no_trace(flags)

    for name, unit in units.items():
        tensors = tensors_of(name, state_dict)
        if not tensors:  # fairseq reports missing layers
            continue
        if "shared_proj.weight" not in tensors:
            raise CheckpointError(
                f"checkpoint does not fit: its {name} is no gated attention unit; use another "
                "--arch"
            )
        saved = {**_flags_from_tensors(tensors), **records[name]}
        wanted = unit.record()
        for option, value in wanted.items():
            if saved.get(option, value) != value:
                problem = difference(option, option_name(option), saved, wanted, in_scope=True)
                raise CheckpointError(
                    f"checkpoint does not fit: its {name} was trained with {problem}"
                )


def _flags_from_tensors(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return what the shapes of a unit's tensors tell of its flags."""
    inner_dim, embed_dim = tensors["v_proj.weight"].shape
    gain = tensors.get("relative_gain.weight")  # [1, 2 * clip + 1]
    return {
        "gau_query_dim": tensors["shared_proj.weight"].shape[0],
        "gau_expansion": inner_dim // embed_dim,
        "relative_gain": 0 if gain is None else gain.shape[1] // 2,
    }
