"""Test the penalties on mixing matrices and weights."""

import pytest
import torch

from mixhead_plugin.ops.penalties import orthogonal_penalty, rank_penalty

B, H, N, K = 3, 4, 5, 7
REAL = torch.tensor([[True] * 5, [True, True, True, False, False], [False, False, True, True, True]])


def orthogonal_by_hand(matrix):
    """Return the sum of (inner product - delta)^2 over all pairs of columns."""
    total = 0.0
    for i in range(len(matrix)):
        for j in range(len(matrix)):
            product = sum(float(matrix[r, i]) * float(matrix[r, j]) for r in range(len(matrix)))
            total += (product - (i == j)) ** 2
    return total


def rank_by_hand(weights):
    """Compute mixhead eq. 20 for the heads P [H, N, K] of one sentence, pair by pair."""
    pairs = [(i, j) for i in range(len(weights)) for j in range(len(weights)) if i != j]
    queries = [(weights[i] @ weights[j].T).square().sum() for i, j in pairs]
    keys = [(weights[i].T @ weights[j]).square().sum() for i, j in pairs]
    return (sum(queries) + sum(keys)) / len(pairs)


@pytest.mark.parametrize("heads", [1, 2, 5])
def test_a_matrix_is_as_far_from_orthogonal_as_its_columns(heads):
    matrix = torch.randn(heads, heads, dtype=torch.float64)
    assert float(orthogonal_penalty(matrix)) == pytest.approx(orthogonal_by_hand(matrix))
    rotation = torch.linalg.qr(matrix)[0]
    assert float(orthogonal_penalty(rotation)) == pytest.approx(0, abs=1e-9)


def test_position_wise_is_the_mean_over_real_positions():
    mixing = torch.randn(B, N, H, H, dtype=torch.float64)
    by_hand = [orthogonal_by_hand(mixing[b, t]) for b in range(B) for t in range(N) if REAL[b, t]]
    assert float(orthogonal_penalty(mixing, REAL)) == pytest.approx(sum(by_hand) / len(by_hand))


@pytest.mark.parametrize("shape", [(N, K), (K, N), (N, N)])
def test_pairs_of_heads_overlap_as_eq_20_says(shape):
    weights = torch.rand(B, H, *shape, dtype=torch.float64).softmax(-1)
    by_hand = sum(rank_by_hand(sentence) for sentence in weights) / B
    torch.testing.assert_close(rank_penalty(weights), by_hand)


PENALTIES = {
    "orthogonal": (orthogonal_penalty, (B, N, H, H), (2, 3)),
    "rank": (rank_penalty, (B, H, N, K), (1, 3)),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_padding_changes_nothing(name):
    penalty, shape, other = PENALTIES[name]
    tensor = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    by_query = torch.zeros(shape, dtype=torch.bool) | REAL.view(
        B, *(1 if d in other else n for d, n in enumerate(shape[1:], 1))
    )
    spoilt = tensor.detach().masked_fill(~by_query, float("nan")).requires_grad_()
    gradients = []
    for values in (tensor, spoilt):
        found = penalty(values, REAL)
        gradients.append(torch.autograd.grad(found, values)[0])
        torch.testing.assert_close(found, penalty(tensor, REAL))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert gradients[0][~by_query].abs().max() == 0 < gradients[0][by_query].abs().max()

    # a sentence that is padding altogether, and one more padded position
    longer = torch.cat([tensor.detach(), torch.full_like(tensor[:1], 1e3)])
    more_real = torch.cat([REAL, torch.zeros(1, N, dtype=torch.bool)])
    torch.testing.assert_close(penalty(longer, more_real), penalty(tensor, REAL).detach())


@pytest.mark.parametrize("name", PENALTIES)
def test_all_padding_is_0(name):
    penalty, shape, _ = PENALTIES[name]
    assert float(penalty(torch.rand(shape), torch.zeros(B, N, dtype=torch.bool))) == 0


@pytest.mark.parametrize("name", PENALTIES)
def test_gradients_are_those_of_finite_differences(name):
    penalty, shape, _ = PENALTIES[name]
    tensor = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: penalty(values, REAL), tensor)
    assert torch.autograd.gradcheck(penalty, tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PENALTIES)
def test_half_precision_is_computed_in_float32(name, dtype):
    penalty, shape, _ = PENALTIES[name]
    tensor = (100 * torch.rand(shape)).to(dtype)  # squares that float16 cannot hold
    found = penalty(tensor, REAL)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), penalty(tensor.double(), REAL), rtol=1e-5, atol=0)


def test_one_head_has_no_pair():
    with pytest.raises(ValueError, match=r"weights \[2, 1, 3, 3\]: a pair needs two heads"):
        rank_penalty(torch.rand(2, 1, 3, 3))
