"""What fairseq's own models can do, these can."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq.modules import FairseqDropout

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.ops import NORMALIZERS
from tests.helpers import TINY, build, shake, tokens
from tests.models.test_families import forward


def dropout_names(model):
    return [m.module_name for m in model.modules() if isinstance(m, FairseqDropout)]


@pytest.mark.parametrize("stock", TINY)
def test_dropout_modules_have_their_stock_names(stock):
    assert dropout_names(build(f"mixhead_{stock}")) == dropout_names(build(stock))


def test_retained_dropout_acts_at_inference_where_it_was_asked_for():
    model = build("mixhead_transformer", dropout=0.5, attention_dropout=0.5)
    names = ["TransformerEncoder", "MultiheadAttention"]
    generation = SimpleNamespace(retain_dropout=True, retain_dropout_modules=names)
    model.prepare_for_inference_(SimpleNamespace(generation=generation))
    kept = {m.module_name for m in model.modules() if isinstance(m, FairseqDropout) and m.apply_during_inference}
    assert kept == set(names)
    source, prefix = tokens(), tokens()
    assert not torch.equal(model(source, None, prefix)[0], model(source, None, prefix)[0])


@pytest.mark.parametrize("stock", TINY)
def test_checkpointed_activations_give_the_same_gradients(stock):
    gradients = []
    for checkpointing in (False, True):
        model = shake(build(f"mixhead_{stock}", checkpoint_activations=checkpointing, attention_dropout=0.2)).train()
        torch.manual_seed(5)
        forward(model, tokens(padded=True)).square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_layerdrop_drops_layers_and_layers_to_keep_prunes_a_checkpoint():
    model = shake(build("mixhead_transformer", encoder_layerdrop=0.5, decoder_layerdrop=0.5))
    sentences = tokens()
    outputs = [forward(model.train(), sentences) for _ in range(8)]
    assert any(not torch.equal(outputs[0], other) for other in outputs[1:])

    pruned = build("mixhead_transformer", encoder_layers_to_keep="0,1", decoder_layers_to_keep="1")
    cfg = SimpleNamespace(arch="mixhead_transformer", encoder_layers_to_keep="0,1", decoder_layers_to_keep="1")
    pruned.load_state_dict(copy.deepcopy(model.state_dict()), model_cfg=cfg)
    assert len(pruned.decoder.layers) == 1
    mixing = pruned.decoder.layers[0].self_attn.head_mixing
    assert torch.equal(mixing.bias, model.decoder.layers[1].self_attn.head_mixing.bias)


@pytest.mark.parametrize(
    "normalizer, mixing",
    [
        pytest.param(normalizer, mixing, marks=() if normalizer == "softmax" or i == j else pytest.mark.slow)
        for i, normalizer in enumerate(NORMALIZERS)
        for j, mixing in enumerate(HEAD_MIXINGS)
    ],
)
def test_torchscript_exports_the_whole_model(normalizer, mixing, tmp_path):
    model = build("mixhead_transformer", attention_normalizer=normalizer, head_mixing=mixing, export=True)
    shake(model).eval()
    scripted = torch.jit.script(model)
    scripted.save(tmp_path / "model.pt")
    scripted = torch.jit.load(tmp_path / "model.pt")
    source, prefix = tokens(padded=True), tokens()
    lengths = source.ne(1).sum(1)
    expected = model(source, lengths, prefix)[0]
    torch.testing.assert_close(scripted(source, lengths, prefix)[0], expected, rtol=1e-4, atol=1e-5)


def test_alignments_come_from_the_mixed_weights():
    model = shake(build("mixhead_transformer")).eval()
    source, prefix = tokens(padded=True), tokens()
    extra = model(source, None, prefix, alignment_layer=0)[1]
    alignment = extra["attn"][0]  # [B, Nq, Nk]
    hidden = source.eq(1)[:, None].expand_as(alignment)
    assert (alignment[hidden] == 0).all()
    first = model(source, None, prefix, alignment_layer=0, alignment_heads=1)[1]["attn"][0]
    assert not torch.allclose(first, alignment)
    # mixed weights need not sum to one
    assert (alignment.sum(-1) - 1).abs().max() > 0.01


def test_cross_and_self_attention_in_one_are_mixed():
    flags = {"no_cross_attention": True, "cross_self_attention": True}
    model = shake(build("mixhead_transformer", **flags)).eval()
    stock = build("transformer", **flags).eval()
    assert all(layer.encoder_attn is None for layer in model.decoder.layers)
    assert isinstance(model.decoder.layers[0].self_attn, MixheadAttention)
    source, prefix = tokens(padded=True), tokens()
    model.load_state_dict(stock.state_dict())
    torch.testing.assert_close(model(source, None, prefix)[0], stock(source, None, prefix)[0])


@pytest.mark.parametrize("stock", TINY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_are_finite_and_close(stock, dtype):
    model = shake(build(f"mixhead_{stock}", attention_normalizer="sigsoftmax")).eval()
    sentences = tokens(padded=True)
    real = sentences.ne(1)
    expected = forward(model, sentences)[real]
    out = forward(model.to(dtype), sentences)[real]
    assert out.dtype == dtype
    error = (out.float() - expected).abs().max()
    assert error <= 64 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("stock", TINY)
def test_the_value_scale_survives_every_initialisation(stock):
    small, plain = build(f"l2_{stock}", value_init_scale=0.125), build(stock)
    checked = 0
    for name, parameter in plain.named_parameters():
        scaled = "attn.v_proj.weight" in name or "attn.out_proj.weight" in name
        torch.testing.assert_close(small.get_parameter(name), (0.125 if scaled else 1.0) * parameter, msg=name)
        checked += scaled
    assert checked == (12 if stock == "transformer" else 4)


def test_adaptive_inputs_and_softmax_work():
    flags = {
        "adaptive_input": True,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "adaptive_input_cutoff": "10,20",
        "adaptive_softmax_cutoff": "10,20",
    }
    model, stock = build("mixhead_transformer_lm_wiki103", **flags), build("transformer_lm_wiki103", **flags)
    extra = {n for n, _ in model.named_parameters()} - {n for n, _ in stock.named_parameters()}
    assert extra == {n for n, _ in model.named_parameters() if ".head_mixing." in n}
    model.load_state_dict(copy.deepcopy(stock.state_dict()))
    sentences = tokens()
    torch.testing.assert_close(forward(model.eval(), sentences), forward(stock.eval(), sentences))


def test_character_embeddings_work():
    flags = {"character_embeddings": True, "character_filters": "[(1, 8), (2, 8)]", "decoder_input_dim": 16}
    model, stock = build("mixhead_transformer_lm", **flags), build("transformer_lm", **flags)
    assert type(model.decoder.embed_tokens) is type(stock.decoder.embed_tokens)
    assert [p.shape for p in model.decoder.embed_tokens.parameters()] == [
        p.shape for p in stock.decoder.embed_tokens.parameters()
    ]
