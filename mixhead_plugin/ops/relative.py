"""Scores and gains that depend on the distance between a query and a key."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class RelativeScores(NamedTuple):
    """Scores by distance, which are added to those of queries and keys.

    The score of query t and key k gets query[b, h, t] . key[h, p], with p = k - t + Nq - 1.

    `scale` does not apply to them. Transformer-XL's position term has the head size as R, T5's bias
    has R = 1. Row 0 of `key` belongs to the largest distance, from the last query to the first key.
    With causal masking and Nq <= Nk the first Nk rows are enough; without a row, a distance adds 0.

    Attributes:
        query: [B, H, Nq, R], in the dtype of the attention's queries
        key: [H, P, R] with P = Nk or Nq + Nk - 1, in the same dtype
    """

    query: Tensor
    key: Tensor


def relative_scores(query: Tensor, key: Tensor, n_keys: int) -> Tensor:
    """Return the scores [B, H, Nq, Nk] of the two tensors of `RelativeScores`, in their dtype."""
    n_queries = query.size(2)
    by_distance = torch.matmul(query, key.transpose(1, 2))  # [B, H, Nq, P]
    # P may be Nk alone. A distance without a row adds 0.
    by_distance = F.pad(by_distance, [0, n_queries])
    positions = _positions(n_queries, n_keys, by_distance.device)
    shape = [by_distance.size(0), by_distance.size(1), n_queries, n_keys]
    return by_distance.gather(3, positions.expand(shape))


def toeplitz(by_distance: Tensor, n_queries: int, n_keys: int) -> Tensor:
    """Return [H, Nq, Nk] from [H, Nq + Nk - 1], which has one number for each distance."""
    return by_distance[:, _positions(n_queries, n_keys, by_distance.device)]


def _positions(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """Return p = k - t + Nq - 1, [Nq, Nk]."""
    queries = torch.arange(n_queries, device=device)
    return torch.arange(n_keys, device=device) - queries[:, None] + (n_queries - 1)
