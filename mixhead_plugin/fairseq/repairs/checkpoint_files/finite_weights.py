"""Refuse weights that are NaN or infinite, which fairseq loads and trains on."""

from typing import Any

import torch

from mixhead_plugin.errors import OptionError


def check_finite(path: str, model: dict[str, Any]) -> None:
    """Refuse weights that are NaN or infinite."""
    bad = [name for name, value in model.items() if is_bad(name, value)]
    if bad:
        raise OptionError(
            f"{path}: has NaN or infinite values in {len(bad)} of {len(model)} tensors, the first "
            f"is {bad[0]}; must be finite, take an earlier checkpoint"
        )


def is_bad(name: str, value: Any) -> bool:
    """Return True if an entry of a model's state is a tensor with NaN or infinite numbers."""
    if not isinstance(value, torch.Tensor):
        return False
    # Nobody reads their numbers: fairseq takes only the dtype of _float_tensor, and its DynamicConv
    # never sets the conv_bias of a layer without a bias.
    if name.endswith(("_float_tensor", "conv_bias")):
        return False
    if not value.is_floating_point() and not value.is_complex():
        return False
    # A finite sum has finite terms, and is read 20 times faster. A sum that is not finite may have
    # overflown, so only then look at each term.
    return not bool(value.sum().isfinite()) and not bool(value.isfinite().all())
