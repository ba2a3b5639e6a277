"""Search for NaN gradients without hooks on the backward pass.

fairseq hooks the backward pass of each module, which torch refuses for those that return a dict.
The search ends with StopIteration, and nobody learns that gradients were NaN.
"""

from fairseq.nan_detector import NanDetector
from torch import nn

from mixhead_plugin.fairseq.replace import replaces


@replaces(NanDetector, "add_hooks")
def _add_hooks(original, detector: NanDetector, module: nn.Module) -> None:
    original(detector, module)
    if detector.backward:
        detector.bhooks.pop().remove()  # fairseq has just added it for this module
