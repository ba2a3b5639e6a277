"""The plugin refuses flags that cannot work, in one line that begins with one of them."""

import re
from argparse import Namespace

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY, build_model

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.options import CHOICES, OPTION_NAMES, AttentionOptions
from mixhead_plugin.ops import IMPLEMENTATIONS, implementation_problem, triton
from tests.helpers import OWN, TINY, task
from tests.xl import TINY_XL

TRANSLATION, LM, ROBERTA = "mixhead_transformer", "mixhead_transformer_lm", "mixhead_roberta_base"
SYNTHESIZER, XL = "mixhead_synthesizer_lm", "mixhead_transformer_xl"
RATE = {"mixing_lr_scale": 2.0}
PARTED = [{"attention_gate": "head"}, {"attention_sink": "zero"}, {"score_mixing": "position-wise"}]
PER_LAYER = {"heads_per_layer": "decoder-self=4,4", "head_dim": 4}

# Architecture, flags, and the flag that the message begins with.
WRONG = [
    *((TRANSLATION, {name: "x"}, option_name(name)) for name in CHOICES),
    *((TRANSLATION, {"head_dim": value}, "--head-dim") for value in (0, -3, 2.5, "8", True)),
    *((LM, {"relative_gain": value}, "--relative-gain") for value in (-1, 2.5, True)),
    *(
        (TRANSLATION, {name: True}, option_name(name))
        for name in ("value_init_scale", "mixing_lr_scale")
    ),
    *(
        (LM, {"heads_per_layer": value, "head_dim": 4}, "--heads-per-layer")
        for value in (False, ";;", " ")
    ),
    *(
        (TRANSLATION, {"value_init_scale": float(value)}, "--value-init-scale")
        for value in ("0", "nan", "inf", "-1")
    ),
    *(
        (TRANSLATION, {"mixing_lr_scale": float(value)}, "--mixing-lr-scale")
        for value in ("0", "nan", "inf", "-1")
    ),
    (TRANSLATION, {**RATE, "head_mixing": "random"}, "--mixing-lr-scale"),
    ("sigsoftmax_transformer_lm", RATE, "--mixing-lr-scale"),
    (TRANSLATION, {**RATE, "fp16": True}, "--mixing-lr-scale"),
    (TRANSLATION, {**RATE, "memory_efficient_fp16": True}, "--mixing-lr-scale"),
    (TRANSLATION, {**RATE, "ddp_backend": "fully_sharded"}, "--mixing-lr-scale"),
    (TRANSLATION, {**RATE, "zero_sharding": "os"}, "--mixing-lr-scale"),
    (TRANSLATION, {**RATE, "optimizer": "composite"}, "--mixing-lr-scale"),
    # Heads that do not divide the embedding, covered by the flags or not.
    (TRANSLATION, {"encoder_attention_heads": 5}, "--encoder-attention-heads"),
    (TRANSLATION, {"encoder_attention_heads": 0}, "--encoder-attention-heads"),
    (LM, {"decoder_attention_heads": 5}, "--decoder-attention-heads"),
    (ROBERTA, {"encoder_attention_heads": 5}, "--encoder-attention-heads"),
    (SYNTHESIZER, {"decoder_attention_heads": 5}, "--decoder-attention-heads"),
    (
        TRANSLATION,
        {"decoder_attention_heads": 5, "head_dim": 4, "attention_scope": "encoder"},
        "--decoder-attention-heads",
    ),
    *(
        (f"fixhead_{name}", {"tokens_per_sample": None}, "--head-dim is missing")
        for name in ("transformer", "roberta")
    ),
    ("fixhead_transformer_xl", {"tokens_per_sample": None}, "--head-dim is missing"),
    *((LM, {"attention_scope": scope}, "--attention-scope") for scope in ("cross", "encoder")),
    *((arch, {"attention_scope": "encoder"}, "--attention-scope") for arch in (SYNTHESIZER, XL)),
    (ROBERTA, {"attention_scope": "decoder"}, "--attention-scope"),
    (TRANSLATION, {"no_cross_attention": True, "attention_scope": "cross"}, "--attention-scope"),
    (TRANSLATION, {"head_mixing": "none", "attention_scope": "self"}, "--attention-scope"),
    (XL, {"head_mixing": "none", "attention_scope": "decoder"}, "--attention-scope"),
    (LM, {"scale_heads": True, "head_dim": 5}, "--scale-heads"),
    (LM, {"scale_heads": True, **PER_LAYER}, "--scale-heads"),
    (TRANSLATION, {"head_dim": 5, "quant_noise_pq": 0.1}, "--head-dim"),
    (LM, {**PER_LAYER, "heads_per_layer": "decoder-self=4,3", "quant_noise_pq": 0.1}, "--head-dim"),
    (TRANSLATION, {"encoder_xformers_att_config": "{}"}, "--encoder-xformers-att-config"),
    (ROBERTA, {"mha_heads_to_keep": 2}, "--mha-heads-to-keep"),
    *((LM, {name: "x"}, option_name(name)) for name in ("value_init_scale", "mixing_lr_scale")),
    (LM, {"heads_per_layer": 5, "head_dim": 4}, "--heads-per-layer"),
    (LM, {**PER_LAYER, "decoder_layers_to_keep": "1"}, "--heads-per-layer"),
    (LM, {"heads_per_layer": "decoder-self=2,3"}, "--heads-per-layer"),
    *(
        (LM, {"heads_per_layer": f"decoder-self={heads}", "head_dim": 4}, "--heads-per-layer")
        for heads in ("2", "2,0", "2,3:1:1", "2,many", "2,2;decoder-self=2,2", "")
    ),
    *(
        (LM, {"heads_per_layer": f"{site}=2,2", "head_dim": 4}, "--heads-per-layer")
        for site in ("cross", "somewhere")
    ),
    (
        LM,
        {"heads_per_layer": "decoder-self=2,3:1", "head_dim": 4, "head_mixing": "none"},
        "--heads-per-layer",
    ),
    *((arch, PER_LAYER, "--heads-per-layer") for arch in (SYNTHESIZER, XL)),
    *(
        (LM, {"attention_sink": "zero", "attention_normalizer": n}, "--attention-sink")
        for n in ("relu2", "sigmoid")
    ),
    (
        TRANSLATION,
        {"head_mixing": "differential", "encoder_attention_heads": 1},
        "--encoder-attention-heads",
    ),
    *(
        (LM, {**PER_LAYER, "head_mixing": name}, "--heads-per-layer")
        for name in ("low-rank", "differential")
    ),
    (LM, {**PER_LAYER, "score_mixing": "position-wise"}, "--heads-per-layer"),
    (SYNTHESIZER, {"synthesizer": "random", "score_mixing": "position-wise"}, "--score-mixing"),
    (SYNTHESIZER, {"feature_mixing": "heads"}, "--mixed-features"),
    (LM, {"mixed_features": "q"}, "--mixed-features"),
    *(
        (LM, {"mixing_start": "random", "head_mixing": name}, "--mixing-start")
        for name in ("none", "low-rank")
    ),
    (LM, {**PER_LAYER, "feature_mixing": "output"}, "--heads-per-layer"),
    *(
        (ROBERTA, {"mha_heads_to_keep": 2, "head_mixing": "none", **f}, "--mha-heads-to-keep")
        for f in PARTED
    ),
    (LM, {"relative_position": "rotary", "head_dim": 3}, "--relative-position"),
    *((arch, {"relative_position": "t5"}, "--relative-position") for arch in (SYNTHESIZER, XL)),
    (TRANSLATION, {"relative_gain": 3, "attention_scope": "cross"}, "--relative-gain"),
    (TRANSLATION, {"cross_self_attention": True, "relative_position": "t5"}, "--relative-position"),
    (TRANSLATION, {"cross_self_attention": True, "relative_gain": 4}, "--relative-gain"),
    # The Synthesizer's
    (SYNTHESIZER, {"synthesizer": "mean"}, "--synthesizer"),
    (SYNTHESIZER, {"synthesizer_rank": 4}, "--synthesizer-rank"),
    (
        SYNTHESIZER,
        {"synthesizer": "factorized-random", "synthesizer_factor": 4},
        "--synthesizer-factor",
    ),
    (
        SYNTHESIZER,
        {"synthesizer": "factorized-random", "synthesizer_rank": 0},
        "--synthesizer-rank",
    ),
    (
        SYNTHESIZER,
        {"synthesizer": "factorized-dense", "synthesizer_factor": 65},
        "--synthesizer-factor",
    ),
    (
        SYNTHESIZER,
        {"max_target_positions": 16, "sample_break_mode": "none"},
        "--max-target-positions",
    ),
    (
        SYNTHESIZER,
        {"max_target_positions": 32, "sample_break_mode": "complete", "add_bos_token": True},
        "--max-target-positions",
    ),
    (
        SYNTHESIZER,
        {"max_target_positions": None, "tokens_per_sample": None},
        "--max-target-positions",
    ),
    # Transformer-XL's
    *(
        (XL, {name: 0}, option_name(name))
        for name in ("n_head", "d_head", "n_layer", "d_model", "d_inner", "div_val")
    ),
    (XL, {"d_model": 13}, "--d-model"),
    (XL, {"mem_len": -1}, "--mem-len"),
    *((XL, {"cutoffs": cutoffs}, "--cutoffs") for cutoffs in ([20, 9], [0, 9], [9, 9])),
    (XL, {"same_length": True, "mem_len": 0}, "--same-length"),
    (XL, {"attention_impl": "triton"}, "--attention-impl"),
    (XL, {"task": "language_modeling"}, "--mem-len"),
]
USUAL = {**OWN, **TINY, "transformer_xl": TINY_XL, "roberta": TINY["roberta_base"]}


def sizes(arch):
    return USUAL[arch.partition("_")[2]]


def refusal(function, arch, flags):
    """Return the message with which a function of the arguments refuses `flags`."""
    try:
        function(Namespace(arch=arch, **{**sizes(arch), **flags}))
    except OptionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("expected", dict.fromkeys(flag for _, _, flag in WRONG))
def test_what_cannot_work_is_refused_on_the_command_line_and_when_the_model_is_built(expected):
    for arch, flags in [(arch, flags) for arch, flags, flag in WRONG if flag == expected]:
        said = [refusal(ARCH_CONFIG_REGISTRY[arch], arch, flags)]
        if not {"task", "sample_break_mode"} & set(flags):  # a built model does not know them
            said.append(refusal(lambda args: build_model(args, task()), arch, flags))
        assert all(re.fullmatch(f"{expected}[ :].*", message) for message in said), (
            arch,
            flags,
            said,
        )


WORKS = [
    (LM, {"scale_heads": True, "head_dim": 4}),
    ("fixhead_transformer_lm", {"relative_position": "rotary"}),
    (TRANSLATION, {"scale_heads": True, "head_dim": 7, "attention_scope": "cross"}),
    (
        TRANSLATION,
        {"cross_self_attention": True, "relative_position": "t5", "attention_scope": "encoder"},
    ),
    (LM, {"head_dim": 5, "quant_noise_pq": 0.1, "quant_noise_pq_block_size": 4}),
    (LM, {"decoder_attention_heads": 5, "head_dim": 3}),
    (LM, {**RATE, "fp16": True, "fp16_no_flatten_grads": True}),
    (ROBERTA, {"mha_heads_to_keep": 2, "head_mixing": "none"}),
    (SYNTHESIZER, {"max_target_positions": 16, "sample_break_mode": "eos"}),
    # fairseq judges these.
    (LM, {"fp16": True, "cpu": True, "dropout": 1.5}),
    (TRANSLATION, {"data": "/gone", "label_smoothing": 1.5}),
]


def test_what_may_work_is_let_through():
    for arch, flags in WORKS:
        assert refusal(ARCH_CONFIG_REGISTRY[arch], arch, flags) == "", (arch, flags)


@pytest.mark.parametrize("impl", [i for i in IMPLEMENTATIONS if implementation_problem(i)])
def test_an_implementation_that_cannot_run_is_refused_with_the_reason(impl):
    with pytest.raises(
        OptionError, match=f"--attention-impl {impl}: .*; usable here: auto, reference"
    ):
        ARCH_CONFIG_REGISTRY["mixhead_transformer"](Namespace(attention_impl=impl))


@pytest.mark.parametrize(
    "arch, flags, problem",
    [
        (TRANSLATION, {"encoder_attention_heads": 128, "encoder_embed_dim": 512}, "heads"),
        (TRANSLATION, {"relative_gain": 4}, "gain"),
        (TRANSLATION, {"head_mixing": "differential"}, "into as many"),
        (
            TRANSLATION,
            {"head_mixing": "low-rank", "attention_sink": "learned", "attention_gate": "head"},
            None,
        ),
        (TRANSLATION, {"heads_per_layer": "cross=4:3,4", "head_dim": 4}, "into as many"),
        (TRANSLATION, {"cpu": True}, "--cpu"),
        (SYNTHESIZER, {"synthesizer": "random"}, "gradient"),
        (TRANSLATION, {"head_dim": 256}, None),
    ],
)
def test_what_has_no_kernel_is_refused_before_the_first_batch(monkeypatch, arch, flags, problem):
    monkeypatch.setattr(triton, "machine_problem", lambda: "")
    args = Namespace(**{**sizes(arch), "attention_impl": "triton", **flags})
    if problem is None:
        ARCH_CONFIG_REGISTRY[arch](args)
    else:
        with pytest.raises(OptionError, match=f"^--attention-impl triton: .*{problem}.*; must be"):
            ARCH_CONFIG_REGISTRY[arch](args)


def test_the_help_lists_every_value_of_the_tables():
    options = AttentionOptions()
    assert all(options._get_help(name) for name in OPTION_NAMES)
    assert all(
        value in options._get_help(name) for name, values in CHOICES.items() for value in values
    )
    assert "position-wise in family mixhead" in options._get_help("head_mixing")
