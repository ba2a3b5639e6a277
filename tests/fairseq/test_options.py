"""The plugin refuses flags that cannot work, in one line that begins with one of them."""

import re
from argparse import Namespace

import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY, build_model

from mixhead_plugin.errors import OptionError, option_name
from mixhead_plugin.fairseq.models.gated_attention.model import GatedOptions
from mixhead_plugin.fairseq.models.synthesizer.attention import SYNTHESIZERS
from mixhead_plugin.fairseq.models.synthesizer.model import SynthesizerOptions
from mixhead_plugin.fairseq.models.transformer_xl.model import MixheadTransformerXLConfig
from mixhead_plugin.fairseq.options import CHOICES, FLAGS, AttentionOptions
from mixhead_plugin.ops import IMPLEMENTATIONS, implementation_problem
from mixhead_plugin.ops.triton import support
from tests.helpers import OWN, TINY, task
from tests.transformer_xl import TINY_XL

TRANSLATION = "mixhead_transformer"
LM = "mixhead_transformer_lm"
ROBERTA = "mixhead_roberta_base"
SYNTHESIZER = "mixhead_synthesizer_lm"
XL = "mixhead_transformer_xl"

# Sizes by the name of fairseq's model, which follows the family in the name of an architecture.
SIZES = {**OWN, **TINY, "transformer_xl": TINY_XL, "roberta": TINY["roberta_base"]}

# Each row of a table: the architecture, the flags, and the whole message.

SCALES = [
    (TRANSLATION, {name: value}, f"{option_name(name)} {value}: must be a number greater than 0")
    for name in ("value_init_scale", "mixing_lr_scale")
    for value in (0.0, -1.0, float("nan"), float("inf"), True, "x")
]

WHOLE_NUMBERS = [
    (TRANSLATION, {"head_dim": 0}, "--head-dim 0: must be a whole number of at least 1"),
    (TRANSLATION, {"head_dim": -3}, "--head-dim -3: must be a whole number of at least 1"),
    (TRANSLATION, {"head_dim": 2.5}, "--head-dim 2.5: must be a whole number of at least 1"),
    (TRANSLATION, {"head_dim": "8"}, "--head-dim 8: must be a whole number of at least 1"),
    (TRANSLATION, {"head_dim": True}, "--head-dim True: must be a whole number of at least 1"),
    (LM, {"value_head_dim": 0}, "--value-head-dim 0: must be a whole number of at least 1"),
    (LM, {"value_head_dim": 2.5}, "--value-head-dim 2.5: must be a whole number of at least 1"),
    (
        TRANSLATION,
        {"encoder_attention_heads": True},
        "--encoder-attention-heads True: must be a whole number of at least 1",
    ),
    (LM, {"relative_gain": -1}, "--relative-gain -1: must be a whole number of at least 0"),
    (LM, {"relative_gain": 2.5}, "--relative-gain 2.5: must be a whole number of at least 0"),
    (LM, {"relative_gain": True}, "--relative-gain True: must be a whole number of at least 0"),
]

# As in a YAML file. A flag whose default is None may be null: then it is left out.
NULL = [
    (
        TRANSLATION,
        {name: None},
        f"{option_name(name)} None: must be one of {', '.join(CHOICES[name])}",
    )
    for name in ("head_mixing", "attention_normalizer", "attention_scope", "attention_impl")
]
NULL += [
    (LM, {"relative_gain": None}, "--relative-gain None: must be a whole number of at least 0"),
    (LM, {"value_init_scale": None}, "--value-init-scale None: must be a number greater than 0"),
]

HEADS_AND_SIZES = [
    (
        TRANSLATION,
        {"encoder_attention_heads": 5},
        "--encoder-attention-heads 5: must divide --encoder-embed-dim 16, or set --head-dim",
    ),
    (
        TRANSLATION,
        {"encoder_attention_heads": 0},
        "--encoder-attention-heads 0: must be a whole number of at least 1",
    ),
    # Not all of a site's sizes are wrong if one is.
    (
        TRANSLATION,
        {"decoder_attention_heads": 0, "head_dim": 4},
        "--decoder-attention-heads 0: must be a whole number of at least 1",
    ),
    (LM, {"decoder_embed_dim": 0}, "--decoder-embed-dim 0: must be a whole number of at least 1"),
    (
        TRANSLATION,
        {"encoder_embed_dim": -16, "head_dim": 4},
        "--encoder-embed-dim -16: must be a whole number of at least 1",
    ),
    (
        LM,
        {"decoder_attention_heads": 5},
        "--decoder-attention-heads 5: must divide --decoder-embed-dim 16, or set --head-dim",
    ),
    (
        ROBERTA,
        {"encoder_attention_heads": 5},
        "--encoder-attention-heads 5: must divide --encoder-embed-dim 16, or set --head-dim",
    ),
    (
        SYNTHESIZER,
        {"decoder_attention_heads": 5},
        "--decoder-attention-heads 5: must divide --decoder-embed-dim 16, or set --head-dim",
    ),
    # --head-dim does not help the attentions that the flags do not cover.
    (
        TRANSLATION,
        {"decoder_attention_heads": 5, "head_dim": 4, "attention_scope": "encoder"},
        "--decoder-attention-heads 5: must divide --decoder-embed-dim 16 (decoder-self, outside "
        "--attention-scope encoder)",
    ),
    (
        TRANSLATION,
        {"head_mixing": "differential", "encoder_attention_heads": 1},
        "--encoder-attention-heads 1: must be a multiple of 2 with differential mixing",
    ),
    *(
        (
            arch,
            {"tokens_per_sample": None},
            "--head-dim is missing: without --tokens-per-sample, family fixhead needs a head size",
        )
        for arch in ("fixhead_transformer", "fixhead_roberta", "fixhead_transformer_xl")
    ),
    (
        TRANSLATION,
        {"head_dim": 5, "quant_noise_pq": 0.1},
        "--head-dim 5: times 4 heads must be a multiple of --quant-noise-pq-block-size 8",
    ),
    (
        TRANSLATION,
        {"value_head_dim": 5, "quant_noise_pq": 0.1},
        "--value-head-dim 5: times 4 heads must be a multiple of --quant-noise-pq-block-size 8",
    ),
    (
        LM,
        {"heads_per_layer": "decoder-self=4,3", "head_dim": 4, "quant_noise_pq": 0.1},
        "--head-dim 4: times 3 heads must be a multiple of --quant-noise-pq-block-size 8",
    ),
    (
        LM,
        {"relative_position": "rotary", "head_dim": 3},
        "--relative-position rotary: needs an even head size, not 3",
    ),
    (LM, {"scale_heads": True, "head_dim": 5}, "--scale-heads: needs --head-dim 4, not 5"),
    (
        LM,
        {"scale_heads": True, "head_dim": 4, "decoder_attention_heads": 3},
        "--scale-heads: needs --decoder-attention-heads that divide --decoder-embed-dim 16, not 3",
    ),
    (
        LM,
        {"scale_heads": True, "heads_per_layer": "decoder-self=4,4", "head_dim": 4},
        "--scale-heads: must be left out with --heads-per-layer, it needs equal numbers of heads",
    ),
]

OF_A_DECODER = "the model has no such attention; must be one of all, self, decoder, decoder-self"
NO_OTHER_FLAG = "has no effect without another flag of the plugin; must be all, or left out"
REFUSED_SCOPES = [
    (LM, {"attention_scope": "cross"}, f"--attention-scope cross: {OF_A_DECODER}"),
    (LM, {"attention_scope": "encoder"}, f"--attention-scope encoder: {OF_A_DECODER}"),
    (SYNTHESIZER, {"attention_scope": "encoder"}, f"--attention-scope encoder: {OF_A_DECODER}"),
    (XL, {"attention_scope": "encoder"}, f"--attention-scope encoder: {OF_A_DECODER}"),
    (
        ROBERTA,
        {"attention_scope": "decoder"},
        "--attention-scope decoder: the model has no such attention; must be one of all, self, "
        "encoder",
    ),
    (
        TRANSLATION,
        {"no_cross_attention": True, "attention_scope": "cross"},
        "--attention-scope cross: the model has no such attention; must be one of all, self, "
        "encoder, decoder, decoder-self",
    ),
    (
        TRANSLATION,
        {"head_mixing": "none", "attention_scope": "self"},
        f"--attention-scope self: {NO_OTHER_FLAG}",
    ),
    (
        XL,
        {"head_mixing": "none", "attention_scope": "decoder"},
        f"--attention-scope decoder: {NO_OTHER_FLAG}",
    ),
]

# What is written in --heads-per-layer, and what the message says of it.
WRITTEN = [
    (False, "'False' must be one of encoder-self, decoder-self, cross"),
    (5, "'5' must be one of encoder-self, decoder-self, cross"),
    (";;", "must name an attention, as in 'encoder-self=8,6', or be left out"),
    (" ", "must name an attention, as in 'encoder-self=8,6', or be left out"),
    ("decoder-self=2", "decoder-self must have 2 numbers, one for each layer, not 1"),
    ("decoder-self=", "'' must be a number of heads or source:mixed, from 1 on"),
    ("decoder-self=2,0", "'0' must be a number of heads or source:mixed, from 1 on"),
    ("decoder-self=2,many", "'many' must be a number of heads or source:mixed, from 1 on"),
    ("decoder-self=2,3:1:1", "'3:1:1' must be a number of heads or source:mixed, from 1 on"),
    (
        "decoder-self=2,2;decoder-self=2,2",
        "decoder-self must be there once, not twice",
    ),
    ("cross=2,2", "cross must be one of decoder-self, which --attention-scope covers"),
    (
        "somewhere=2,2",
        "'somewhere' must be one of encoder-self, decoder-self, cross",
    ),
]
# What numbers of heads by layer do not go with, and what the message says of it.
NOT_BY_LAYER = [
    (LM, {"decoder_layers_to_keep": "1"}, "with --decoder-layers-to-keep"),
    (
        LM,
        {"head_mixing": "low-rank"},
        "with --head-mixing low-rank, U is divided by its root mean square over all heads",
    ),
    (
        LM,
        {"head_mixing": "differential"},
        "with --head-mixing differential, its source heads come in pairs",
    ),
    (
        LM,
        {"score_mixing": "position-wise"},
        "with --score-mixing position-wise, each of its query and key heads feeds the scores of "
        "all",
    ),
    (
        LM,
        {"feature_mixing": "output"},
        "with --feature-mixing output, each head's output is a sum of all",
    ),
]
HEADS_PER_LAYER = [
    *(
        (LM, {"heads_per_layer": value, "head_dim": 4}, f"--heads-per-layer {value}: {problem}")
        for value, problem in WRITTEN
    ),
    *(
        (
            arch,
            {"heads_per_layer": "decoder-self=4,4", "head_dim": 4, **flags},
            f"--heads-per-layer decoder-self=4,4: must be left out {reason}",
        )
        for arch, flags, reason in NOT_BY_LAYER
    ),
    # The layers of the decoder have the encoder-decoder attention.
    (
        TRANSLATION,
        {"heads_per_layer": "cross=2,2", "head_dim": 4, "decoder_layers_to_keep": "0"},
        "--heads-per-layer cross=2,2: must be left out with --decoder-layers-to-keep",
    ),
    (
        TRANSLATION,
        {"heads_per_layer": "encoder-self=2,2", "head_dim": 4, "encoder_layers_to_keep": "0"},
        "--heads-per-layer encoder-self=2,2: must be left out with --encoder-layers-to-keep",
    ),
    *(
        (
            arch,
            {"heads_per_layer": "decoder-self=4,4", "head_dim": 4},
            "--heads-per-layer decoder-self=4,4: must be left out, the layers of this model have "
            "the same heads",
        )
        for arch in (SYNTHESIZER, XL)
    ),
    (
        LM,
        {"heads_per_layer": "decoder-self=2,3"},
        "--heads-per-layer decoder-self=2,3: needs --head-dim, the size of one head",
    ),
    (
        LM,
        {"heads_per_layer": "decoder-self=2,3:1", "head_dim": 4, "head_mixing": "none"},
        "--heads-per-layer decoder-self=2,3:1: must have as many source as mixed heads with "
        "--head-mixing none",
    ),
]

THE_MIXINGS = "--head-mixing or --score-mixing or --feature-mixing"
MIXING_LR_SCALE = [
    (
        TRANSLATION,
        {"head_mixing": "random"},
        f"has no effect without a trained {THE_MIXINGS}; must be 1",
    ),
    (
        "sigsoftmax_transformer_lm",
        {},
        f"has no effect without a trained {THE_MIXINGS}; must be 1",
    ),
]
LEARNING_RATES = [
    (arch, {"mixing_lr_scale": 2.0, **flags}, f"--mixing-lr-scale 2.0: {problem}")
    for arch, flags, problem in MIXING_LR_SCALE
]

NO_DISTANCE = "with --cross-self-attention: the distance to the source is not defined"
REFUSED_PARTS = [
    (
        TRANSLATION,
        {"encoder_xformers_att_config": "{}"},
        "--encoder-xformers-att-config: must be left out, the plugin computes the attention",
    ),
    (
        ROBERTA,
        {"mha_heads_to_keep": 2, "head_mixing": "none"},
        "--mha-heads-to-keep 2: must be left out; `python -m mixhead_plugin.analysis prune` "
        "removes heads",
    ),
    (
        ROBERTA,
        {"mha_reg_scale_factor": 0.5, "head_mixing": "none"},
        "--mha-reg-scale-factor 0.5: must be left out, it prepares for --mha-heads-to-keep, which "
        "the plugin does not have (for a trained model: --model-overrides "
        "\"{'mha_reg_scale_factor': 0}\")",
    ),
    (
        LM,
        {"attention_sink": "zero", "attention_normalizer": "relu2"},
        "--attention-sink zero: needs one of the normalizers softmax, sigsoftmax, l2, entmax15, "
        "not relu2",
    ),
    (
        LM,
        {"attention_sink": "zero", "attention_normalizer": "sigmoid"},
        "--attention-sink zero: needs one of the normalizers softmax, sigsoftmax, l2, entmax15, "
        "not sigmoid",
    ),
    (
        LM,
        {"mixed_features": "q"},
        "--mixed-features q: has no effect with feature mixing none; must be qkv, or the feature "
        "mixing heads or shared",
    ),
    (
        LM,
        {"mixing_start": "random", "head_mixing": "none"},
        "--mixing-start random: has no effect with head mixing none; must be identity, or the head "
        "mixing position-independent or position-wise",
    ),
    (
        LM,
        {"mixing_start": "random", "head_mixing": "low-rank"},
        "--mixing-start random: has no effect with head mixing low-rank; must be identity, or the "
        "head mixing position-independent or position-wise",
    ),
    (
        TRANSLATION,
        {"relative_gain": 3, "attention_scope": "cross"},
        "--relative-gain 3: must be 0 with --attention-scope cross, which has no self-attention",
    ),
    (
        TRANSLATION,
        {"cross_self_attention": True, "relative_position": "t5"},
        f"--relative-position t5: must be none {NO_DISTANCE}",
    ),
    (
        TRANSLATION,
        {"cross_self_attention": True, "relative_gain": 4},
        f"--relative-gain 4: must be 0 {NO_DISTANCE}",
    ),
]

ADAPTIVE = {"adaptive_input": True, "adaptive_input_cutoff": "9", "adaptive_softmax_cutoff": "9"}
TIED = [
    ({}, "--tie-adaptive-weights: needs --adaptive-input"),
    (
        {**ADAPTIVE, "adaptive_input_factor": 2},
        "--adaptive-input-factor 2: must be 4, as --adaptive-softmax-factor, with "
        "--tie-adaptive-weights",
    ),
    (
        {**ADAPTIVE, "adaptive_softmax_cutoff": "9,12"},
        "--adaptive-input-cutoff 9: must be 9,12, as --adaptive-softmax-cutoff, with "
        "--tie-adaptive-weights",
    ),
    (
        {**ADAPTIVE, "decoder_input_dim": 8},
        "--decoder-input-dim 8: must be 16, as --decoder-output-dim, with --tie-adaptive-weights",
    ),
]

ONLY_THIS_FAR = "a synthesizer has scores only up to this position"
OF_A_SYNTHESIZER = [
    (
        {"relative_position": "t5"},
        "--relative-position t5: must be none, the scores are absolute",
    ),
    (
        {"synthesizer": "random", "score_mixing": "position-wise"},
        "--score-mixing position-wise: must be none, or the synthesizer one of dense, "
        "factorized-random, whose products it can mix",
    ),
    (
        {"feature_mixing": "heads"},
        "--feature-mixing heads: must be none or output, or the mixed features v; a Synthesizer "
        "has no queries and keys to mix",
    ),
    (
        {"synthesizer": "mean"},
        "--synthesizer mean: must be one of dense, random, fixed-random, factorized-dense, "
        "factorized-random",
    ),
    (
        {"synthesizer": ""},
        "--synthesizer '': must be one of dense, random, fixed-random, factorized-dense, "
        "factorized-random",
    ),
    (
        {"synthesizer_rank": 4},
        "--synthesizer-rank 4: must be left out, or used with --synthesizer factorized-random",
    ),
    (
        {"synthesizer": "factorized-random", "synthesizer_factor": 4},
        "--synthesizer-factor 4: must be left out, or used with --synthesizer factorized-dense",
    ),
    (
        {"synthesizer": "factorized-random", "synthesizer_rank": 0},
        "--synthesizer-rank 0: must be a whole number of at least 1",
    ),
    (
        {"synthesizer": "factorized-dense", "synthesizer_factor": 2.5},
        "--synthesizer-factor 2.5: must be a whole number of at least 1",
    ),
    (
        {"synthesizer": "factorized-dense", "synthesizer_factor": 65},
        "--synthesizer-factor 65: must be at most the length, 64",
    ),
    (
        {"max_target_positions": 16, "sample_break_mode": "none"},
        "--max-target-positions 16: must be at least 32, for --tokens-per-sample 32; "
        f"{ONLY_THIS_FAR}",
    ),
    # One more position than --tokens-per-sample, for the token that begins each block.
    (
        {"max_target_positions": 32, "sample_break_mode": "complete", "add_bos_token": True},
        "--max-target-positions 32: must be at least 33, for --tokens-per-sample 32; "
        f"{ONLY_THIS_FAR}",
    ),
    ({"max_target_positions": 0}, "--max-target-positions 0: must be a whole number of at least 1"),
    (
        {"max_target_positions": None, "tokens_per_sample": None},
        f"--max-target-positions is missing: {ONLY_THIS_FAR}",
    ),
]

ASCENDING = "must be numbers of words in ascending order, as 20000,40000"
OF_TRANSFORMER_XL = [
    ({"n_head": 2.5}, "--n-head 2.5: must be a whole number of at least 1"),
    ({"n_head": 0}, "--n-head 0: must be a whole number of at least 1"),
    ({"d_head": 0}, "--d-head 0: must be a whole number of at least 1"),
    ({"n_layer": 0}, "--n-layer 0: must be a whole number of at least 1"),
    ({"d_model": 0}, "--d-model 0: must be a whole number of at least 2"),
    ({"d_inner": 0}, "--d-inner 0: must be a whole number of at least 1"),
    ({"div_val": 0}, "--div-val 0: must be a whole number of at least 1"),
    ({"d_model": 13}, "--d-model 13: must be even, for as many sines as cosines of the distance"),
    ({"mem_len": -1}, "--mem-len -1: must be a whole number of at least 0"),
    ({"cutoffs": [20, 9]}, f"--cutoffs [20, 9]: {ASCENDING}"),
    ({"cutoffs": [0, 9]}, f"--cutoffs [0, 9]: {ASCENDING}"),
    ({"cutoffs": [9, 9]}, f"--cutoffs [9, 9]: {ASCENDING}"),
    (
        {"same_length": True, "mem_len": 0},
        "--same-length: needs a --mem-len of at least 1: each token sees that many positions",
    ),
    (
        {"relative_position": "t5"},
        "--relative-position t5: must be none, Transformer-XL has its own",
    ),
    (
        {"task": "language_modeling"},
        "--mem-len 6: --task language_modeling does not keep the windows of a text in order; must "
        "be 0 (for a trained model: --model-overrides \"{'mem_len': 0}\"), or --task "
        "truncated_bptt_lm",
    ),
]

REFUSED = [
    *SCALES,
    *WHOLE_NUMBERS,
    *NULL,
    *HEADS_AND_SIZES,
    *REFUSED_SCOPES,
    *HEADS_PER_LAYER,
    *LEARNING_RATES,
    *REFUSED_PARTS,
    *((LM, {"tie_adaptive_weights": True, **flags}, message) for flags, message in TIED),
    *((SYNTHESIZER, flags, message) for flags, message in OF_A_SYNTHESIZER),
    *((XL, flags, message) for flags, message in OF_TRANSFORMER_XL),
]

# A model that is built does not know these flags, only the command line does.
NOT_OF_A_MODEL = {"task", "sample_break_mode"}
REFUSED_BY_MODELS = [row for row in REFUSED if NOT_OF_A_MODEL.isdisjoint(row[1])]


def arguments(arch, flags):
    """Return the arguments of a command for a tiny model of `arch`."""
    sizes = SIZES[arch.partition("_")[2]]
    return Namespace(arch=arch, **{**sizes, **flags})


def read(arch, flags):
    """Complete the flags, as fairseq's parser of the command line does."""
    ARCH_CONFIG_REGISTRY[arch](arguments(arch, flags))


@pytest.mark.parametrize("arch, flags, message", REFUSED)
def test_what_cannot_work_is_refused_on_the_command_line(arch, flags, message):
    with pytest.raises(OptionError) as error:
        read(arch, flags)
    assert str(error.value) == message


@pytest.mark.parametrize("arch, flags, message", REFUSED_BY_MODELS)
def test_what_cannot_work_is_refused_when_the_model_is_built(arch, flags, message):
    with pytest.raises(OptionError) as error:
        build_model(arguments(arch, flags), task())
    assert str(error.value) == message


@pytest.mark.parametrize("name", CHOICES)
def test_a_value_that_no_table_has_is_refused_with_those_that_exist(name):
    with pytest.raises(OptionError) as error:
        read(TRANSLATION, {name: "x"})
    assert str(error.value) == f"{option_name(name)} x: must be one of {', '.join(CHOICES[name])}"


@pytest.mark.parametrize("name", ["head_mixing", "attention_scope"])
@pytest.mark.parametrize("value, shown", [("", "''"), ("none ", "'none '")])
def test_a_value_that_would_not_be_seen_is_shown_as_a_shell_takes_it(name, value, shown):
    with pytest.raises(OptionError) as error:
        read(TRANSLATION, {name: value})
    choices = ", ".join(CHOICES[name])
    assert str(error.value) == f"{option_name(name)} {shown}: must be one of {choices}"


WORKS = [
    (LM, {"scale_heads": True, "head_dim": 4}),
    ("fixhead_transformer_lm", {"relative_position": "rotary"}),
    (TRANSLATION, {"scale_heads": True, "head_dim": 7, "attention_scope": "cross"}),
    (
        TRANSLATION,
        {"cross_self_attention": True, "relative_position": "t5", "attention_scope": "encoder"},
    ),
    (LM, {"head_dim": 5, "quant_noise_pq": 0.1, "quant_noise_pq_block_size": 4}),
    (LM, {"head_dim": 5, "value_head_dim": 4, "quant_noise_pq": 0.1}),
    (LM, {"decoder_attention_heads": 5, "head_dim": 3}),
    (LM, {"mixing_lr_scale": 2.0, "fp16": True, "fp16_no_flatten_grads": True}),
    (SYNTHESIZER, {"max_target_positions": 16, "sample_break_mode": "eos"}),
    # fairseq judges these.
    (LM, {"fp16": True, "cpu": True, "dropout": 1.5}),
    (TRANSLATION, {"data": "/gone", "label_smoothing": 1.5}),
]


@pytest.mark.parametrize("arch, flags", WORKS)
def test_what_may_work_is_let_through(arch, flags):
    read(arch, flags)


@pytest.mark.parametrize("arch", [TRANSLATION, XL])
@pytest.mark.parametrize("impl", [i for i in IMPLEMENTATIONS if implementation_problem(i)])
def test_an_implementation_that_cannot_run_is_refused_with_the_reason(impl, arch):
    usable = [each for each in CHOICES["attention_impl"] if not implementation_problem(each)]
    with pytest.raises(OptionError) as error:
        read(arch, {"attention_impl": impl})
    assert str(error.value) == (
        f"--attention-impl {impl}: {implementation_problem(impl)}; usable here: "
        f"{', '.join(usable)} (for a trained model: --model-overrides "
        "\"{'attention_impl': 'auto'}\")"
    )


NO_KERNEL = [
    (
        TRANSLATION,
        {"encoder_attention_heads": 128, "encoder_embed_dim": 512},
        "mixes at most 64 heads, not 128; must be auto, blockwise or reference",
    ),
    (
        TRANSLATION,
        {"relative_gain": 4},
        "has no kernel for gain; must be auto, blockwise or reference",
    ),
    (
        TRANSLATION,
        {"value_head_dim": 257},
        "has no kernel for head size 257, only up to 256; must be auto, blockwise or reference",
    ),
    (
        TRANSLATION,
        {"head_mixing": "differential"},
        "mixes 4 heads into as many, not into 2; must be auto, blockwise or reference",
    ),
    (
        TRANSLATION,
        {"heads_per_layer": "cross=4:3,4", "head_dim": 4},
        "mixes 4 heads into as many, not into 3; must be auto, blockwise or reference",
    ),
    (
        TRANSLATION,
        {"cpu": True},
        "needs a GPU, which --cpu excludes; must be auto, blockwise or reference",
    ),
    (
        SYNTHESIZER,
        {"synthesizer": "random"},
        "gives the scores no gradient; must be auto, blockwise or reference, or --synthesizer one "
        "of dense, fixed-random, factorized-random",
    ),
]


@pytest.fixture
def with_a_gpu(monkeypatch):
    """Let the kernels run here, as far as flags are checked."""
    monkeypatch.setattr(support, "machine_problem", lambda: "")


@pytest.mark.parametrize("arch, flags, problem", NO_KERNEL)
def test_what_has_no_kernel_is_refused_before_the_first_batch(with_a_gpu, arch, flags, problem):
    with pytest.raises(OptionError) as error:
        read(arch, {"attention_impl": "triton", **flags})
    assert str(error.value) == f"--attention-impl triton: {problem}"


@pytest.mark.parametrize(
    "flags",
    [
        {"head_dim": 256},
        {"head_mixing": "low-rank", "attention_sink": "learned", "attention_gate": "head"},
    ],
)
def test_what_has_a_kernel_is_let_through(with_a_gpu, flags):
    read(TRANSLATION, {"attention_impl": "triton", **flags})


@pytest.mark.parametrize("name", FLAGS)
def test_the_help_lists_every_value_of_the_tables(name):
    text = AttentionOptions()._get_help(name)
    assert text
    for value in CHOICES.get(name, ()):
        assert value in text


def test_the_help_tells_what_a_family_sets():
    assert "position-wise in family mixhead" in AttentionOptions()._get_help("head_mixing")


def default_in_help(options, name):
    return re.search(r"\(default: (.*)\)$", options._get_help(name)).group(1)


def test_the_help_of_a_model_tells_its_own_defaults():
    units = GatedOptions()
    assert default_in_help(units, "gau_expansion") == str(units.gau_expansion)
    assert default_in_help(units, "gau_query_dim") == str(units.gau_query_dim)
    synthesizer = SynthesizerOptions()
    assert default_in_help(synthesizer, "synthesizer") == synthesizer.synthesizer
    rank = SYNTHESIZERS["factorized-random"].default_size(64)
    assert default_in_help(synthesizer, "synthesizer_rank") == str(rank)
    xl = MixheadTransformerXLConfig()
    assert default_in_help(xl, "head_dim") == "--d-head; --tokens-per-sample in family fixhead"


def test_the_help_of_the_synthesizer_lists_all_of_them():
    text = SynthesizerOptions()._get_help("synthesizer")
    assert f"one of {', '.join(SYNTHESIZERS)} (" in text
