import pytest
import torch

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS

H, D = 5, 4
built = pytest.mark.parametrize("name", [n for n, kind in HEAD_MIXINGS.items() if kind.build])
trained = pytest.mark.parametrize("name", [n for n, kind in HEAD_MIXINGS.items() if kind.trained])


@built
def test_what_is_trained_is_a_parameter_and_what_is_frozen_is_kept_in_checkpoints(name):
    mixing = HEAD_MIXINGS[name].build(H, D, H)
    assert bool(list(mixing.parameters())) == HEAD_MIXINGS[name].trained
    assert mixing.state_dict()


@trained
def test_a_trained_mixing_starts_as_the_identity(name):
    matrix = HEAD_MIXINGS[name].build(H, D, H)(torch.randn(2, H, 3, D))
    assert torch.equal(matrix, torch.eye(H).expand_as(matrix))


def test_position_wise_mixing_is_its_equation():
    mixing = HEAD_MIXINGS["position-wise"].build(H, D, H)
    for parameter in mixing.parameters():
        parameter.data.normal_()
    query = torch.randn(2, H, 3, D)
    matrix = mixing(query)
    for b in range(2):
        for t in range(3):
            for j in range(H):
                for i in range(H):
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


@trained
def test_a_checkpoint_without_mixing_gets_the_identity(name):
    mixing = HEAD_MIXINGS[name].build(H, D, H)
    for parameter in mixing.parameters():
        parameter.data.normal_()
    state = {"other": torch.zeros(1)}
    mixing.upgrade_state_dict_named(state, "attention.head_mixing")
    del state["other"]
    mixing.load_state_dict({k.removeprefix("attention.head_mixing."): v for k, v in state.items()})
    matrix = mixing(torch.randn(1, H, 2, D))
    assert torch.equal(matrix, torch.eye(H).expand_as(matrix))


@built
def test_torchscript_compiles_it(name):
    mixing = HEAD_MIXINGS[name].build(H, D, H)
    query = torch.randn(2, H, 3, D)
    torch.testing.assert_close(torch.jit.script(mixing)(query), mixing(query))
