"""What all parts of the report of a GPU are given."""

from pathlib import Path
from typing import NamedTuple

import torch


class Settings(NamedTuple):
    """What the whole report is about.

    Args:
        device: "cuda", or "cpu", where triton interprets its kernels and nothing of the figures
            counts
        quick: a rehearsal: few steps, small sizes, two rounds
        compiled: a file of what the part `compile` has compiled in time, a line each
        tests: files or tests for pytest, in order; if none are given, all of marked_tests.FILES
    """

    device: str
    quick: bool
    compiled: Path
    tests: tuple[str, ...] = ()


def synchronize(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()
