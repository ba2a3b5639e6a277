"""Fit layers of attention heads to random stochastic matrices.

S seeds, H heads, n positions, d is the size of the embedding, D that of a head. All tensors are
float64.
"""

from typing import NamedTuple

import torch
from low_rank_bottleneck.theorems import construct, project
from torch import Tensor

from mixhead_plugin.ops import attention

STARTS = ("random", "constructed")


class Problem(NamedTuple):
    """An embedding and the attention weights that a layer should give, for every seed."""

    embedding: Tensor  # X [S, n, d], orthogonal rows of length sqrt(d)
    targets: Tensor  # P [S, H, n, n], positive, every row sums to 1


class Fit(NamedTuple):
    """The result of one fit."""

    squares: Tensor  # ||A - P||_F^2 [S, targets]
    effective_rank: Tensor  # of A, [S, targets]


def random_problem(positions: int, heads: int, seeds: int, sharpness: float) -> Problem:
    """Draw an embedding and targets for each seed.

    A row of a target is the softmax of independent normal numbers. A seed gives the same matrices
    whatever the number of seeds. Every embedding of full row rank allows a head the same matrices,
    so it is an orthogonal one, which is easiest for the optimizer.

    Args:
        positions: n
        heads: H, as many targets for each seed
        seeds: S
        sharpness: the standard deviation of the normal numbers
    """
    embeddings = []
    targets = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(positions, positions, generator=generator, dtype=torch.float64)
        embeddings.append(torch.linalg.qr(normal).Q * positions**0.5)
        logits = torch.randn(heads, positions, positions, generator=generator, dtype=torch.float64)
        targets.append((sharpness * logits).softmax(-1))
    return Problem(torch.stack(embeddings), torch.stack(targets))


def uniform_squares(targets: Tensor) -> Tensor:
    """Return ||1/n - P||_F^2 [S, H], the error of uniform attention.

    All errors are divided by it.
    """
    return (targets - 1 / targets.shape[-1]).square().sum((-2, -1))


def effective_rank(matrices: Tensor) -> Tensor:
    """Return exp of the entropy of the normalized singular values, [...].

    It is n if all are equal, 1 if there is one.
    """
    values = torch.linalg.svdvals(matrices)
    shares = values / values.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp()


def layer_weights(
    embedding: Tensor, query: Tensor, key: Tensor, normalizer: str, mixing: Tensor | None = None
) -> Tensor:
    """Return the (mixed) attention weights of a layer.

    They are the output of `ops.attention` if the values are the identity.

    Args:
        embedding: [S, n, d]
        query: W_Q [S, H, d, D]
        key: W_K [S, H, d, D]
        normalizer: a key of `NORMALIZERS`
        mixing: M [S, H, H], or None

    Returns:
        [S, H, n, n]
    """
    seeds, positions, _ = embedding.shape
    heads = query.shape[1]
    identity = torch.eye(positions, dtype=embedding.dtype).expand(seeds, heads, -1, -1)
    if mixing is not None:
        mixing = mixing[:, None].expand(-1, positions, -1, -1)  # [S, n, H, H]
    queries = project(embedding, query)  # [S, H, n, D]
    keys = project(embedding, key)  # [S, H, n, D]
    return attention(
        queries, keys, identity, normalizer=normalizer, mixing=mixing, impl="reference"
    )


def fit(
    problem: Problem,
    *,
    normalizer: str,
    head_size: int,
    mixed: bool,
    together: bool,
    start: str,
    iterations: int,
) -> Fit:
    """Minimise ||A - P||_F^2 over W_Q, W_K and, if `mixed`, M, by L-BFGS.

    Args:
        problem: one target for every head
        normalizer: a key of `NORMALIZERS`
        head_size: D
        mixed: mix the heads' weights by a learned matrix M
        together: fit only the first (mixed) head, to the first target; otherwise every (mixed) head
            to its own target
        start: "random" for normal W_Q and W_K; "constructed" for those of theorem 1, cut to rank D
        iterations: the most iterations of L-BFGS

    Raises:
        ArithmeticError: the error is not finite
    """
    embedding, targets = problem
    seeds, heads = targets.shape[:2]
    query, key = _random_start(seeds, heads, embedding.shape[2], head_size)
    mixing = torch.eye(heads, dtype=targets.dtype).repeat(seeds, 1, 1)  # [S, H, H]
    served = 1 if together else heads
    targets = targets[:, :served]
    if start == "constructed":  # heads without a target stay random
        built_query, built_key = construct(embedding, targets, head_size, normalizer)
        query[:, :served] = built_query
        key[:, :served] = built_key
    elif together:  # with the identity the other heads would have no gradient at first
        mixing.fill_(1 / heads)
    free = [query, key]
    if mixed:
        free.append(mixing)
    for tensor in free:
        tensor.requires_grad_()
    uniform = uniform_squares(targets)

    def weights() -> Tensor:
        of_all_heads = layer_weights(embedding, query, key, normalizer, mixing if mixed else None)
        return of_all_heads[:, :served]

    optimizer = torch.optim.LBFGS(
        free,
        max_iter=iterations,
        max_eval=2 * iterations,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-10,
        tolerance_change=1e-14,
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = ((weights() - targets).square().sum((-2, -1)) / uniform).sum()
        total.backward()
        return total

    optimizer.step(loss)
    with torch.no_grad():
        fitted = weights()
    squares = (fitted - targets).square().sum((-2, -1))
    if not squares.isfinite().all():
        raise ArithmeticError(
            f"{normalizer}, head size {head_size}, {start} start: the error is not finite"
        )
    return Fit(squares, effective_rank(fitted))


def _random_start(
    seeds: int, heads: int, embedding_size: int, head_size: int
) -> tuple[Tensor, Tensor]:
    """Return W_Q and W_K, [S, H, d, D] each, that make queries and keys standard normal."""
    shape = (2, heads, embedding_size, head_size)
    drawn = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        drawn.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    query, key = torch.stack(drawn, 1) / embedding_size**0.5
    return query.clone(), key.clone()
