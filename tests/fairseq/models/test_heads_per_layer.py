"""Layers have different numbers of heads, as pruning leaves them."""

import torch

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.heads_per_layer import parse_heads_per_layer
from tests.covering import each_once
from tests.fairseq.models.cases import step_by_step
from tests.helpers import build, shake, tokens

HEADS = {
    "encoder-self": [(3, 2), (1, 4)],
    "decoder-self": [(4, 4), (2, 1)],
    "cross": [(1, 1), (4, 3)],
}
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
    assert parse_heads_per_layer(" cross = 1 , 4:3 ; ") == {"cross": HEADS["cross"]}
    assert parse_heads_per_layer(None) == parse_heads_per_layer("") == {}


@each_once(
    mixing=["position-independent", "position-wise", "random", "average"],
    normalizer=["softmax", "sigsoftmax", "l2"],
)
def test_every_layer_has_its_numbers_and_decodes_as_it_trains(normalizer, mixing):
    flags = {
        "head_dim": 4,
        "heads_per_layer": TEXT,
        "head_mixing": mixing,
        "attention_normalizer": normalizer,
    }
    model = shake(build("mixhead_transformer", **flags)).eval()
    assert heads(model) == HEADS
    layer = model.encoder.layers[0].self_attn
    assert [p.weight.shape[0] for p in (layer.q_proj, layer.k_proj, layer.v_proj)] == [12, 12, 8]
    assert layer.out_proj.weight.shape == (16, 8)

    source = tokens(padded=True)
    prefix = tokens(length=5)
    encoder_out = model.encoder(source)
    full, extra = model.decoder(prefix, encoder_out=encoder_out)
    assert extra["attn"][0].shape == (3, 5, 7)
    torch.testing.assert_close(
        step_by_step(model.decoder, prefix, encoder_out)[0], full, rtol=1e-4, atol=1e-4
    )
    full.sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_sites_that_it_does_not_name_have_the_numbers_of_fairseqs_flags():
    model = build("mixhead_transformer", head_dim=4, heads_per_layer="cross=2,3")
    assert heads(model) == {
        "encoder-self": [(4, 4)] * 2,
        "decoder-self": [(4, 4)] * 2,
        "cross": [(2, 2), (3, 3)],
    }


def test_relative_positions_are_for_self_attention():
    model = build("mixhead_transformer", relative_position="t5", relative_gain=3)
    for name, module in model.named_modules():
        if isinstance(module, MixheadAttention):
            own = "encoder_attn" not in name
            assert (
                (module.relative_position is not None) == (module.relative_gain is not None) == own
            )
            if own:
                assert module.relative_position.causal == name.startswith("decoder")
