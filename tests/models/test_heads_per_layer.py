"""Layers with different numbers of heads, as pruning leaves them."""

import pytest
import torch

from mixhead_plugin.models.families import OptionError
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.options import format_heads_per_layer, parse_heads_per_layer
from tests.helpers import build, shake, tokens

HEADS = {"encoder-self": [(3, 2), (1, 4)], "decoder-self": [(4, 4), (2, 1)], "cross": [(1, 1), (4, 3)]}
TEXT = "encoder-self=3:2,1:4;decoder-self=4,2:1;cross=1,4:3"


def heads(model):
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, MixheadAttention):
            side, _, _, kind = name.split(".")[-4:]
            site = "cross" if kind == "encoder_attn" else f"{side}-self"
            found.setdefault(site, []).append((module.num_heads, module.num_mixed_heads))
    return found


def test_the_text_stands_for_the_numbers():
    assert parse_heads_per_layer(TEXT) == HEADS
    assert format_heads_per_layer(HEADS) == TEXT
    assert parse_heads_per_layer(" cross = 1 , 4:3 ; ") == {"cross": HEADS["cross"]}
    assert parse_heads_per_layer(None) == parse_heads_per_layer("") == {}


@pytest.mark.parametrize("mixing", ["position-independent", "position-wise", "random", "average"])
@pytest.mark.parametrize("normalizer", ["softmax", "sigsoftmax", "l2"])
def test_every_layer_has_its_numbers_and_decodes_as_it_trains(normalizer, mixing):
    flags = {"head_dim": 4, "heads_per_layer": TEXT, "head_mixing": mixing, "attention_normalizer": normalizer}
    model = shake(build("mixhead_transformer", **flags)).eval()
    assert heads(model) == HEADS
    layer = model.encoder.layers[0].self_attn
    assert [p.weight.shape[0] for p in (layer.q_proj, layer.k_proj, layer.v_proj)] == [12, 12, 8]
    assert layer.out_proj.weight.shape == (16, 8)

    source, prefix = tokens(padded=True), tokens(length=5)
    encoder_out = model.encoder(source)
    full, extra = model.decoder(prefix, encoder_out=encoder_out)
    assert extra["attn"][0].shape == (3, 5, 7)
    state, steps = {}, []
    for t in range(5):
        steps.append(model.decoder(prefix[:, : t + 1], encoder_out=encoder_out, incremental_state=state)[0])
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-4, atol=1e-4)
    full.sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)


@pytest.mark.parametrize(
    ("arch", "text"),
    [("mixhead_transformer_lm", "decoder-self=3:2,1:4"), ("mixhead_roberta_base", "encoder-self=2,3:1")],
)
def test_in_every_model(arch, text):
    model = shake(build(arch, head_dim=4, heads_per_layer=text))
    assert list(heads(model).values()) == list(parse_heads_per_layer(text).values())
    other = build(arch, seed=2, head_dim=4, heads_per_layer=text)
    other.load_state_dict(model.state_dict())
    words, options = tokens(), {"features_only": True} if "roberta" in arch else {}
    outputs = [m.eval()(words, **options)[0] for m in (model, other)]
    torch.testing.assert_close(*outputs)


def test_places_that_it_does_not_name_have_the_stock_numbers():
    model = build("mixhead_transformer", head_dim=4, heads_per_layer="cross=2,3")
    assert heads(model) == {"encoder-self": [(4, 4)] * 2, "decoder-self": [(4, 4)] * 2, "cross": [(2, 2), (3, 3)]}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"heads_per_layer": "decoder-self=2,3"}, "needs --head-dim"),
        ({"heads_per_layer": "decoder-self=2", "head_dim": 4}, "must have 2 numbers"),
        ({"heads_per_layer": "encoder-self=2,3", "head_dim": 4}, "must be one of decoder-self"),
        ({"heads_per_layer": "somewhere=2,3", "head_dim": 4}, "'somewhere' must be one of encoder-self"),
        ({"heads_per_layer": "decoder-self=2,0", "head_dim": 4}, "'0' must be one number"),
        ({"heads_per_layer": "decoder-self=2,3:1:1", "head_dim": 4}, "'3:1:1' must be"),
        ({"heads_per_layer": "decoder-self=2,many", "head_dim": 4}, "'many' must be"),
        ({"heads_per_layer": "decoder-self=2,2;decoder-self=2,2", "head_dim": 4}, "must be there once"),
        ({"heads_per_layer": "decoder-self=2,3:1", "head_dim": 4, "head_mixing": "none"}, "must be as many"),
        (
            {"heads_per_layer": "decoder-self=4,4", "head_dim": 4, "scale_heads": True},
            "--scale-heads: must be left out",
        ),
        ({"relative_position": "rotary", "head_dim": 3}, "even head size, not 3"),
        ({"relative_position": "absolute"}, "must be one of none, rotary, t5"),
        ({"relative_gain": -1}, "--relative-gain -1: must be"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(flags, words):
    with pytest.raises(OptionError, match=words) as error:
        build("mixhead_transformer_lm", **flags)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("--")


def test_relative_positions_are_for_self_attention():
    with pytest.raises(OptionError, match="--relative-gain 3: is for self-attention"):
        build("mixhead_transformer", relative_gain=3, attention_scope="cross")
    model = build("mixhead_transformer", relative_position="t5", relative_gain=3)
    for name, module in model.named_modules():
        if isinstance(module, MixheadAttention):
            own = "encoder_attn" not in name
            assert (module.relative_position is not None) == (module.relative_gain is not None) == own
            if own:
                assert module.relative_position.causal == name.startswith("decoder")


def test_a_checkpoint_of_other_heads_is_refused_in_words():
    state = build("mixhead_transformer_lm", head_dim=4, heads_per_layer="decoder-self=4:2,4").state_dict()
    with pytest.raises(OptionError, match=r"has 4:2 source:mixed heads, this model 4:4; .* --heads-per-layer"):
        build("mixhead_transformer_lm", head_dim=4).load_state_dict(state)
    state = build("mixhead_transformer_lm", relative_position="rotary").state_dict()
    with pytest.raises(OptionError, match="use --relative-position rotary"):
        build("mixhead_transformer_lm").load_state_dict(state)
    for gain in (0, 5):
        with pytest.raises(OptionError, match=f"--relative-gain 3, this model has {gain}; use --relative-gain 3"):
            state = build("mixhead_transformer_lm", relative_gain=3).state_dict()
            build("mixhead_transformer_lm", relative_gain=gain).load_state_dict(state)
    stock = build("mixhead_transformer_lm").state_dict()
    build("mixhead_transformer_lm", relative_gain=3).load_state_dict(dict(stock))
    build("mixhead_transformer_lm", relative_position="t5").load_state_dict(stock)  # starts as nothing
