"""Theorems 1 and 2 of 'Low-Rank Bottleneck in Multi-head Attention Models' as computations that can fail.

The paper writes positions as columns; here they are rows: X [n, d], P has rows that sum to 1. Everything is float64.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mixhead_plugin.ops import attention


class Check(NamedTuple):
    """A number, and on which side of a limit the theory wants it."""

    name: str
    value: float
    limit: float
    above: bool  # whether the value has to be above the limit, or else below

    @property
    def holds(self) -> bool:
        return self.value > self.limit if self.above else self.value < self.limit


def project(embedding: Tensor, projection: Tensor) -> Tensor:
    """X [..., n, d] by W [..., H, d, D], for every head: [..., H, n, D]"""
    return embedding.unsqueeze(-3) @ projection


def scores_of(weights: Tensor, normalizer: str) -> Tensor:
    """Scores [..., n, n] that the normalizer turns into positive `weights` whose rows sum to 1.

    softmax: log p, with each row's mean taken away: a constant in a row changes no weight, and without it the rank is
    at most n - 1. sigsoftmax: the solution of exp(s) sigmoid(s) = n p, a quadratic in exp(s).
    """
    if normalizer == "softmax":
        return _centred_log(weights)
    if normalizer == "sigsoftmax":
        scaled = weights * weights.shape[-1]
        return ((scaled + (scaled.square() + 4 * scaled).sqrt()) / 2).log()
    raise ValueError(f"normalizer {normalizer!r}: there is a construction for softmax and sigsoftmax")


def construct(embedding: Tensor, weights: Tensor, head_size: int, normalizer: str) -> tuple[Tensor, Tensor]:
    """W_Q and W_K that give `weights` exactly (theorem 1, eqs 4 to 7), or their scores cut to rank `head_size`.

    Exact if head_size >= n, for softmax if head_size >= n - 1. The cut keeps the largest singular values.

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
    query, key = (inverse @ (side[..., :kept] * roots) for side in (left, right.mT))
    return torch.nn.functional.pad(query, pad), torch.nn.functional.pad(key, pad)


def smallest_error(weights: Tensor, head_size: int) -> Tensor:
    """What ||A - P||_F cannot be below for any softmax head of that size; 0 from n - 1 on. [...]

    log A is the scores, of rank D at most, but for a constant in each row. So the centred log A is at least as far from
    the centred log P as the nearest matrix of rank D, t = sqrt(sum of its squared singular values after the first D).
    If |a - p| <= e for all elements then |log a - log p| <= |a - p| / (min p - e), hence t <= e / (min p - e).
    """
    tail = torch.linalg.svdvals(_centred_log(weights))[..., head_size:].square().sum(-1).sqrt()
    if head_size >= weights.shape[-1] - 1:  # what is left is rounding
        return torch.zeros_like(tail)
    return weights.amin((-2, -1)) * tail / (1 + tail)


def checks(positions: int) -> list[Check]:
    """The theorems, for sequences of `positions` where a length is free."""
    return [*_construction(positions), *_counterexample(), *_full_rank(positions), *_theorem_2(positions)]


def _centred_log(weights: Tensor) -> Tensor:
    log = weights.log()
    return log - log.mean(-1, keepdim=True)


def _construction(n: int) -> list[Check]:
    """Theorem 1, the first part: with a head that is large enough every positive P comes out."""
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(2 * n, n, generator=generator, dtype=torch.float64).T  # [n, 2n]
    target = torch.empty(1, n, n, dtype=torch.float64).exponential_(generator=generator)
    target /= target.sum(-1, keepdim=True)  # every stochastic matrix is as likely as another
    found = []
    for normalizer, head_size in (("softmax", n), ("softmax", 2 * n), ("softmax", n - 1), ("sigsoftmax", n)):
        query, key = construct(embedding, target, head_size, normalizer)
        error = (_weights(embedding, query, key, normalizer) - target).abs().max()
        name = f"theorem 1: {normalizer}, n {n}, head size {head_size}: largest error of the construction"
        found.append(Check(name, float(error), 1e-9, above=False))
    return found


def _counterexample() -> list[Check]:
    """Theorem 1, the second part: X = [1, 0] of size 1 < n = 2; the second row has equal scores whatever W is."""
    embedding = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    target = torch.tensor([[0.5, 0.5], [0.75, 0.25]], dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    found = []
    for normalizer in ("softmax", "sigsoftmax"):
        # A head for every try, from tiny projections to huge ones.
        query, key = torch.randn(2, 10000, 1, 1, generator=generator, dtype=torch.float64)
        size = torch.logspace(-3, 2, 10000, dtype=torch.float64)[:, None, None]
        errors = torch.linalg.matrix_norm(_weights(embedding, size * query, size * key, normalizer) - target)
        name = f"theorem 1: {normalizer}, n 2, size 1, the paper's P: smallest error of 10000 heads (sqrt(1/8) = 0.354)"
        found.append(Check(name, float(errors.min()), math.sqrt(1 / 8) - 1e-12, above=True))
    return found


def _full_rank(n: int) -> list[Check]:
    """What the theorem does not say: heads of size 2 give weights of full rank, of points on a circle."""
    angles = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
    points = torch.stack([angles.cos(), angles.sin()], 1)  # [n, 2]
    gap = 1 - math.cos(2 * math.pi / n)
    scale = math.sqrt(20 * math.sqrt(2) / gap)  # the others' scores are at least 20 lower
    weights = _weights(points, *(scale * torch.eye(2, dtype=torch.float64)[None],) * 2, "softmax")[0]
    smallest = torch.linalg.svdvals(weights)[-1]
    return [Check(f"softmax, n {n}, head size 2: smallest singular value of a sharp A", float(smallest), 0.99, True)]


def _weights(embedding: Tensor, query: Tensor, key: Tensor, normalizer: str) -> Tensor:
    """X [n, d], W [H, d, D] -> [H, n, n]"""
    identity = torch.eye(len(embedding), dtype=embedding.dtype).expand(1, len(query), -1, -1)
    queries, keys = project(embedding, query)[None], project(embedding, key)[None]
    return attention(queries, keys, identity, normalizer=normalizer, impl="reference")[0]


class Layer(NamedTuple):
    """A layer of softmax heads without its residual: f_W or g_V of the paper's section 3.1."""

    query: Tensor  # [H, d, D]
    key: Tensor  # [H, d, D]
    output: Tensor  # the value's and the output's projection in one, [H, d, d]

    def __call__(self, embedding: Tensor) -> Tensor:
        """X [n, d] -> [n, d]"""
        value = project(embedding, self.output)[None]  # [1, H, n, d]
        queries, keys = project(embedding, self.query)[None], project(embedding, self.key)[None]
        return attention(queries, keys, value, impl="reference")[0].sum(0)

    def scores(self, head: int) -> Tensor:
        """The matrix between two tokens' embeddings, with the scale, [d, d]"""
        return self.query[head] @ self.key[head].T * self.query.shape[2] ** -0.5


def _theorem_2(n: int, size: int = 8, heads: int = 4) -> list[Check]:
    """No layer of heads of size d / h equals one of heads of size d, all with the same scores: in each of the proof's
    three cases there is an X [n, d] that tells them apart."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    small = size // heads
    # Values of head i in its own `small` columns: what heads of size d / h can do at most.
    split = torch.block_diag(*[torch.ones(small, 1, dtype=torch.float64)] * heads).T  # [h, d]
    outputs = split[:, :, None] * normal(size, size)  # [h, d, d]
    narrow = Layer(normal(heads, size, small), normal(heads, size, small), outputs)
    found = []

    def compare(case: str, wide: Layer, embedding: Tensor) -> None:
        expected = wide(embedding)
        apart = torch.linalg.matrix_norm(narrow(embedding) - expected) / torch.linalg.matrix_norm(expected)
        name = f"theorem 2: {heads} heads of {small} against {size}, n {n}, {case}: distance at the proof's X"
        found.append(Check(name, float(apart), 1e-3, above=True))

    def layer(scores: Tensor, output: Tensor) -> Layer:
        query = (scores * size**0.5).expand(heads, -1, -1)
        return Layer(query, torch.eye(size, dtype=torch.float64).expand(heads, -1, -1), output)

    def tokens(*vectors: Tensor) -> Tensor:
        return torch.stack([*vectors, *[torch.zeros(size, dtype=torch.float64)] * (n - len(vectors))])

    # 1. The values' maps differ in sum: n equal tokens, whose weights are 1/n whatever the scores are.
    wide = layer(normal(size, size), normal(heads, size, size))
    difference = wide.output.sum(0) - narrow.output.sum(0)
    vector = torch.linalg.svd(difference).U[:, 0]
    compare("other values", wide, vector.expand(n, -1))

    # 2. The same values, but a head's scores differ of a token with itself: that token, and zeros.
    wide = layer(normal(size, size), narrow.output)
    symmetric = wide.scores(0) - narrow.scores(0)
    values, vectors = torch.linalg.eigh(symmetric + symmetric.T)
    compare("same values", wide, tokens(vectors[:, values.abs().argmax()]))

    # 3. They differ only between tokens: a skew-symmetric difference, seen by a token and a large second one.
    skew = normal(size, size)
    wide = layer(narrow.scores(0) + skew - skew.T, narrow.output)
    first = torch.linalg.svd(wide.scores(0) - narrow.scores(0)).U[:, 0]
    towards, away = first @ wide.scores(0), first @ narrow.scores(0)
    second = towards / towards.norm() - away / away.norm()  # scores above 0 in the one layer, below 0 in the other
    compare("same values, same scores of a token with itself", wide, tokens(first, 10 * second))
    return found
