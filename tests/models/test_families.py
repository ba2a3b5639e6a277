from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY, ARCH_MODEL_REGISTRY, build_model

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.options import FAMILIES, SCOPES, TOKENS_PER_SAMPLE
from tests.helpers import TINY, build, shake, task, tokens

STOCK_ARCHS = [
    arch for stock in ("transformer", "transformer_lm", "roberta") for arch in ARCH_MODEL_INV_REGISTRY[stock]
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stock_arch", STOCK_ARCHS)
def test_every_stock_architecture_has_one_of_every_family(family, stock_arch):
    model = ARCH_MODEL_REGISTRY[f"{family}_{stock_arch}"]
    assert model.family == family
    assert issubclass(model, ARCH_MODEL_REGISTRY[stock_arch])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stock", TINY)
def test_a_family_is_its_preset(family, stock):
    flags = {"head_dim": 6} if family == "fixhead" and stock == "transformer" else {}
    model = build(f"{family}_{stock}", **flags)
    attentions = [m for m in model.modules() if isinstance(m, MixheadAttention)]
    assert len(attentions) == (6 if stock == "transformer" else 2)
    preset = FAMILIES[family]
    head_dim = flags.get("head_dim") or (TINY[stock]["tokens_per_sample"] if "head_dim" in preset else 4)
    for attention in attentions:
        assert attention.normalizer == preset.get("attention_normalizer", "softmax")
        assert attention.head_mixing_kind == preset.get("head_mixing", "none")
        assert attention.value_init_scale == preset.get("value_init_scale", 1.0)
        assert attention.head_dim == head_dim


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stock", TINY)
def test_any_flag_overrides_the_preset(family, stock):
    flags = dict(attention_normalizer="relu2", head_mixing="position-independent", head_dim=5, value_init_scale=0.1)
    attention = next(m for m in build(f"{family}_{stock}", **flags).modules() if isinstance(m, MixheadAttention))
    assert attention.normalizer == "relu2"
    assert attention.head_mixing_kind == "position-independent"
    assert (attention.head_dim, attention.value_init_scale) == (5, 0.1)


def test_fixheads_preset_is_the_input_length():
    assert FAMILIES["fixhead"]["head_dim"] == TOKENS_PER_SAMPLE


def forward(model, sentences):
    if "Roberta" in type(model).__name__:
        return model(sentences)[0]
    if hasattr(model, "encoder"):
        return model(sentences, None, sentences)[0]
    return model(sentences)[0]


@pytest.mark.parametrize("mixing", ["position-independent", "position-wise"])
@pytest.mark.parametrize("stock", TINY)
def test_an_untrained_mixhead_model_is_the_stock_model_of_the_same_seed(stock, mixing):
    expected = build(stock)
    model = build(f"mixhead_{stock}", head_mixing=mixing)
    sentences = tokens(padded=True)
    torch.testing.assert_close(forward(model.eval(), sentences), forward(expected.eval(), sentences))
    loss = [forward(m.train(), sentences).square().mean() for m in (model, expected)]
    torch.testing.assert_close(*loss)


@pytest.mark.parametrize("stock", TINY)
def test_training_moves_the_mixing(stock):
    model = build(f"mixhead_{stock}").train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    sentences = tokens(padded=True)
    for _ in range(2):
        optimizer.zero_grad()
        forward(model, sentences).log_softmax(-1)[..., 5].mean().neg().backward()
        optimizer.step()
    for attention in (m for m in model.modules() if isinstance(m, MixheadAttention)):
        for name, value in attention.head_mixing.identity().items():
            assert (attention.head_mixing.get_parameter(name) - value).abs().max() > 1e-3


@pytest.mark.parametrize("stock", TINY)
def test_padding_and_the_other_sentences_of_a_batch_change_nothing(stock):
    model = shake(build(f"mixhead_{stock}", attention_normalizer="sigsoftmax")).eval()
    batch = tokens(padded=True)
    together = forward(model, batch)
    for i, sentence in enumerate(batch):
        alone = sentence[sentence != 1][None]
        torch.testing.assert_close(forward(model, alone)[0], together[i, : alone.shape[1]], rtol=1e-4, atol=1e-5)


SCOPED = {
    "all": ("encoder.self_attn", "decoder.self_attn", "decoder.encoder_attn"),
    "self": ("encoder.self_attn", "decoder.self_attn"),
    "cross": ("decoder.encoder_attn",),
    "encoder": ("encoder.self_attn",),
    "decoder": ("decoder.self_attn", "decoder.encoder_attn"),
    "decoder-self": ("decoder.self_attn",),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_the_scope_says_which_attentions_change(scope):
    model = build("mixhead_transformer", attention_scope=scope, head_dim=7)
    for name, module in model.named_modules():
        if name.endswith("attn"):
            side, *_, kind = name.split(".")
            assert isinstance(module, MixheadAttention) == (f"{side}.{kind}" in SCOPED[scope]), name


# Parameters that mixing adds: mixhead tables 1 to 3. (stock architecture, A, B)
ADDED = [
    ("transformer_lm", 384, 3_456),
    ("transformer_lm_wiki103", 1_024, 17_408),
    ("transformer_lm_baevski_wiki103", 1_024, 17_408),
]


@pytest.mark.parametrize("stock_arch, independent, wise", ADDED)
def test_mixing_adds_as_many_parameters_as_in_the_paper(stock_arch, independent, wise):
    counts = {}
    cutoffs = {"adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20"} if "wiki103" in stock_arch else {}
    sizes = {"max_target_positions": 32, "tokens_per_sample": 32, **cutoffs}
    for mixing in ("none", "position-independent", "position-wise"):
        with torch.device("meta"):
            model = build_full(f"mixhead_{stock_arch}", head_mixing=mixing, **sizes)
        counts[mixing] = sum(p.numel() for p in model.parameters())
    assert counts["position-independent"] - counts["none"] == independent
    assert counts["position-wise"] - counts["none"] == wise


def build_full(arch, **flags):
    """A model of `arch` in its real sizes, but for `flags`."""
    args = Namespace(arch=arch, **flags)
    ARCH_CONFIG_REGISTRY[arch](args)
    return build_model(args, task())
