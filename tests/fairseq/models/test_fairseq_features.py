"""The models can do what fairseq's own models can do."""

import copy

import pytest
import torch
from fairseq.modules import FairseqDropout

from mixhead_plugin.fairseq.attention import MixheadAttention
from tests.covering import each_once
from tests.fairseq.models.cases import ENTRIES, forward, shown
from tests.helpers import TINY, build, shake, tokens


def dropout_names(model):
    return [m.module_name for m in model.modules() if isinstance(m, FairseqDropout)]


def test_dropout_modules_have_fairseqs_names():
    for arch in [*TINY, "synthesizer_lm"]:
        upstream = build(arch.replace("synthesizer", "transformer"))
        assert dropout_names(build(f"mixhead_{arch}")) == dropout_names(upstream)


SOME_PARTS = {
    "score_mixing": "position-wise",
    "attention_sink": "learned",
    "attention_gate": "element",
}
LOW_RANK = {"head_mixing": "low-rank", **SOME_PARTS}
DIFFERENTIAL = {"head_mixing": "differential", **SOME_PARTS}


@each_once(arch=[*TINY, "synthesizer_lm"], flags=[{}, LOW_RANK, DIFFERENTIAL])
def test_checkpointed_activations_give_the_same_gradients(arch, flags):
    gradients = []
    for checkpointing in (False, True):
        dropout = {"checkpoint_activations": checkpointing, "attention_dropout": 0.2}
        model = shake(build(f"mixhead_{arch}", **dropout, **flags)).train()
        torch.manual_seed(5)
        forward(model, tokens(padded=True)).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


ONE_LAYER = {"encoder_layers": 1, "decoder_layers": 1}


# The modules are scripted one by one by default.
@pytest.mark.parametrize(
    "flags",
    [
        {"attention_normalizer": "l2", "relative_position": "t5", "relative_gain": 3},
        *(pytest.param(flags, marks=pytest.mark.slow) for flags in ENTRIES),
    ],
    ids=shown,
)
def test_torchscript_exports_the_whole_model(flags, tmp_path):
    model = shake(
        build("mixhead_transformer", **{"head_dim": 4, **ONE_LAYER, **flags}, export=True)
    ).eval()
    torch.jit.script(model).save(tmp_path / "model.pt")
    scripted = torch.jit.load(tmp_path / "model.pt")
    source = tokens(padded=True)
    prefix = tokens()
    lengths = source.ne(1).sum(1)
    expected = model(source, lengths, prefix)[0]
    torch.testing.assert_close(scripted(source, lengths, prefix)[0], expected, rtol=1e-4, atol=1e-5)


def test_alignments_come_from_the_mixed_weights():
    model = shake(build("mixhead_transformer")).eval()
    source = tokens(padded=True)
    prefix = tokens()
    alignment = model(source, None, prefix, alignment_layer=0)[1]["attn"][0]  # [B, Nq, Nk]
    assert (alignment[source.eq(1)[:, None].expand_as(alignment)] == 0).all()
    found = []
    attention = model.decoder.layers[0].encoder_attn
    attention.register_forward_hook(lambda *call: found.append(call[2][1]))  # [H, B, Nq, Nk]
    first = model(source, None, prefix, alignment_layer=0, alignment_heads=1)[1]["attn"][0]
    torch.testing.assert_close((first, alignment), (found[0][0], found[0].mean(0)))
    assert (alignment.sum(-1) - 1).abs().max() > 0.01  # mixed weights need not sum to one


def test_cross_and_self_attention_in_one_are_mixed():
    flags = {"no_cross_attention": True, "cross_self_attention": True}
    model = shake(build("mixhead_transformer", **flags)).eval()
    upstream = build("transformer", **flags).eval()
    assert all(layer.encoder_attn is None for layer in model.decoder.layers)
    assert isinstance(model.decoder.layers[0].self_attn, MixheadAttention)
    model.load_state_dict(upstream.state_dict())
    source = tokens(padded=True)
    prefix = tokens()
    torch.testing.assert_close(model(source, None, prefix)[0], upstream(source, None, prefix)[0])


ADAPTIVE = {"adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20"}


@pytest.mark.parametrize(
    "arch, flags",
    [
        (
            "transformer_lm_wiki103",
            {**ADAPTIVE, "tie_adaptive_weights": True, "tie_adaptive_proj": True},
        ),
        (
            "transformer_lm_wiki103",
            {**ADAPTIVE, "tie_adaptive_weights": False, "tie_adaptive_proj": False},
        ),
        ("transformer_lm", {"character_embeddings": True, "character_filters": "[(1, 8), (2, 8)]"}),
    ],
)
def test_every_embedding_of_a_language_model_is_fairseqs(arch, flags):
    usual = {"character_embedding_dim": 4, "char_embedder_highway_layers": 2}
    model, upstream = (build(f"{family}{arch}", **usual, **flags) for family in ("mixhead_", ""))
    added = {name for name, _ in model.named_parameters()} - {
        name for name, _ in upstream.named_parameters()
    }
    assert added == {name for name, _ in model.named_parameters() if ".head_mixing." in name}
    # fairseq's table of characters is made at the first use
    if "character_embeddings" not in flags:
        model.load_state_dict(copy.deepcopy(upstream.state_dict()))
        sentences = tokens()
        torch.testing.assert_close(
            forward(model.eval(), sentences), forward(upstream.eval(), sentences)
        )
