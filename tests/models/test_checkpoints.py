"""Stock checkpoints go in; those of another family are refused in one line."""

import copy

import pytest
import torch

from mixhead_plugin.options import OptionError
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
        (
            {},
            {"attention_scope": "self"},
            "cross.*|encoder_attn has --head-mixing position-wise, but .*--attention-scope",
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


@pytest.mark.parametrize(
    "trained, into, message",
    [
        ("sigsoftmax_transformer", {}, "--attention-normalizer sigsoftmax, this model has softmax"),
        ("transformer", {"head_mixing": "random"}, None),
        ("mixhead_transformer", {"encoder_attention_heads": 2}, "use --encoder-attention-heads 4"),
        ("mixhead_transformer", {"decoder_attention_heads": 2}, "use --decoder-attention-heads 4"),
    ],
)
def test_what_tensors_do_not_tell_the_record_does(trained, into, message):
    state = build(trained).state_dict()
    model = build("mixhead_transformer", **{"head_mixing": "none"} if trained.startswith("sig") else {}, **into)
    if message is None:
        model.load_state_dict(state)
    else:
        with pytest.raises(OptionError, match=message):
            model.load_state_dict(state)


def test_the_record_survives_saving(tmp_path):
    from fairseq.utils import move_to_cpu

    state = move_to_cpu(build("l2_transformer_lm").state_dict())
    torch.save(state, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    with pytest.raises(OptionError, match="--attention-normalizer l2"):
        build("sigsoftmax_transformer_lm").load_state_dict(loaded)
