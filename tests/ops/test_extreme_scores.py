"""Attend to the largest and smallest scores that floats can hold."""

import itertools

import pytest
import torch

from mixhead_plugin.ops import NORMALIZERS, attention
from tests.covering import covering

INF = float("inf")
B, H, NQ, NK, D = 2, 3, 4, 5, 4
# All sizes that a score in 16 bits can have, and larger ones.
SIZES_OF_SCORES = [0.0, 1e-30, 1e-8, 1e-3, 1.0, 80.0, 1e4, 6e4, 1e9]
MIXED = [None, "shared", "per query"]

IMPLS = ["reference", "blockwise", "auto"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(largest, dtype, mixed=None):
    """Return queries, keys, values and a mixing.

    The largest score, with scale 1, is +-`largest`.
    """

    def random(*shape):
        return torch.randn(shape, dtype=torch.float64)

    q = random(B, H, NQ, D)
    k = random(B, H, NK, D)
    factor = (largest / (q @ k.transpose(2, 3)).abs().max()) ** 0.5
    made = {"query": q * factor, "key": k * factor, "value": random(B, H, NK, D)}
    if mixed:
        made["mixing"] = random(*{"shared": (H, H), "per query": (B, NQ, H, H)}[mixed])
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def outcome(tensors, **options):
    """Return the output and gradients."""
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = attention(**tensors, **{"scale": 1.0, **options})
    grads = torch.autograd.grad(out.sum(), list(tensors.values()))
    return {"out": out.detach(), **dict(zip(tensors, grads))}


def from_rounded_scores(tensors, normalizer):
    """Return the output of causal attention, where scores alone are rounded, to float32."""
    scores = (tensors["query"].float() @ tensors["key"].float().mT).double()
    weights = NORMALIZERS[normalizer].weights(
        scores.masked_fill(torch.ones(NQ, NK).triu(1 + NK - NQ).bool(), -INF)
    )
    if "mixing" in tensors:
        equation = "bjtk,ji->bitk" if tensors["mixing"].dim() == 2 else "bjtk,btji->bitk"
        weights = torch.einsum(equation, weights, tensors["mixing"].double())
    return weights @ tensors["value"].double()


def fits(value, dtype):
    """Return True if the type can hold these exact values; NaN does not fit."""
    return bool(value.abs().max() < 0.99 * torch.finfo(dtype).max)


@covering(dtype=DTYPES, normalizer=NORMALIZERS, mixed=MIXED, impl=IMPLS)
def test_results_are_right_or_infinite_for_scores_of_every_size(dtype, normalizer, mixed, impl):
    sizes = list(SIZES_OF_SCORES)
    if dtype != torch.float16:  # whose numbers end at 65504
        sizes += [1e18, 1e30]
    for size in sizes:
        made = tensors(size, dtype, mixed)
        found = outcome(made, normalizer=normalizer, causal=True, impl=impl)
        in_float64 = {name: tensor.double() for name, tensor in made.items()}
        expected = outcome(in_float64, normalizer=normalizer, causal=True, impl="reference")
        for name, value in expected.items():
            assert bool(found[name].isfinite().all()) == fits(value, dtype), (size, name)
        value = expected["out"]
        if fits(value, dtype):
            largest = value.abs().max()
            tiny = torch.finfo(dtype).tiny
            error = (from_rounded_scores(made, normalizer) - value).abs().max()
            tolerance = 2 * error + 2 * torch.finfo(dtype).eps * largest + tiny
            # Zeros would be refused: the tolerance is below the largest number.
            assert tolerance < max(largest, 2 * tiny), size
            assert (found["out"].double() - value).abs().max() <= tolerance, size


@pytest.mark.gpu
@covering(
    dtype=DTYPES,
    normalizer=["softmax", "sigsoftmax", "l2"],
    impl=["auto", "triton", "blockwise", "reference"],
)
def test_a_gpu_gives_finite_numbers(dtype, normalizer, impl):
    for mixed, size in itertools.product(MIXED, SIZES_OF_SCORES):
        made = {name: tensor.cuda() for name, tensor in tensors(size, dtype, mixed).items()}
        found = outcome(made, normalizer=normalizer, causal=True, impl=impl)
        assert all(value.isfinite().all() for value in found.values()), (mixed, size)
