"""Let a checkpoint tell with which flags a module was trained.

Tensors do not show it: those of softmax and of l2 are alike. So a state dict has a record of each
module in its metadata, which fairseq saves with the tensors. `checkpoint.py` compares it.
"""

from typing import Any, NamedTuple

from torch import nn

from mixhead_plugin.parts import OPTIONS, Variant
from mixhead_plugin.parts.record import metadata_of


class OwnFlag(NamedTuple):
    """A flag of one model alone, which adds modules to an attention as the flags of parts do.

    In a record, the value of an attention without these modules is `none`.
    """

    # For each value, a row whose `parameters` are the names of its tensors and modules.
    table: dict[str, Any]
    # What an attention with these modules should use where the checkpoint has none of them ...
    to_be_without: str
    # ... and what another attention should use where the checkpoint has them.
    to_be_with: str


# By name. The module of each such attention adds its flags here; models that others add may, too.
OWN_FLAGS: dict[str, OwnFlag] = {}


def record_of(variant: Variant) -> dict[str, Any]:
    """Return what a checkpoint must share with an attention of a variant, but for its sizes."""
    record: dict[str, Any] = {"attention_normalizer": variant.normalizer}
    for name, row in variant.part_kinds().items():
        record[name] = getattr(variant, name)
        for field in row.options:
            if OPTIONS[field].in_record:
                record[field] = getattr(variant, field)
    record["relative_gain"] = variant.relative_gain
    return record


class Recorded(nn.Module):
    """A mixin before a module whose flags a checkpoint must share."""

    def record(self) -> dict[str, Any]:
        """Return the record: what a checkpoint must share with this module, by names of flags."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata_of(destination, prefix).update(self.record())
