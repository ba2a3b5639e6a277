"""Attention as functions of tensors; needs torch and nothing else."""

from mixhead_plugin.ops.api import IMPLEMENTATIONS, attention, implementation_problem
from mixhead_plugin.ops.normalizers import NORMALIZERS

__all__ = ["IMPLEMENTATIONS", "NORMALIZERS", "attention", "implementation_problem"]
