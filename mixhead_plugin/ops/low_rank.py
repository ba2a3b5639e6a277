"""A mixing by factors: M_t = I + left_t right_t^T + diag(diagonal_t) for each query t.

M[j, i] is the weight of source head j in mixed head i, as everywhere. So one mixed head is

    Pbar_i = (1 + diagonal_i) P_i + sum_r right[i, r] C_r        C_r = sum_j left[j, r] P_j

For H heads and R columns these are (2 R + 1) H multiplications for each pair of a query and a key,
where the matrix takes H^2. The matrix is built only for who reads it: `LowRank.matrix`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops.precision import without_autocast


class LowRank(NamedTuple):
    """The factors of one M for each query; any floating dtypes, which may differ.

    Attributes:
        left: [B, Nq, H, R]
        right: [B, Nq, H, R]
        diagonal: [B, Nq, H]; what is added to the identity
    """

    left: Tensor
    right: Tensor
    diagonal: Tensor

    def matrix_dtype(self) -> torch.dtype:
        """Return the dtype of M: float64 if a factor has it, else float32."""
        return torch.float64 if any(x.dtype == torch.float64 for x in self) else torch.float32

    def matrix(self) -> Tensor:
        """Return M [B, Nq, H, H], in float32 or better."""
        dtype = self.matrix_dtype()
        with without_autocast(self.left.device):
            left, right, diagonal = (factor.to(dtype) for factor in self)
            return torch.matmul(left, right.transpose(-2, -1)) + torch.diag_embed(1 + diagonal)


def mix_by_factors(weights: Tensor, left: Tensor, right: Tensor, diagonal: Tensor) -> Tensor:
    """Return Pbar_i = sum_j M[j, i] P_j for P [B, H, Nq, Nk] and the factors of M, without M."""
    left = left.to(weights.dtype)
    right = right.to(weights.dtype)
    diagonal = diagonal.to(weights.dtype)

    by_query = weights.transpose(1, 2)  # [B, Nq, H, Nk]
    sums = torch.matmul(left.transpose(-2, -1), by_query)  # C, [B, Nq, R, Nk]
    mixed = (1 + diagonal)[..., None] * by_query + torch.matmul(right, sums)
    return mixed.transpose(1, 2)
