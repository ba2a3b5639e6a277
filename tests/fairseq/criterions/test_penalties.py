"""Test training passes with penalties on the heads."""

import contextlib

import pytest
import torch

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.criterions.penalties import RegularizedPass
from tests.covering import covering, each_once
from tests.helpers import build, dictionary, shake, tokens

PAD = dictionary().pad()
WEIGHTS = {"orthogonal": 0.4, "rank": 0.02}


def model(**flags):
    return shake(build("mixhead_transformer_lm", **flags)).double().train()


def regularized_loss(model, source, weights, sample_size=5):
    real = source.ne(PAD)
    with RegularizedPass(model, weights, {"encoder": real, "decoder": real}) as regularized:
        loss = model.decoder.extract_features(source, None)[0][real].square().sum()
    return regularized.add_to(loss, sample_size), regularized


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@each_once(order=["together", "first", "last"], checkpointing=[True, False])
def test_passes_do_not_disturb_each_other(order, checkpointing):
    """Two losses are differentiated together, or one after the other; a third one is given up."""
    made = model(checkpoint_activations=checkpointing)
    sources = [tokens(padded=True) for _ in range(2)]
    plain = model()
    alone = [gradients(plain, regularized_loss(plain, source, WEIGHTS)[0]) for source in sources]
    first, last = (regularized_loss(made, source, WEIGHTS)[0] for source in sources)
    # out of memory, say, before the backward pass
    regularized_loss(made, tokens(padded=True), WEIGHTS)
    if order == "together":
        found = gradients(made, first + 3 * last)
    else:
        one = gradients(made, first if order == "first" else 3 * last)
        other = gradients(made, 3 * last if order == "first" else first)
        found = {name: gradient + other[name] for name, gradient in one.items()}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, alone[0][name] + 3 * alone[1][name], msg=name)
    assert all(
        not module._attention_hooks
        for module in made.modules()
        if isinstance(module, MixheadAttention)
    )


class OutOfMemory(Exception):
    """A pass that fails raises it."""


@covering(fails=[False, True], checkpointing=[False, True])
def test_afterwards_the_attentions_are_as_before(fails, checkpointing):
    made = model(checkpoint_activations=checkpointing)
    source = tokens()
    expected = made(source)[0]
    real = {"encoder": source.ne(PAD), "decoder": source.ne(PAD)}
    ends = pytest.raises(OutOfMemory) if fails else contextlib.nullcontext()
    with ends, RegularizedPass(made, WEIGHTS, real):
        made(source)
        if fails:
            raise OutOfMemory
    again = made(source)[0]
    again.sum().backward()  # raises if a penalty were still in it
    assert torch.equal(again, expected)


def test_a_backward_pass_that_failed_leaves_nothing_in_evaluation():
    made = model(checkpoint_activations=True)
    source = tokens(padded=True)
    expected = made.eval()(source)[0]
    loss, _ = regularized_loss(made.train(), source, WEIGHTS)
    made.decoder.layers[1].fc1.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    with torch.no_grad():
        assert torch.equal(made.eval()(source)[0], expected)
    assert not made.decoder.layers[0].self_attn._attention_hooks


def test_the_outputs_alone_cannot_be_differentiated():
    made = model()
    source = tokens()
    real = {"encoder": source.ne(PAD), "decoder": source.ne(PAD)}
    with RegularizedPass(made, WEIGHTS, real):
        outputs = made(source)[0]
    with pytest.raises(RuntimeError, match="without its loss"):
        outputs.sum().backward()


def test_a_loss_in_half_precision_is_added_to_in_float32():
    loss = torch.tensor(30_000.0, dtype=torch.float16, requires_grad=True)
    real = torch.ones(1, 1, dtype=torch.bool)
    regularized = RegularizedPass(torch.nn.Identity(), {"orthogonal": 1.0}, {"decoder": real})
    regularized.values["orthogonal"] = torch.tensor(20.0)
    total = regularized.add_to(loss, 4096)
    assert float(total) == 30_000 + 20 * 4096  # more than float16 can hold
    total.backward()
    assert loss.grad.dtype == torch.float16
