"""Values and gradients, before any speed is told."""

from typing import Callable, Iterable, List

import torch
from torch import Tensor

_CHUNK = 2**22  # weights of one chunk of queries in float64: 32 MiB, and a few times that for their gradients


class Wrong(SystemExit):
    """Its message is one line."""


def must_be_right(
    name: str, parts: Iterable[str], got: Iterable[Tensor], by_formula: Iterable[Tensor], exact: Iterable[Tensor]
) -> None:
    """Twice the error of the formula in the same dtype is allowed, and rounding, that of float64 included."""
    for part, value, formula, right in zip(parts, got, by_formula, exact):
        rounding = torch.finfo(value.dtype).eps + 100 * torch.finfo(right.dtype).eps
        allowed = 2 * (formula - right).abs().max() + rounding * right.abs().max()
        error = (value - right).abs().max()
        if not error <= allowed:
            raise Wrong(f"{name}: {part} is wrong by {error:.2g}, {allowed:.2g} is allowed; nothing is timed")


def must_be_zero(name: str, parts: Iterable[str], got: Iterable[Tensor]) -> None:
    """Gradients of sentences whose output has none."""
    for part, value in zip(parts, got):
        if not (value == 0).all():
            raise Wrong(f"{name}: {part} is not 0 where nothing depends on the input; nothing is timed")


def sentences_to_check(batch: int, heads: int, length: int) -> List[int]:
    """All if float64 serves in a moment, else the first and the last: no sentence has to do with another, and where
    an address overflows it is the last whose values are wrong."""
    few = batch * heads * length**2 <= 2**27  # weights
    return list(range(batch)) if few else [0, batch - 1]


def exact_causal(
    formula: Callable[..., Tensor], tensors: List[Tensor], normalizer: str, d_output: Tensor
) -> List[Tensor]:
    """Output and gradients in float64, all of them, but a chunk of the queries of one sentence at a time: the memory
    does not grow with the square of the length.

    Args:
        formula: as `core.eager`
        tensors: query, key, value [B, H, N, D], and mixing [H, H] or [B, N, H, H] if there is one
        d_output: [B, H, N, D]
    """
    leaves = [t.detach().double().requires_grad_() for t in tensors]
    query, key, value, mixing = (*leaves, None)[:4]
    batch, heads, length = query.shape[:3]
    size = max(1, _CHUNK // (heads * length))
    output = torch.empty_like(d_output, dtype=torch.float64)
    for b in range(batch):
        for start in range(0, length, size):
            stop = min(length, start + size)
            future = torch.full((stop - start, stop), float("-inf"), device=query.device, dtype=query.dtype)
            out = formula(
                query[b : b + 1, :, start:stop],
                key[b : b + 1, :, :stop],
                value[b : b + 1, :, :stop],
                mixing if mixing is None or mixing.dim() == 2 else mixing[b : b + 1, start:stop],
                normalizer,
                future.triu(1 + start),
                0.0,
            )  # [1, H, n, D]
            out.backward(d_output[b : b + 1, :, start:stop].double())
            output[b : b + 1, :, start:stop] = out.detach()
    return [output, *(leaf.grad for leaf in leaves)]
