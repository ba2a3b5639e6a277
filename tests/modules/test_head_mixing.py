"""Test head mixings alone; test_attention.py has them in whole attentions."""

import pytest
import torch

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS

H, D = 5, 4
built = pytest.mark.parametrize("name", [n for n, kind in HEAD_MIXINGS.items() if kind.build])
trained = pytest.mark.parametrize("name", [n for n, kind in HEAD_MIXINGS.items() if kind.trained])


@built
def test_the_table_says_what_the_module_has(name):
    """Frozen matrices are in checkpoints too."""
    kind = HEAD_MIXINGS[name]
    mixing = kind.build(H, D, H - 1)
    assert bool(list(mixing.parameters())) == kind.trained
    assert set(mixing.state_dict()) == set(kind.parameters)
    for parameter, axes in kind.parameters.items():
        for dim, side, _ in axes:
            assert mixing.state_dict()[parameter].shape[dim] == {"source": H, "mixed": H - 1}[side]
    torch.manual_seed(1)
    torch.nn.init.normal_(next(iter(mixing.state_dict().values())))
    one, other = (mixing(torch.randn(2, H, 3, D)) for _ in range(2))
    assert torch.equal(one, other) != kind.reads_query


@trained
def test_a_trained_mixing_starts_as_the_identity_and_so_does_a_checkpoint_without_it(name):
    mixing = HEAD_MIXINGS[name].build(H, D, H)
    start = mixing(torch.randn(2, H, 3, D))
    for parameter in mixing.parameters():
        parameter.data.normal_()
    state = {}
    mixing.upgrade_state_dict_named(state, "attention.head_mixing")
    mixing.load_state_dict({key.removeprefix("attention.head_mixing."): value for key, value in state.items()})
    for matrix in (start, mixing(torch.randn(2, H, 3, D))):
        assert torch.equal(matrix, torch.eye(H).expand_as(matrix))


def test_position_wise_mixing_is_its_equation():
    mixing = HEAD_MIXINGS["position-wise"].build(H, D, H)
    for parameter in mixing.parameters():
        parameter.data.normal_()
    query = torch.randn(2, H, 3, D)
    matrix = mixing(query)
    for b, t, j, i in torch.cartesian_prod(*map(torch.arange, (2, 3, H, H))).tolist():
        expected = query[b, j, t] @ mixing.query_weight[:, i] + mixing.bias[j, i]
        torch.testing.assert_close(matrix[b, t, j, i], expected)


def test_average_mixing_makes_every_head_the_mean_head():
    matrix = HEAD_MIXINGS["average"].build(H, D, H)(torch.randn(1, H, 1, D))
    torch.testing.assert_close(matrix, torch.full((H, H), 1 / H))


@pytest.mark.parametrize("heads", [1, 2, 8, 64])
def test_columns_of_random_mixing_sum_to_one(heads):
    matrix = HEAD_MIXINGS["random"].build(heads, D, heads)(torch.randn(1, heads, 1, D))
    torch.testing.assert_close(matrix.sum(0), torch.ones(heads))
    assert heads == 1 or matrix.std() > 0.01
