"""Refuse a checkpoint whose units have other flags, in one line, before torch lists tensors."""

from typing import Any

from torch import Tensor, nn

from mixhead_plugin.errors import CheckpointError
from mixhead_plugin.fairseq.checkpoint import compare, records_in_metadata
from mixhead_plugin.fairseq.checkpoint_from_tensors import possible_values, tensors_of
from mixhead_plugin.fairseq.checkpoint_messages import (
    warn_of_what_leaves_no_trace,
    without_trace,
)
from mixhead_plugin.fairseq.models.gated_attention.unit import GatedAttentionUnit
from mixhead_plugin.parts import PARTS


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
            flags |= without_trace(unit.variant)
        flags.discard(("relative_position", "rotary"))  # every unit has them
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
        wanted = unit.record()
        saved = {**_record_from_tensors(name, tensors, wanted), **records[name]}
        compare(model, name, saved, wanted, in_scope=True)


def _record_from_tensors(
    name: str, tensors: dict[str, Tensor], wanted: dict[str, Any]
) -> dict[str, Any]:
    """Return a record from the tensors of a unit alone.

    For what they do not tell, the value of the model is taken, so that no difference is seen.

    Args:
        name: the unit's name in the model, such as decoder.layers.0
        tensors: the unit's tensors in the checkpoint, by their names in it
        wanted: the record of the unit in the model

    Raises:
        CheckpointError: tensors of a part that this version does not have
    """
    record: dict[str, Any] = {}
    for option, table in PARTS.items():
        values = possible_values(name, option, table, tensors_of(option, tensors))
        own = wanted[option]
        record[option] = own if own in values else values[0]

    inner_dim, embed_dim = tensors["v_proj.weight"].shape
    gain = tensors.get("relative_gain.weight")  # [1, 2 * clip + 1]
    return {
        **record,
        "gau_query_dim": tensors["shared_proj.weight"].shape[0],
        "gau_expansion": inner_dim // embed_dim,
        "relative_gain": 0 if gain is None else gain.shape[1] // 2,
    }
