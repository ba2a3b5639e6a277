"""Two penalties on similar heads: on the matrix that mixes them, and on their attention matrices.

Both take any floating dtype, compute in float32 or float64, and return a scalar. `real`, bool [B,
Nq], is False where a query is padding. The penalty is 0 where no position is real.
"""

import torch
from torch import Tensor

from mixhead_plugin.ops.reference import upcast


def orthogonal_penalty(mixing: Tensor, real: Tensor) -> Tensor:
    """Return ||M^T M - I||_F^2 (mixhead eq. 16) for M [H, H'].

    For M [B, Nq, H, H'] it is the mean over the real queries.
    """
    mixing = upcast(mixing)
    if mixing.dim() == 4:
        mixing = mixing.masked_fill(~real[:, :, None, None], 0.0)  # keeps out NaN as well
    identity = torch.eye(mixing.shape[-1], dtype=mixing.dtype, device=mixing.device)
    gram = torch.matmul(mixing.transpose(-2, -1), mixing)  # [H', H'] or [B, Nq, H', H']
    distance = (gram - identity).square().sum((-2, -1))  # [] or [B, Nq]
    return distance if mixing.dim() == 2 else (distance * real).sum() / real.sum().clamp(min=1)


def rank_penalty(weights: Tensor, real: Tensor) -> Tensor:
    """Return the sum of two means over pairs of heads (mixhead eq. 20).

    They are those of ||P_i P_j^T||_F^2 and of ||P_i^T P_j||_F^2.

    The weights P [B, H, Nq, Nk], H >= 2, are those before mixing and dropout. The penalty is
    averaged over sentences. ||P_i P_j^T||^2 is the inner product of P_i^T P_i and P_j^T P_j. So
    each head needs one product of matrices, not each pair: 4 B H Nq Nk (Nq + Nk) operations
    forward.
    """
    weights = upcast(weights).masked_fill(~real[:, None, :, None], 0.0)
    heads, sentences = weights.shape[1], real.any(1).sum().clamp(min=1)
    transposed = weights.transpose(2, 3)  # [B, H, Nk, Nq]
    same = torch.eye(heads, dtype=torch.bool, device=weights.device)
    total = weights.new_zeros(())
    for gram in (torch.matmul(transposed, weights), torch.matmul(weights, transposed)):
        flat = gram.flatten(2)  # [B, H, Nk * Nk], then [B, H, Nq * Nq]
        # [B, H, H]: ||P_i P_j^T||^2, then ||P_i^T P_j||^2
        pairs = torch.matmul(flat, flat.transpose(1, 2))
        total = total + pairs.masked_fill(same, 0.0).sum()
    return total / (heads * (heads - 1)) / sentences
