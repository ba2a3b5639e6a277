"""Check theorem 1 of 'Low-Rank Bottleneck in Multi-head Attention Models'.

The checks are computations that can fail.

Positions are rows here, columns in the paper: X is [n, d], and the rows of P sum to 1. All tensors
are float64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops import attention


class Check(NamedTuple):
    """A number, and the limit that the theory gives for it."""

    name: str
    value: float
    limit: float
    above: bool  # the value must be above the limit; if False, below

    @property
    def holds(self) -> bool:
        return self.value > self.limit if self.above else self.value < self.limit


def project(embedding: Tensor, projection: Tensor) -> Tensor:
    """Multiply X [..., n, d] by each head's W [..., H, d, D]; return [..., H, n, D]."""
    return embedding.unsqueeze(-3) @ projection


def scores_of(weights: Tensor, normalizer: str) -> Tensor:
    """Return scores [..., n, n] that the normalizer turns into `weights` p.

    The weights must be positive with row sums 1.

    softmax: s = log p minus the mean of its row. A constant in a row changes no weight. Without it
    the rank is at most n - 1. sigsoftmax: s solves exp(s) sigmoid(s) = n p, a quadratic equation in
    exp(s).
    """
    if normalizer == "softmax":
        return _centred_log(weights)
    if normalizer == "sigsoftmax":
        scaled = weights * weights.shape[-1]
        return ((scaled + (scaled.square() + 4 * scaled).sqrt()) / 2).log()
    raise ValueError(
        f"normalizer {normalizer!r}: must be softmax or sigsoftmax, which have a construction"
    )


def construct(
    embedding: Tensor, weights: Tensor, head_size: int, normalizer: str
) -> tuple[Tensor, Tensor]:
    """Return W_Q and W_K of a head with these weights (theorem 1, eqs 4 to 7).

    The scores are cut to rank `head_size` by keeping the largest singular values. The weights are
    exact if head_size is at least n; for softmax n - 1 is enough.

    Args:
        embedding: X [..., n, d] of full row rank
        weights: P [..., H, n, n], positive, every row sums to 1
        head_size: D
        normalizer: softmax or sigsoftmax

    Returns:
        W_Q and W_K, [..., H, d, D] each
    """
    left, values, right = torch.linalg.svd(scores_of(weights, normalizer) * head_size**0.5)
    kept = min(head_size, values.shape[-1])
    roots = values[..., None, :kept].sqrt()  # [..., H, 1, kept]
    inverse = torch.linalg.pinv(embedding).unsqueeze(-3)  # [..., 1, d, n]
    pad = (0, head_size - kept)
    query = inverse @ (left[..., :kept] * roots)
    key = inverse @ (right.mT[..., :kept] * roots)
    return torch.nn.functional.pad(query, pad), torch.nn.functional.pad(key, pad)


def smallest_error(weights: Tensor, head_size: int) -> Tensor:
    """Return a lower bound [...] of ||A - P||_F for softmax heads of that size.

    It is 0 from n - 1 on.

    log A is the scores plus a constant in each row. So the centred log A has rank D at most. Let
    t^2 be the sum of the squared singular values of the centred log P after the first D. The
    distance between both is at least t. Now let ||A - P||_F = e. For each element
    |log a - log p| <= |a - p| / (min p - e). Hence t <= e / (min p - e).
    """
    tail = torch.linalg.svdvals(_centred_log(weights))[..., head_size:].square().sum(-1).sqrt()
    if head_size >= weights.shape[-1] - 1:  # the tail is rounding
        return torch.zeros_like(tail)
    return weights.amin((-2, -1)) * tail / (1 + tail)


def checks(positions: int) -> list[Check]:
    """Return all checks; `positions` is n, except where the paper gives n."""
    return [*_construction(positions), *_counterexample(), *_full_rank(positions)]


def _centred_log(weights: Tensor) -> Tensor:
    log = weights.log()
    return log - log.mean(-1, keepdim=True)


def _construction(n: int) -> list[Check]:
    """Check theorem 1, first part: a head that is large enough gives every positive P."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(2 * n, n, generator=generator, dtype=torch.float64).T  # [n, 2n]
    target = torch.empty(1, n, n, dtype=torch.float64).exponential_(generator=generator)
    target /= target.sum(-1, keepdim=True)  # uniform over all stochastic matrices
    results = []
    cases = [("softmax", n), ("softmax", 2 * n), ("softmax", n - 1), ("sigsoftmax", n)]
    for normalizer, head_size in cases:
        query, key = construct(embedding, target, head_size, normalizer)
        error = (_weights(embedding, query, key, normalizer) - target).abs().max()
        head = f"{normalizer}, n {n}, head size {head_size}"
        name = f"theorem 1: {head}: largest error of the construction"
        results.append(Check(name, float(error), 1e-9, above=False))
    return results


def _counterexample() -> list[Check]:
    """Check theorem 1, second part.

    For n = 2 and X = [1, 0] of size 1, the second row always has equal scores.
    """
    embedding = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    target = torch.tensor([[0.5, 0.5], [0.75, 0.25]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    results = []
    for normalizer in ("softmax", "sigsoftmax"):
        # 10,000 heads with projections from tiny to huge.
        query, key = torch.randn(2, 10000, 1, 1, generator=generator, dtype=torch.float64)
        size = torch.logspace(-3, 2, 10000, dtype=torch.float64)[:, None, None]
        weights = _weights(embedding, size * query, size * key, normalizer)
        errors = torch.linalg.matrix_norm(weights - target)
        name = (
            f"theorem 1: {normalizer}, n 2, size 1, the paper's P: smallest error of 10000 heads "
            "(sqrt(1/8) = 0.354)"
        )
        results.append(Check(name, float(errors.min()), math.sqrt(1 / 8) - 1e-12, above=True))
    return results


def _full_rank(n: int) -> list[Check]:
    """Check what the theorem does not exclude.

    For points on a circle, heads of size 2 give weights of full rank.
    """
    angles = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    points = torch.stack([angles.cos(), angles.sin()], 1)  # [n, 2]
    gap = 1 - math.cos(2 * math.pi / n)
    scale = math.sqrt(20 * math.sqrt(2) / gap)  # scores off the diagonal are at least 20 lower
    projection = scale * torch.eye(2, dtype=torch.float64)[None]  # [1, 2, 2]
    (weights,) = _weights(points, projection, projection, "softmax")
    smallest = torch.linalg.svdvals(weights)[-1]
    name = f"softmax, n {n}, head size 2: smallest singular value of a sharp A"
    return [Check(name, float(smallest), 0.99, above=True)]


def _weights(embedding: Tensor, query: Tensor, key: Tensor, normalizer: str) -> Tensor:
    """Return the weights [H, n, n] for X [n, d], and W_Q and W_K [H, d, D]."""
    identity = torch.eye(len(embedding), dtype=embedding.dtype).expand(1, len(query), -1, -1)
    queries = project(embedding, query)[None]  # [1, H, n, D]
    keys = project(embedding, key)[None]
    return attention(queries, keys, identity, normalizer=normalizer, impl="reference")[0]
