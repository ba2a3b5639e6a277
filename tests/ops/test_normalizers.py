"""Test the normalizers' weights and gradients."""

import pytest
import torch

from mixhead_plugin.ops import NORMALIZERS
from tests.covering import covering
from tests.ops import definitions
from tests.ops.definitions import INF

LENGTHS = [7, 20]  # softmax has a way of its own for a row shorter than 16
every_normalizer = pytest.mark.parametrize("name", NORMALIZERS)
every_normalizer_and_length = covering(name=NORMALIZERS, n_keys=LENGTHS)


def test_every_normalizer_has_a_definition():
    assert NORMALIZERS.keys() == definitions.NORMALIZERS.keys()


def random_scores(dtype=torch.float64, offset=0.0, n_keys=7):
    """Return scores [4, 5, n_keys] with hidden keys; one row sees none."""
    scores = 3 * torch.randn(4, 5, n_keys, dtype=torch.float64) + offset
    hidden = torch.rand(scores.shape) < 0.4
    hidden[..., 0] = False
    hidden[1, 2] = True
    return scores.masked_fill(hidden, -INF).to(dtype)


@covering(
    name=[name for name, row in NORMALIZERS.items() if not row.grad_reads_scores],
    n_keys=LENGTHS,
    seen=[False, True],
)
def test_weights_may_be_written_over_the_scores(name, n_keys, seen):
    scores = random_scores(n_keys=n_keys)
    if seen:
        scores[1, 2, 0] = 0.0
    expected = NORMALIZERS[name].weights(scores, seen)
    written = NORMALIZERS[name].weights(scores, seen, scores)
    assert written.data_ptr() == scores.data_ptr()
    torch.testing.assert_close(scores, expected)


@covering(
    name=NORMALIZERS,
    offset=[-200.0, -30.0, 0.0, 30.0, 200.0],
    dtype=[torch.float32, torch.float64],
    n_keys=LENGTHS,
)
def test_weights_and_gradients_are_those_of_the_definition(name, offset, dtype, n_keys):
    """The definition is computed in float64.

    float32 cannot hold exponentials of the largest scores.
    """
    scores = random_scores(dtype, offset, n_keys)
    exact = scores.double().masked_fill(scores == -INF, 0.0).requires_grad_()
    expected = definitions.weights(name, exact, scores > -INF)
    weights = NORMALIZERS[name].weights(scores)
    limits = torch.finfo(dtype)
    # of each row
    largest = expected.detach().abs().amax(-1, keepdim=True).clamp(limits.tiny, limits.max)
    rtol = {torch.float32: 2e-5, torch.float64: 1e-11}[dtype]
    torch.testing.assert_close(
        weights / largest, expected.to(dtype) / largest, rtol=rtol, atol=limits.eps
    )
    assert (weights[scores == -INF] == 0).all()
    # The largest exponentials are beyond a float32, and have no gradient there.
    overflows = name == "unnormalized" and offset == 200 and dtype == torch.float32
    assert (largest.max() == limits.max) == overflows
    if overflows:
        return

    d_weights = torch.randn_like(weights)
    (expected_grad,) = torch.autograd.grad((expected * d_weights.double()).sum(), exact)
    expected_grad = expected_grad.masked_fill(scores == -INF, 0.0)
    learned = scores.clone().requires_grad_()
    (found,) = torch.autograd.grad((NORMALIZERS[name].weights(learned) * d_weights).sum(), learned)
    out = torch.full_like(scores, float("nan"))
    written = NORMALIZERS[name].grad(scores, weights, d_weights, out)
    assert written.data_ptr() == out.data_ptr()
    # Twice the error of the definition in float32; in float64 the definition's own error counts,
    # too.
    eps = {torch.float32: 4, torch.float64: 16}[dtype] * limits.eps
    size = float(expected_grad.abs().max()) + 1e-30
    for grad in (found, written):
        torch.testing.assert_close(grad.double(), expected_grad, rtol=eps, atol=eps * size)
        assert (grad[scores == -INF] == 0).all()


@every_normalizer
def test_it_says_whether_its_gradient_jumps_at_a_score_of_0(name):
    """`mixhead check` allows either value, because rounding decides on which side a score lies."""
    gradients = []
    for near in (-1e-12, 1e-12):
        scores = torch.tensor([near, 0.5, -0.7], dtype=torch.float64, requires_grad=True)
        weights = NORMALIZERS[name].weights(scores)
        gradients.append(
            torch.autograd.grad(weights @ torch.tensor([1.0, 2.0, 3.0]).double(), scores)[0]
        )
    below, above = gradients
    assert NORMALIZERS[name].jumps == (not torch.allclose(below, above))


@every_normalizer
def test_it_says_whether_its_weights_are_a_distribution_over_all_visible_keys(name):
    weights = NORMALIZERS[name].weights(3 * torch.randn(5, 7, dtype=torch.float64))
    sum_to_1 = torch.allclose(weights.sum(-1), torch.ones(5, dtype=torch.float64))
    assert NORMALIZERS[name].is_distribution == (sum_to_1 and bool((weights > 0).all()))


@every_normalizer_and_length
def test_torchscript_compiles_it(name, n_keys):
    scores = random_scores(n_keys=n_keys)
    assert torch.equal(
        torch.jit.script(NORMALIZERS[name].weights)(scores), NORMALIZERS[name].weights(scores)
    )


@every_normalizer
def test_the_lowest_score_is_not_a_hidden_key(name):
    for dtype in (torch.float32, torch.float64):
        lowest = torch.finfo(dtype).min
        scores = torch.tensor([[lowest, -INF, -INF], [lowest, lowest, -INF]], dtype=dtype)
        weights = NORMALIZERS[name].weights(scores)
        assert weights.isfinite().all()
        if name in ("softmax", "sigsoftmax", "l2"):  # invariant under shifts as s goes to -inf
            near = torch.tensor([[-9.0, -INF, -INF], [-9.0, -9.0, -INF]], dtype=dtype)
            torch.testing.assert_close(weights, NORMALIZERS[name].weights(near))


@pytest.mark.parametrize("name", ["softpick", "swish-l2"])
@pytest.mark.parametrize("score", [1e-40, 1e-38, -1e-40])
def test_gradients_of_scores_near_zero_are_finite(name, score):
    """Their weights are quotients of numbers that float32 holds.

    But the derivative, about 1 / score, overflows.
    """
    scores = torch.full((2, 20), score, requires_grad=True)
    d_weights = torch.randn(2, 20)
    weights = NORMALIZERS[name].weights(scores)
    (by_autograd,) = torch.autograd.grad(weights, scores, d_weights)
    written = NORMALIZERS[name].grad(
        scores.detach(), weights.detach(), d_weights, torch.empty(2, 20)
    )
    assert by_autograd.isfinite().all() and written.isfinite().all()
    exact = NORMALIZERS[name].weights(scores.detach().double())
    torch.testing.assert_close(weights.double(), exact, rtol=1e-3, atol=1e-6)


LOWEST = torch.finfo(torch.float32).min
ROWS_WITH_THE_LOWEST = [
    [0.3, -0.4, LOWEST, 0.1],  # as masks of Hugging Face hide keys
    [LOWEST] * 4,
    [LOWEST / 2, LOWEST / 2, LOWEST, LOWEST],
    [1e-3, -2e-3, LOWEST, -INF],
    [-5.0, -7.0, LOWEST, -6.0],
    [-300.0, -310.0, LOWEST, -305.0],
    [1e4, -1e4, LOWEST, 3.0],
    [-1e30, -2e30, -1e30, LOWEST],
    [-INF] * 4,
]


# exp(1e4) is infinite
@pytest.mark.parametrize("name", [name for name in NORMALIZERS if name != "unnormalized"])
@pytest.mark.parametrize("n_keys", [4, 20])
def test_derivatives_beside_the_lowest_float_are_exact(name, n_keys):
    normalizer = NORMALIZERS[name]
    scores = torch.tensor([row + [-INF] * (n_keys - 4) for row in ROWS_WITH_THE_LOWEST])
    d_weights, tangent = 5 * torch.randn(2, *scores.shape)

    def backward(dtype):
        leaf = scores.detach().to(dtype, copy=True).requires_grad_()
        return torch.autograd.grad(normalizer.weights(leaf), leaf, d_weights.to(dtype))[0]

    def forward(dtype):
        return torch.func.jvp(normalizer.weights, (scores.to(dtype),), (tangent.to(dtype),))

    exact_weights, exact_tangent = forward(torch.float64)
    exact_gradient = backward(torch.float64)
    exact = {
        "weights": exact_weights,
        "weights in a buffer": exact_weights,
        "tangent": exact_tangent,
        "gradient": exact_gradient,
        "gradient in a buffer": exact_gradient,
    }

    written = normalizer.weights(scores, False, torch.empty_like(scores))
    written_gradient = normalizer.grad(scores, written, d_weights, torch.empty_like(scores))
    weights, weights_tangent = forward(torch.float32)
    found = {
        "weights": weights,
        "weights in a buffer": written,
        "tangent": weights_tangent,
        "gradient": backward(torch.float32),
        "gradient in a buffer": written_gradient,
    }
    found = {name: value.double() for name, value in found.items()}
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-5)


@every_normalizer_and_length
def test_nan_is_not_hidden(name, n_keys):
    scores = random_scores(n_keys=n_keys)
    scores[2, 3, 0] = float("nan")
    weights = NORMALIZERS[name].weights(scores)
    assert weights[2, 3].isnan().any()
    assert not weights[:2].isnan().any()


def test_entmax15_is_that_of_the_package_entmax():
    theirs = pytest.importorskip("entmax")
    # theirs gives NaN where a row sees no key
    scores = random_scores(n_keys=40)[2:].requires_grad_()
    d_weights = torch.randn(2, 5, 40, dtype=torch.float64)
    found = []
    for weights in (NORMALIZERS["entmax15"].weights(scores), theirs.entmax15(scores, -1)):
        found.append((weights, *torch.autograd.grad((weights * d_weights).sum(), scores)))
    torch.testing.assert_close(*found)
    assert ((found[0][0] == 0) & (scores > -INF)).any()  # visible keys too
