"""Find the module of the first NaN gradient, even if modules return a dict.

fairseq's search raises StopIteration if a module returns a dict, as encoders do: torch's backward hooks accept no dict.
The user does not learn that gradients were NaN. The repair hooks the tensors of an output instead.
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
