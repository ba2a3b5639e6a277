"""Every architecture exists in every family, and a family presets flags and nothing else."""

import itertools
import re

import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_REGISTRY,
    build_model,
    register_model,
    register_model_architecture,
)
from fairseq.models import MODEL_DATACLASS_REGISTRY as DATACLASSES
from fairseq.models.transformer_lm import base_lm_architecture

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.models import ARCHITECTURES
from mixhead_plugin.fairseq.models.architectures import MODELS
from mixhead_plugin.fairseq.models.transformer import MixheadTransformerModel
from mixhead_plugin.fairseq.options import FAMILIES, SCOPES
from mixhead_plugin.parts import PARTS
from tests.covering import each_once
from tests.fairseq.models.cases import NEUTRAL, attentions, command, forward, yaml
from tests.helpers import TINY, build, task, tokens

UPSTREAM = [
    *ARCH_MODEL_INV_REGISTRY["transformer"],
    *ARCH_MODEL_INV_REGISTRY["transformer_lm"],
    *ARCH_MODEL_INV_REGISTRY["roberta"],
]


def test_every_architecture_is_there_in_every_family():
    assert set(UPSTREAM) | {"transformer_xl", "synthesizer_lm"} < set(ARCHITECTURES)
    of_heads = {
        name: entry for name, entry in ARCHITECTURES.items() if entry.model.families == (*FAMILIES,)
    }
    assert ARCHITECTURES.keys() - of_heads == {"gau_lm", "gau_roberta"}  # which have one head
    for family, (name, entry) in itertools.product(FAMILIES, of_heads.items()):
        assert ARCH_MODEL_REGISTRY[f"{family}_{name}"] is entry.model
        assert f"{family}_{name}" in ARCH_CONFIG_REGISTRY
        if name in UPSTREAM:
            assert issubclass(entry.model, ARCH_MODEL_REGISTRY[name])
        if name in MODELS and entry.model.by_dataclass:
            assert issubclass(DATACLASSES[f"{family}_{name}"], entry.model.config)


def expected(family, name):
    usual = {
        "attention_normalizer": "softmax",
        "value_init_scale": 1.0,
        **dict.fromkeys(PARTS, "none"),
    }
    return {**usual, **FAMILIES[family]}[name]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("upstream", TINY)
def test_a_family_is_its_preset(family, upstream):
    flags = {"head_dim": 6} if family == "fixhead" and upstream == "transformer" else {}
    model = build(f"{family}_{upstream}", **flags)
    length = TINY[upstream].get("tokens_per_sample", 6)
    assert len(attentions(model)) == (6 if upstream == "transformer" else 2)
    for attention in attentions(model):
        assert attention.normalizer == expected(family, "attention_normalizer")
        assert all(getattr(attention.variant, part) == expected(family, part) for part in PARTS)
        assert attention.value_init_scale == expected(family, "value_init_scale")
        assert attention.head_dim == (length if family == "fixhead" else 4)


@pytest.mark.parametrize("arch", ["transformer_lm", "transformer_xl", "synthesizer_lm"])
def test_a_yaml_file_gets_the_preset_of_the_family(arch):
    layers = "n_layer" if "_xl" in arch else "decoder_layers"
    for family in FAMILIES:
        with torch.device("meta"):
            model = build_model(yaml(f"{family}_{arch}", **{layers: 1}), task())
        typed = command(f"{family}_{arch}", "--tokens-per-sample", "48")
        for attention in attentions(model):
            assert (
                attention.normalizer
                == typed.attention_normalizer
                == expected(family, "attention_normalizer")
            )
            assert (
                attention.variant.head_mixing
                == typed.head_mixing
                == expected(family, "head_mixing")
            )
            if family == "fixhead":
                assert attention.head_dim == typed.head_dim == 48


def test_a_users_own_architecture_has_the_family_of_its_model(monkeypatch):
    for registry in (ARCH_MODEL_REGISTRY, ARCH_MODEL_NAME_REGISTRY):
        monkeypatch.setitem(registry, "mine_transformer", registry["l2_transformer"])
    monkeypatch.setitem(
        ARCH_CONFIG_REGISTRY, "mine_transformer", ARCH_CONFIG_REGISTRY["transformer"]
    )
    assert {attention.normalizer for attention in attentions(build("mine_transformer"))} == {"l2"}


def test_a_users_own_model_has_no_family_whatever_its_name_is(monkeypatch):
    name = "gated_transformer_of_mine"
    for registry in (
        MODEL_REGISTRY,
        ARCH_MODEL_REGISTRY,
        ARCH_MODEL_NAME_REGISTRY,
        ARCH_MODEL_INV_REGISTRY,
        ARCH_CONFIG_REGISTRY,
    ):
        monkeypatch.setitem(registry, name, None)  # taken out again after the test
        del registry[name]

    @register_model(name)
    class Mine(MixheadTransformerModel):
        pass

    register_model_architecture(name, name)(ARCH_CONFIG_REGISTRY["transformer"])
    gates = {attention.variant.attention_gate for attention in attentions(build(name))}
    assert gates == {"none"}


@pytest.fixture(params=FAMILIES)
def own_language_model(request, monkeypatch):
    """Register an architecture as a user does, whose function is fairseq's; return the family."""
    family = request.param
    model = f"{family}_transformer_lm"
    for registry in (ARCH_MODEL_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_CONFIG_REGISTRY):
        monkeypatch.setitem(registry, "my_lm", None)  # taken out again after the test
        del registry["my_lm"]
    monkeypatch.setitem(ARCH_MODEL_INV_REGISTRY, model, list(ARCH_MODEL_INV_REGISTRY[model]))
    register_model_architecture(model, "my_lm")(base_lm_architecture)
    return family


def test_a_users_own_language_model_has_the_family_on_the_command_line(own_language_model):
    typed = command("my_lm", "--tokens-per-sample=48", "--decoder-layers=1", "--bf16")
    assert typed.tpu is False
    with torch.device("meta"):
        model = build_model(convert_namespace_to_omegaconf(typed).model, task())
    (attention,) = attentions(model)
    assert attention.normalizer == expected(own_language_model, "attention_normalizer")
    assert attention.variant.head_mixing == expected(own_language_model, "head_mixing")
    assert attention.variant.attention_gate == expected(own_language_model, "attention_gate")


def test_a_flag_overrides_the_family_of_a_users_own_architecture(own_language_model):
    typed = command("my_lm", "--tokens-per-sample=48", "--head-mixing=average")
    assert typed.head_mixing == "average"


def test_the_command_line_trains_in_bf16_without_a_tpu():
    assert command("mixhead_transformer", "--bf16").tpu is False


SCOPED = {
    "all": {"encoder.self_attn", "decoder.self_attn", "decoder.encoder_attn"},
    "self": {"encoder.self_attn", "decoder.self_attn"},
    "cross": {"decoder.encoder_attn"},
    "encoder": {"encoder.self_attn"},
    "decoder": {"decoder.self_attn", "decoder.encoder_attn"},
    "decoder-self": {"decoder.self_attn"},
}


@pytest.mark.parametrize("scope", SCOPES)
def test_the_scope_says_which_attentions_change(scope):
    model = build("mixhead_transformer", attention_scope=scope, head_dim=7)
    changed = {
        name for name, module in model.named_modules() if isinstance(module, MixheadAttention)
    }
    assert {re.sub(r"layers\.\d+\.", "", name) for name in changed} == SCOPED[scope]


@pytest.mark.parametrize("upstream", TINY)
def test_the_value_scale_survives_every_initialisation(upstream):
    small = build(f"l2_{upstream}", value_init_scale=0.125)
    plain = build(upstream)
    scaled = 0
    for name, parameter in plain.named_parameters():
        values = "attn.v_proj.weight" in name or "attn.out_proj.weight" in name
        torch.testing.assert_close(
            small.get_parameter(name), (0.125 if values else 1.0) * parameter, msg=name
        )
        scaled += values
    assert scaled == (12 if upstream == "transformer" else 4)


@each_once(upstream=TINY, flags=NEUTRAL)
def test_an_untrained_model_is_fairseqs_model_of_the_same_seed(upstream, flags):
    models = build(f"mixhead_{upstream}", **{"head_mixing": "none", **flags}), build(upstream)
    sentences = tokens(padded=True)
    torch.testing.assert_close(*(forward(model.eval(), sentences) for model in models))
    torch.testing.assert_close(
        *(forward(model.train(), sentences).square().mean() for model in models)
    )
