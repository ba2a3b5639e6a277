"""Attention as functions of tensors; needs torch and nothing else."""

from mixhead_plugin.ops.api import attention
from mixhead_plugin.ops.choice import IMPLEMENTATIONS, implementation_problem
from mixhead_plugin.ops.low_rank import LowRank
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.relative import RelativeScores

__all__ = [
    "IMPLEMENTATIONS",
    "NORMALIZERS",
    "LowRank",
    "RelativeScores",
    "attention",
    "implementation_problem",
]
