"""Measure how many dimensions matrices of attention weights have; needs torch and nothing else."""

import torch
from torch import Tensor

CHUNK_BYTES = 256 * 2**20  # size of the float64 matrices that are decomposed at once


def singular_values(matrices: Tensor) -> Tensor:
    """Return the singular values [..., min(n, m)] of matrices [..., n, m], descending, in float64 on the CPU."""
    flat = matrices.flatten(0, -3)  # [matrices, n, m]
    size = max(1, CHUNK_BYTES // (8 * flat.shape[-2] * flat.shape[-1]))
    values = [torch.linalg.svdvals(chunk.cpu().double()) for chunk in flat.split(size)]
    return torch.cat(values).unflatten(0, matrices.shape[:-2])


def cumulative(values: Tensor) -> Tensor:
    """Return (s_1 + ... + s_k) / (s_1 + ... + s_n) for each k (mixhead figure 1): [..., n] -> [..., n]."""
    return values.cumsum(-1) / values.sum(-1, keepdim=True)


def effective_rank(values: Tensor) -> Tensor:
    """Return exp of the entropy of s_k / sum s (Roy and Vetterli 2007): [..., n] -> [...]; NaN for zeros."""
    shares = values / values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def log_spectrum(weights: Tensor) -> Tensor:
    """Return the singular values [..., min(n, m)] of log P minus the mean of each row, divided by the largest.

    Softmax of queries and keys of size D gives at most D values above 0. NaN for a matrix with a weight that has no
    logarithm: it is hidden, 0 or negative.
    """
    logs = weights.double().log()
    centred = logs - logs.mean(-1, keepdim=True)
    defined = centred.isfinite().all(-1).all(-1)  # [...]
    values = singular_values(centred.where(defined[..., None, None], 0))
    return (values / values[..., :1]).where(defined[..., None].cpu(), torch.nan)


def rank_over_heads(weights: Tensor) -> Tensor:
    """Return the effective rank of the rows {P_j[t]} over the heads j: [..., H, Nq, Nk] -> [..., Nq]; NaN for zeros."""
    return effective_rank(singular_values(weights.transpose(-3, -2)))
