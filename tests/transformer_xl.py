"""Provide tiny Transformer-XL models and windows of text."""

from argparse import Namespace
from typing import Any

import torch
from fairseq.models import build_model
from torch import Tensor

from tests.helpers import VOCABULARY, shake, task

TINY_XL = {
    "n_layer": 2,
    "d_model": 12,
    "n_head": 3,
    "d_head": 5,  # times n_head is not d_model
    "d_inner": 10,
    "mem_len": 6,
    "cutoffs": [9, 20],
    "max_target_positions": 8,
    "tokens_per_sample": 8,
}
XL_SIZES = [
    "--n-layer=2",
    "--d-model=12",
    "--n-head=3",
    "--d-head=5",
    "--d-inner=10",
    "--cutoffs=7,10",
]


def build_xl(arch: str = "mixhead_transformer_xl", seed: int = 1, **flags: Any) -> torch.nn.Module:
    """Build a model by fairseq's factory, with large parameters.

    They are so large that every term of the model matters.
    """
    torch.manual_seed(seed)
    model = build_model(Namespace(arch=arch, **{**TINY_XL, **flags}), task())
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "head_mixing" not in name:
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return shake(model)


def text(length: int, batch: int = 2) -> Tensor:
    """Return words of all bands, [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length))


def log_probs(model: torch.nn.Module, tokens: Tensor, window: int | None = None) -> Tensor:
    """Return log-probabilities, [B, N, vocabulary]."""
    return model.get_normalized_probs(model(tokens, window=window), log_probs=True)


def in_windows(model: torch.nn.Module, tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return the log-probabilities of a text that is fed window by window."""
    parts = [log_probs(model, part, i) for i, part in enumerate(tokens.split(lengths, 1))]
    return torch.cat(parts, 1)
