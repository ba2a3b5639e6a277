"""Which tokens of a batch are padding, on each side of a model."""

from collections.abc import Mapping
from typing import Any

import torch
from fairseq.data import Dictionary
from torch import Tensor


def target_dictionary(task: Any) -> Dictionary:
    """Return the dictionary of what a decoder reads; some tasks have that of the source alone."""
    if task.target_dictionary is None:
        return task.source_dictionary
    return task.target_dictionary


def not_padding(task: Any, net_input: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return which tokens are no padding, for the layers of each side.

    Args:
        task: the task of fairseq, for its dictionaries
        net_input: the model's inputs in a batch: `src_tokens` [B, N], and, if the model has an
            encoder and a decoder, `prev_output_tokens` [B, Nq]

    Returns:
        for "encoder" and "decoder" bool [B, Nq], True where a query is no padding. A model with
        one side reads `src_tokens` there, so both are equal.
    """
    source = net_input["src_tokens"].ne(task.source_dictionary.pad())
    target = source
    if "prev_output_tokens" in net_input:
        target = net_input["prev_output_tokens"].ne(target_dictionary(task).pad())
    return {"encoder": source, "decoder": target}


def as_bool(mask: Tensor | None) -> Tensor | None:
    """Return a padding mask as booleans, non-zero as True.

    In its cache fairseq keeps it as floats, and callers of a module may pass numbers.
    """
    return None if mask is None else mask.to(torch.bool)
