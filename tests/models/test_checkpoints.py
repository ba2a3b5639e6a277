"""Stock checkpoints go in; those of another family are refused in one line."""

import copy

import pytest
import torch

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from tests.helpers import TINY, build, shake
from tests.models.test_families import forward, tokens


@pytest.mark.parametrize("mixing", ["none", "position-independent", "position-wise"])
@pytest.mark.parametrize("stock", TINY)
def test_a_stock_checkpoint_gives_the_stock_outputs(stock, mixing):
    trained = build(stock, seed=2).eval()
    model = shake(build(f"mixhead_{stock}", seed=3, head_mixing=mixing)).eval()
    model.load_state_dict(copy.deepcopy(trained.state_dict()), strict=True)
    sentences = tokens(padded=True)
    torch.testing.assert_close(forward(model, sentences), forward(trained, sentences))


@pytest.mark.parametrize("mixing", ["none", "position-independent", "position-wise", "random", "average"])
@pytest.mark.parametrize("stock", TINY)
def test_a_checkpoint_comes_back_as_it_was(stock, mixing):
    trained = shake(build(f"l2_{stock}", seed=2, head_mixing=mixing)).eval()
    model = build(f"l2_{stock}", seed=3, head_mixing=mixing).eval()
    model.load_state_dict(copy.deepcopy(trained.state_dict()), strict=True)
    sentences = tokens(padded=True)
    assert torch.equal(forward(model, sentences), forward(trained, sentences))


def without_record(state_dict):
    """As a script leaves it that averages checkpoints: tensors only."""
    return dict(state_dict)


@pytest.mark.parametrize(
    "trained, into, message",
    [
        (
            {},
            {"head_mixing": "none"},
            "--head-mixing position-wise, this model has none; use --head-mixing position-wise",
        ),
        (
            {},
            {"head_mixing": "position-independent"},
            "--head-mixing position-wise, this model has position-independent",
        ),
        (
            {"head_mixing": "position-independent"},
            {},
            "--head-mixing position-independent, this model has position-wise",
        ),
        ({}, {"head_dim": 9}, "use --head-dim 4"),
        ({}, {"encoder_embed_dim": 32}, "has --encoder-embed-dim 16, this model 32; use --encoder-embed-dim 16"),
        (
            {},
            {"attention_scope": "self"},
            "encoder_attn was trained with --head-mixing position-wise, .*--attention-scope",
        ),
    ],
)
@pytest.mark.parametrize("form", [lambda s: s, without_record], ids=["recorded", "tensors alone"])
def test_a_checkpoint_of_other_flags_is_refused_by_flag(trained, into, message, form):
    state = form(build("mixhead_transformer", **trained).state_dict())
    with pytest.raises(OptionError, match=message) as error:
        build("mixhead_transformer", **into).load_state_dict(state)
    assert str(error.value).startswith("checkpoint of another family: its ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mixing", HEAD_MIXINGS)
def test_an_average_of_checkpoints_is_tensors_alone_and_loads(mixing):
    state = without_record(build("mixhead_transformer", head_mixing=mixing).state_dict())
    build("mixhead_transformer", head_mixing=mixing, seed=2).load_state_dict(state)


@pytest.mark.parametrize(
    "trained, into, message",
    [
        (
            ("sigsoftmax_transformer", {}),
            {"head_mixing": "none"},
            "--attention-normalizer sigsoftmax, this model has soft",
        ),
        (("mixhead_transformer", {}), {"encoder_attention_heads": 2}, "use --encoder-attention-heads 4"),
        (("mixhead_transformer", {}), {"decoder_attention_heads": 2}, "use --decoder-attention-heads 4"),
        (("mixhead_transformer", {"head_mixing": "random"}), {"head_mixing": "average"}, "use --head-mixing random"),
        (
            ("sigsoftmax_transformer", {}),
            {"attention_normalizer": "sigsoftmax", "head_mixing": "none", "attention_scope": "self"},
            "encoder_attn was trained with --attention-normalizer sigsoftmax, .* or another --attention-scope",
        ),
        (
            ("sigsoftmax_transformer", {"attention_scope": "self"}),
            {"attention_normalizer": "sigsoftmax", "head_mixing": "none"},
            "encoder_attn was trained with --attention-normalizer softmax, .* or another --attention-scope",
        ),
    ],
)
def test_what_tensors_do_not_tell_the_record_does(trained, into, message):
    arch, flags = trained
    state = build(arch, **flags).state_dict()
    with pytest.raises(OptionError, match=message):
        build("mixhead_transformer", **into).load_state_dict(state)


def test_mixing_may_be_widened_to_more_attentions():
    """From --attention-scope self to all: where there was none it starts as the identity."""
    trained = shake(build("mixhead_transformer", attention_scope="self")).eval()
    model = build("mixhead_transformer").eval()
    model.load_state_dict(copy.deepcopy(trained.state_dict()))
    sentences = tokens()
    torch.testing.assert_close(forward(model, sentences), forward(trained, sentences))


def test_a_stock_checkpoint_under_another_normalizer_is_warned_of(caplog):
    build("sigsoftmax_transformer").load_state_dict(build("transformer").state_dict())
    assert "from now on it is sigsoftmax" in caplog.text


@pytest.mark.parametrize("stock", TINY)
def test_models_can_be_pickled_and_copied(stock, tmp_path):
    model = shake(build(f"mixhead_{stock}")).eval()
    torch.save(model, tmp_path / "whole.pt")
    sentences = tokens()
    expected = forward(model, sentences)
    for other in (torch.load(tmp_path / "whole.pt", weights_only=False), copy.deepcopy(model)):
        assert torch.equal(forward(other, sentences), expected)


def test_the_record_survives_saving(tmp_path):
    from fairseq.utils import move_to_cpu

    state = move_to_cpu(build("l2_transformer_lm").state_dict())
    torch.save(state, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    with pytest.raises(OptionError, match="--attention-normalizer l2"):
        build("sigsoftmax_transformer_lm").load_state_dict(loaded)
