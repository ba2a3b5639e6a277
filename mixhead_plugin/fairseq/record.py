"""Let a checkpoint tell with which flags a module was trained.

Tensors do not show it: those of softmax and of l2 are alike. So a state dict has a record of each
module in its metadata, which fairseq saves with the tensors. `checkpoint.py` compares it.
"""

from typing import Any

from torch import nn

from mixhead_plugin.parts import PARTS
from mixhead_plugin.parts.record import metadata_of

# For each flag of a part, its values. `checkpoint_from_tensors.py` recognises by these tables what
# a checkpoint has. The Synthesizer adds its own table where it is defined.
RECORDED_TABLES: dict[str, Any] = dict(PARTS)


class Recorded(nn.Module):
    """A mixin before a module whose flags a checkpoint must share."""

    def record(self) -> dict[str, Any]:
        """Return the record: what a checkpoint must share with this module, by names of flags."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata_of(destination, prefix).update(self.record())
