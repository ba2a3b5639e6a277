"""Two penalties on similar heads: on the matrix that mixes them, and on their attention matrices.

Both take any floating dtype, compute in float32 or float64, and return a scalar. Autocast would
multiply in half precision, so they are called outside of it. `real`, bool [B, Nq], is False where a
query is padding. The penalty of a batch without a real query is 0, except that of an M [H, H']: all
queries share it, so it does not depend on `real`.
"""

import torch
from torch import Tensor

from mixhead_plugin.ops.low_rank import LowRank
from mixhead_plugin.ops.precision import upcast


def orthogonal_penalty(mixing: Tensor | LowRank, real: Tensor) -> Tensor:
    """Return ||M^T M - I||_F^2 (mixhead eq. 16).

    Args:
        mixing: M [H, H']; or M [B, Nq, H, H'], or the factors of such M. For the latter two the
            mean over the real queries is returned.
        real: [B, Nq]; an M [H, H'] does not need it
    """
    if isinstance(mixing, LowRank):
        # Zeros for padding, and not a product with `real`, because 0 * NaN is NaN.
        padding = ~real[:, :, None, None]
        left = upcast(mixing.left).masked_fill(padding, 0.0)
        right = upcast(mixing.right).masked_fill(padding, 0.0)
        diagonal = upcast(mixing.diagonal).masked_fill(padding[..., 0], 0.0)
        distance = _distance_of_factors(left, right, diagonal)
        return _mean_of_real(distance, real)

    mixing = upcast(mixing)
    if mixing.dim() == 4:
        mixing = mixing.masked_fill(~real[:, :, None, None], 0.0)
    identity = torch.eye(mixing.shape[-1], dtype=mixing.dtype, device=mixing.device)
    gram = torch.matmul(mixing.transpose(-2, -1), mixing)  # [H', H'] or [B, Nq, H', H']
    distance = (gram - identity).square().sum((-2, -1))  # [] or [B, Nq]
    if mixing.dim() == 2:
        return distance
    return _mean_of_real(distance, real)


def _mean_of_real(distance: Tensor, real: Tensor) -> Tensor:
    """Return the mean of [B, Nq] over the real queries; 0 if there are none."""
    return (distance * real).sum() / real.sum().clamp(min=1)


def _distance_of_factors(left: Tensor, right: Tensor, diagonal: Tensor) -> Tensor:
    """Return ||M^T M - I||_F^2 [B, Nq] of M = D + U V^T, D = I + diag(d), without M.

    With E = D^2 - I, which is diagonal, X = [V, D U] and C = [[U^T U, I], [I, 0]]

        M^T M - I = E + V U^T D + D U V^T + V U^T U V^T = E + X C X^T

    so the squared norm is sum E^2 + 2 sum_i E_i (X C X^T)_ii + trace(C X^T X C X^T X). These are
    about 12 R^2 H multiplications for each query. By M they are H^3. Nothing of the size of 1
    cancels: near the identity every term is small.

    Args:
        left: U, [B, Nq, H, R]
        right: V, [B, Nq, H, R]
        diagonal: d, [B, Nq, H]
    """
    rank = left.shape[-1]
    scaled = (1 + diagonal)[..., None] * left  # D U
    both = torch.cat([right, scaled], -1)  # X, [B, Nq, H, 2 R]

    gram = torch.matmul(left.transpose(-2, -1), left)  # U^T U, [B, Nq, R, R]
    identity = torch.eye(rank, dtype=left.dtype, device=left.device).expand_as(gram)
    above = torch.cat([gram, identity], -1)
    below = torch.cat([identity, torch.zeros_like(gram)], -1)
    core = torch.cat([above, below], -2)  # C, [B, Nq, 2 R, 2 R]

    spread = torch.matmul(both, core)  # X C, [B, Nq, H, 2 R]
    of_diagonal = diagonal * (2 + diagonal)  # E
    crossed = (of_diagonal * (spread * both).sum(-1)).sum(-1)  # [B, Nq]
    inner = torch.matmul(both.transpose(-2, -1), spread)  # X^T X C, [B, Nq, 2 R, 2 R]
    squared = (inner * inner.transpose(-2, -1)).sum((-2, -1))
    return of_diagonal.square().sum(-1) + 2 * crossed + squared


def rank_penalty(weights: Tensor, real: Tensor) -> Tensor:
    """Return the means of ||P_i P_j^T||_F^2 and of ||P_i^T P_j||_F^2 over pairs, added (eq. 20).

    The pairs are those of different heads. The penalty is averaged over sentences.

    ||P_i P_j^T||^2 is the inner product of P_i^T P_i and P_j^T P_j. So each head needs one product
    of matrices, not each pair: 4 B H Nq Nk (Nq + Nk) operations forward.

    Args:
        weights: P, [B, H, Nq, Nk], H >= 2, before mixing and dropout
        real: [B, Nq]
    """
    weights = upcast(weights).masked_fill(~real[:, None, :, None], 0.0)
    heads = weights.shape[1]
    sentences = real.any(1).sum().clamp(min=1)
    transposed = weights.transpose(2, 3)  # [B, H, Nk, Nq]
    same = torch.eye(heads, dtype=torch.bool, device=weights.device)
    total = weights.new_zeros(())
    for gram in (torch.matmul(transposed, weights), torch.matmul(weights, transposed)):
        flat = gram.flatten(2)  # [B, H, Nk * Nk], then [B, H, Nq * Nq]
        # [B, H, H]: ||P_i P_j^T||^2, then ||P_i^T P_j||^2
        pairs = torch.matmul(flat, flat.transpose(1, 2))
        total = total + pairs.masked_fill(same, 0.0).sum()
    return total / (heads * (heads - 1)) / sentences
