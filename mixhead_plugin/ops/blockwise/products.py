"""Products of matrices, in the order that is fast."""

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.block import NARROW


def product(a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """Return alpha A B, [batch, m, n].

    Args:
        a: A, [batch, m, k]
        b: B, [batch, k, n]
        alpha: a number
        out: memory for the result, of any strides; None for new memory
    """
    if a.is_cpu and b.shape[2] < NARROW <= a.shape[1]:
        # MKL is slow where the result has few columns. (B^T A^T)^T has few rows instead.
        found = product(b.transpose(1, 2), a.transpose(1, 2), alpha).transpose(1, 2)
        return found if out is None else out.copy_(found)
    if out is None:
        out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    # beta = 0: what `out` holds, even NaN, does not count
    return torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
