"""What is timed, its sizes, and why it cannot be."""

import importlib.util
import os
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

from mixhead_plugin.ops.api import implementation_problem

HAS_FAIRSEQ = importlib.util.find_spec("fairseq") is not None

FAILED = "failed: "  # how the reason of a row starts where something is wrong, and not only impossible here

Row = Dict[str, Any]  # of a table and of the CSV; one with a `reason` was not measured


class Unfinished(List[Row]):
    """What is known of a table so far: to be kept if the command is stopped, until the next table replaces it."""


class Contender(NamedTuple):
    """Something to be timed, and its forward pass alone if there is another."""

    full: Callable[[], Any]
    forward: Optional[Callable[[], Any]] = None


class Level(NamedTuple):
    """Contenders that take turns, and the names of those that cannot, each with the reason."""

    contenders: Dict[str, Contender]
    reasons: Dict[str, str]


class Shape(NamedTuple):
    batch: int
    heads: int
    length: int
    head_dim: int


def triton_problem(device: str) -> str:
    """Why the fused kernels cannot be timed here; empty if they can."""
    if problem := implementation_problem("triton"):
        return problem
    if device != "cuda":
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return "interpreted on a CPU, where its time says nothing" if interpreted else "needs --device cuda"
    return ""


def unmeasured(level: str, shape: Shape, reasons: Dict[str, str]) -> List[Row]:
    return [dict(level=level, name=name, **shape._asdict(), reason=reason) for name, reason in reasons.items()]


def level_left_out(level: str, reason: str) -> Row:
    """For a whole level that cannot be, whose sizes nobody has asked for"""
    return dict(level=level, name="everything", reason=reason)


def one_line(error: BaseException) -> str:
    """What an error says first"""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
