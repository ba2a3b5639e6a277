"""What depends on how far a key lies from its query: scores that are added, gains on the weights."""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor


class RelativeScores(NamedTuple):
    """What is added to the scores of queries t and keys k, query[b, h, t] . key[h, p] with p = k - t + Nq - 1.

    `scale` does not act on them. Transformer-XL's position term is one with D the head size, a bias for each distance
    (T5) one with D = 1. Row 0 of `key` is for the first key as the last query sees it; row Nk - 1 for the key at the
    query's own place, if the last query stands at the last key. So the first Nk rows are all that causal queries need.
    """

    query: Tensor  # [B, H, Nq, D]
    key: Tensor  # [H, P, D], P = Nk or Nq + Nk - 1; what lies beyond adds 0


def relative_scores(relative: RelativeScores, n_keys: int) -> Tensor:
    """[B, H, Nq, Nk], in the dtype of `relative`."""
    n_queries = relative.query.size(2)
    every = F.pad(torch.matmul(relative.query, relative.key.transpose(1, 2)), [0, n_queries])  # [B, H, Nq, P + Nq]
    places = _places(n_queries, n_keys, every.device)
    return every.gather(3, places.expand(every.size(0), every.size(1), n_queries, n_keys))


def toeplitz(by_distance: Tensor, n_queries: int, n_keys: int) -> Tensor:
    """[H, Nq, Nk] of [H, Nq + Nk - 1], one number for each distance."""
    return by_distance[:, _places(n_queries, n_keys, by_distance.device)]


def _places(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    """p = k - t + Nq - 1, [Nq, Nk]"""
    queries = torch.arange(n_queries, device=device)
    return torch.arange(n_keys, device=device) - queries[:, None] + (n_queries - 1)


def problem(relative: Optional[RelativeScores], query: Tensor, n_keys: int) -> str:
    """What is wrong with the shapes for queries [B, H, Nq, D], in a few words; empty if nothing is."""
    if relative is None:
        return ""
    batch, heads, n_queries = query.shape[:3]
    if relative.query.dim() != 4 or relative.query.shape[:3] != query.shape[:3]:
        return f"relative.query {list(relative.query.shape)}: must be {[batch, heads, n_queries, 'D']}"
    size = relative.query.shape[3]
    lengths = (n_keys, n_queries + n_keys - 1)
    if relative.key.dim() != 3 or relative.key.shape not in ((heads, length, size) for length in lengths):
        return (
            f"relative.key {list(relative.key.shape)}: must be {[heads, lengths[0], size]} or "
            f"{[heads, lengths[1], size]}"
        )
    return ""
