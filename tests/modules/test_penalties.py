import pytest
import torch

from mixhead_plugin.modules.penalties import PENALTIES, RegularizedPass
from tests.helpers import build, dictionary, shake, tokens

PAD = dictionary().pad()


def regularized_loss(model, source, weights, sample_size=5):
    real = source.ne(PAD)
    with RegularizedPass(model, weights, {"encoder": real, "decoder": real}) as regularized:
        loss = model.decoder.extract_features(source, None)[0][real].square().sum()
    return regularized.add_to(loss, sample_size), regularized


@pytest.mark.parametrize("mixing", ["position-independent", "position-wise"])
@pytest.mark.parametrize("weights", [{"orthogonal": 0.4}, {"rank": 0.02}, {"orthogonal": 0.4, "rank": 0.02}])
def test_gradients_are_those_of_finite_differences(weights, mixing):
    model = shake(build("mixhead_transformer_lm", head_mixing=mixing, decoder_layers=1)).double().train()
    source = tokens(padded=True)
    loss, _ = regularized_loss(model, source, weights)
    attention = model.decoder.layers[0].self_attn
    parameters = [*attention.head_mixing.parameters(), attention.q_proj.weight, attention.k_proj.bias]
    step = 1e-5
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        for index in torch.randint(parameter.numel(), (5,)):
            found = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[index] += sign * step
                    found.append(regularized_loss(model, source, weights)[0])
                    parameter.view(-1)[index] -= sign * step
            slope = (found[0] - found[1]) / (2 * step)
            torch.testing.assert_close(gradient.view(-1)[index], slope, rtol=1e-4, atol=1e-6)


def test_the_plain_loss_and_the_values_are_told_apart():
    model = shake(build("mixhead_transformer_lm")).double().train()
    source = tokens(padded=True)
    loss, regularized = regularized_loss(model, source, {"orthogonal": 0.4, "rank": 0.02}, sample_size=7)
    plain, _ = regularized_loss(model, source, {})
    expected = plain + 7 * (0.4 * regularized.values["orthogonal"] + 0.02 * regularized.values["rank"])
    torch.testing.assert_close(loss, expected)
    assert regularized.attentions == {"orthogonal": 2, "rank": 2}
    assert not any(value.requires_grad for value in regularized.values.values())


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_the_attentions_are_as_before(fails):
    model = shake(build("mixhead_transformer_lm")).train()
    source = tokens()
    expected = model(source)[0]
    real = {"encoder": source.ne(PAD), "decoder": source.ne(PAD)}
    try:
        with RegularizedPass(model, {"orthogonal": 1.0}, real):
            model(source)
            assert not fails, "out of memory"
    except AssertionError:
        assert fails
    again = model(source)[0]
    again.sum().backward()  # raises if a penalty were still in it
    assert torch.equal(again, expected)


def test_every_penalty_says_what_it_is():
    for penalty in PENALTIES.values():
        assert penalty.formula and penalty.source.startswith("mixhead eq.") and penalty.weight >= 0
