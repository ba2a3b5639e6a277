"""Test padding and precision of the penalties.

tests/fairseq/criterions/test_regularized.py has their equations.
"""

import pytest
import torch

from mixhead_plugin.ops import LowRank
from mixhead_plugin.ops.penalties import orthogonal_penalty, rank_penalty

B, H, N, K = 3, 4, 5, 7
REAL = torch.tensor(
    [[True] * 5, [True, True, True, False, False], [False, False, True, True, True]]
)


# A penalty, the shape of what it is on, and the shape of REAL beside it.
PENALTIES = {
    "orthogonal": (orthogonal_penalty, (B, N, H, H), (B, N, 1, 1)),
    "rank": (rank_penalty, (B, H, N, K), (B, 1, N, 1)),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_padding_changes_nothing(name):
    penalty, shape, mask_shape = PENALTIES[name]
    real = REAL.view(mask_shape).expand(shape)
    tensor = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    spoilt = tensor.detach().masked_fill(~real, float("nan")).requires_grad_()
    expected = penalty(tensor, REAL)
    found = penalty(spoilt, REAL)
    torch.testing.assert_close(found, expected)

    (expected_gradient,) = torch.autograd.grad(expected, tensor)
    (gradient,) = torch.autograd.grad(found, spoilt)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=0)
    assert gradient[~real].abs().max() == 0
    assert gradient[real].abs().max() > 0


@pytest.mark.parametrize("name", PENALTIES)
def test_a_sentence_of_padding_changes_nothing(name):
    penalty, shape, _ = PENALTIES[name]
    tensor = torch.rand(shape, dtype=torch.float64)
    longer = torch.cat([tensor, torch.full_like(tensor[:1], 1e3)])
    more_real = torch.cat([REAL, torch.zeros(1, N, dtype=torch.bool)])
    torch.testing.assert_close(penalty(longer, more_real), penalty(tensor, REAL))


@pytest.mark.parametrize("rank", [1, 2, 6])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_the_penalty_of_factors_is_that_of_their_matrix(rank, size):
    shapes = ((B, N, H, rank), (B, N, H, rank), (B, N, H))
    drawn = [size * torch.randn(shape, dtype=torch.float64) for shape in shapes]
    for factor in drawn:
        factor[~REAL] = torch.nan
    factors = [factor.requires_grad_() for factor in drawn]
    expected = orthogonal_penalty(LowRank(*factors).matrix(), REAL)
    found = orthogonal_penalty(LowRank(*factors), REAL)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)

    wanted = torch.autograd.grad(expected, factors)
    for gradient, other in zip(torch.autograd.grad(found, factors), wanted):
        torch.testing.assert_close(gradient[REAL], other[REAL], rtol=1e-6, atol=1e-12 * size)
        assert gradient[~REAL].count_nonzero() == 0


@pytest.mark.parametrize("name", PENALTIES)
def test_all_padding_is_0(name):
    penalty, shape, _ = PENALTIES[name]
    assert float(penalty(torch.rand(shape), torch.zeros(B, N, dtype=torch.bool))) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PENALTIES)
def test_half_precision_is_computed_in_float32(name, dtype):
    penalty, shape, _ = PENALTIES[name]
    tensor = (100 * torch.rand(shape)).to(dtype)  # squares that float16 cannot hold
    found = penalty(tensor, REAL)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), penalty(tensor.double(), REAL), rtol=1e-5, atol=0)
