"""Find the module of the first NaN gradient by hooks on tensors, not on modules.

fairseq hooks the backward pass of each module. torch refuses this for modules that return a dict, as encoders do. The
search ends with StopIteration, and the user does not learn that gradients were NaN.
"""

from functools import partial

import torch
from fairseq.nan_detector import NanDetector

from mixhead_plugin.repairs.replace import replaces


@replaces(NanDetector, "add_hooks")
def _add_hooks(original, detector: NanDetector, module: torch.nn.Module) -> None:
    original(detector, module)
    if detector.backward:
        detector.bhooks.pop().remove()
        detector.bhooks.append(module.register_forward_hook(partial(_hook_output, detector)))


def _hook_output(detector: NanDetector, module: torch.nn.Module, inputs, output) -> None:
    """Hook the gradients of the output's tensors."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            output.register_hook(lambda gradient: detector.bhook_fn(module, None, gradient))
    elif isinstance(output, (dict, list, tuple)):
        for part in output.values() if isinstance(output, dict) else output:
            _hook_output(detector, module, inputs, part)
