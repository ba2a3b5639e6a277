import math

import pytest
import torch

from mixhead_plugin.ops import NORMALIZERS

INF = float("inf")

# The table of design.md once more, for one row of visible scores, in Python floats.
DEFINITIONS = {
    "softmax": lambda s: [math.exp(x) / sum(map(math.exp, s)) for x in s],
    "sigsoftmax": lambda s: [
        math.exp(x) / (1 + math.exp(-x)) / sum(math.exp(y) / (1 + math.exp(-y)) for y in s) for x in s
    ],
    "l2": lambda s: [math.exp(x) / math.sqrt(sum(math.exp(2 * y) for y in s)) for x in s],
    "unnormalized": lambda s: [math.exp(x) for x in s],
    "relu2": lambda s: [max(x, 0) ** 2 / len(s) for x in s],
    "swish-l2": lambda s: [
        x / (1 + math.exp(-x)) / math.sqrt(sum((y / (1 + math.exp(-y))) ** 2 for y in s)) for x in s
    ],
}

every_normalizer = pytest.mark.parametrize("name", NORMALIZERS)


def scores_with_hidden_keys():
    scores = 3 * torch.randn(4, 5, 7, dtype=torch.float64)
    hidden = torch.rand(scores.shape) < 0.4
    hidden[..., 0] = False
    return scores.masked_fill(hidden, -INF)


@every_normalizer
def test_a_row_is_its_definition(name):
    scores = scores_with_hidden_keys()
    weights = NORMALIZERS[name].weights(scores)
    for row, got in zip(scores.view(-1, 7).tolist(), weights.view(-1, 7).tolist(), strict=True):
        visible = iter(DEFINITIONS[name]([s for s in row if s > -INF]))
        expected = [next(visible) if s > -INF else 0.0 for s in row]
        assert got == pytest.approx(expected, rel=1e-12, abs=0)


@every_normalizer
def test_a_hidden_key_weighs_exactly_nothing_and_passes_no_gradient(name):
    scores = scores_with_hidden_keys()
    hidden = scores == -INF
    finite = scores.masked_fill(hidden, 1.0).requires_grad_()
    weights = NORMALIZERS[name].weights(finite.masked_fill(hidden, -INF))
    assert (weights[hidden] == 0).all()
    (gradient,) = torch.autograd.grad((weights * torch.randn_like(weights)).sum(), finite)
    assert gradient.isfinite().all()
    assert (gradient[hidden] == 0).all()


@every_normalizer
def test_a_row_without_visible_keys_is_zero_with_zero_gradient(name):
    scores = torch.full((2, 3), -INF, requires_grad=True)
    weights = NORMALIZERS[name].weights(scores + 0)
    assert (weights == 0).all()
    (gradient,) = torch.autograd.grad(weights.sum(), scores)
    assert (gradient == 0).all()


@every_normalizer
def test_a_row_of_zero_scores_gives_finite_weights_and_gradients(name):
    scores = torch.zeros(2, 3, requires_grad=True)
    weights = NORMALIZERS[name].weights(scores)
    (gradient,) = torch.autograd.grad(weights.square().sum(), scores)
    assert weights.isfinite().all()
    assert gradient.isfinite().all()


@every_normalizer
def test_gradients_are_those_of_finite_differences(name):
    # away from the kink of relu at 0
    scores = torch.randn(3, 6, dtype=torch.float64).mul_(2)
    scores = (scores + scores.sign() * 0.1).requires_grad_()
    torch.autograd.gradcheck(NORMALIZERS[name].weights, scores)


@pytest.mark.parametrize("name", [n for n in NORMALIZERS if n != "unnormalized"])
@pytest.mark.parametrize("offset", [-3000.0, -100.0, 100.0, 3000.0])
def test_large_scores_neither_overflow_nor_vanish(name, offset):
    scores = torch.randn(5, 9) + offset
    expected = NORMALIZERS[name].weights(scores.double())
    torch.testing.assert_close(NORMALIZERS[name].weights(scores).double(), expected, rtol=1e-4, atol=1e-7)


@every_normalizer
def test_torchscript_compiles_it(name):
    scores = scores_with_hidden_keys()
    scripted = torch.jit.script(NORMALIZERS[name].weights)
    torch.testing.assert_close(scripted(scores), NORMALIZERS[name].weights(scores), rtol=0, atol=0)


def test_every_normalizer_has_a_definition_here():
    assert NORMALIZERS.keys() == DEFINITIONS.keys()


def scores_with_an_unseen_row():
    scores = scores_with_hidden_keys()
    scores[1, 2] = -INF
    return scores


@every_normalizer
def test_the_gradient_is_that_of_autograd(name):
    scores = scores_with_an_unseen_row().requires_grad_()
    weights = NORMALIZERS[name].weights(scores)
    d_weights = torch.randn_like(weights)
    (expected,) = torch.autograd.grad((weights * d_weights).sum(), scores)
    out = torch.full_like(scores, float("nan"), requires_grad=False)
    got = NORMALIZERS[name].grad(scores.detach(), weights.detach(), d_weights, out)
    assert got.data_ptr() == out.data_ptr()
    torch.testing.assert_close(got, expected)
    assert (got[scores == -INF] == 0).all()


@every_normalizer
def test_a_gradient_that_does_not_read_the_scores_says_so(name):
    scores = scores_with_hidden_keys()
    weights = NORMALIZERS[name].weights(scores)
    d_weights = torch.randn_like(weights)
    with_scores, without = (
        NORMALIZERS[name].grad(s, weights, d_weights, torch.empty_like(s))
        for s in (scores, torch.full_like(scores, float("nan")))
    )
    assert torch.equal(with_scores, without) != NORMALIZERS[name].grad_reads_scores


@every_normalizer
@pytest.mark.parametrize("offset", [-3000.0, 0.0, 3000.0])
def test_gradients_of_large_scores_are_finite_and_right(name, offset):
    if name == "unnormalized" and offset:
        pytest.skip("exp of such scores is 0 or infinite by definition")
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(1)
        scores = torch.randn(5, 9).to(dtype) + offset
        weights = NORMALIZERS[name].weights(scores)
        d_weights = torch.randn(5, 9).to(dtype)
        results.append(NORMALIZERS[name].grad(scores, weights, d_weights, torch.empty_like(scores)).double())
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


@every_normalizer
def test_offered_memory_and_known_visibility_change_nothing(name):
    scores = scores_with_an_unseen_row()
    expected = NORMALIZERS[name].weights(scores)
    torch.testing.assert_close(NORMALIZERS[name].weights(scores, out=torch.empty_like(scores)), expected)
    seen = scores_with_hidden_keys()
    torch.testing.assert_close(NORMALIZERS[name].weights(seen, seen=True), NORMALIZERS[name].weights(seen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["softmax", "sigsoftmax", "l2"])
def test_the_lowest_score_is_not_a_hidden_key(name, dtype):
    lowest = torch.finfo(dtype).min
    scores = torch.tensor([[lowest, -INF, -INF], [0.0, lowest, -INF], [-INF, -INF, -INF]], dtype=dtype)
    expected = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=dtype)
    if name == "sigsoftmax":
        scores[:2] /= 4  # s + logsigmoid(s) of the lowest score overflows
    assert torch.equal(NORMALIZERS[name].weights(scores), expected)


@every_normalizer
def test_nan_is_not_hidden(name):
    scores = scores_with_hidden_keys()
    scores[2, 3, 0] = float("nan")
    weights = NORMALIZERS[name].weights(scores)
    assert weights[2, 3].isnan().any()
    assert not weights[:2].isnan().any()
