"""Before a training, a model refuses a config or a criterion.

It refuses what would not train what was asked for.
"""

import logging

import pytest
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
    LabelSmoothedCrossEntropyCriterionWithAlignment as Alignment,
)
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.models.architectures import ARCHITECTURES
from mixhead_plugin.fairseq.repairs.dropped_scales import SCALES
from mixhead_plugin.fairseq.repairs.unknown_fields import is_checked, known_fields
from tests.helpers import build, dictionary

PLAIN = {"head_mixing": "none"}


def begin(model, criterion=CrossEntropyCriterion, training=None, **fields):
    """Begin to train a model.

    Args:
        model: to be trained
        criterion: its class
        training: fields of the config by their group; the others have fairseq's defaults
        fields: of the group `model`
    """
    cfg = OmegaConf.structured(FairseqConfig)
    OmegaConf.set_struct(cfg, False)
    cfg.model = {"_name": "mixhead_transformer", **fields}
    cfg.criterion = {"_name": "loss"}
    cfg.optimizer = {"_name": "adam"}
    for group, values in (training or {}).items():
        cfg[group].update(values)
    Trainer(cfg, None, model, criterion.__new__(criterion))


class Begun(Exception):
    """Nothing was refused."""


@pytest.fixture(autouse=True)
def fairseqs_part(monkeypatch):
    def begun(model):
        raise Begun

    # the first that fairseq does
    monkeypatch.setattr("fairseq.trainer._catalog_shared_params", begun)


# ---- the optimizer -----------------------------------------------------------------------------

SCALED = {"mixing_lr_scale": 2}
NOT_KEPT = [
    (
        {"common": {"fp16": True}},
        "with --fp16 needs --fp16-no-flatten-grads, which keeps the parameters apart",
    ),
    ({"common": {"memory_efficient_fp16": True}}, "must be 1 with --memory-efficient-fp16"),
    ({"common": {"memory_efficient_bf16": True}}, "must be 1 with --memory-efficient-bf16"),
    (
        {"distributed_training": {"ddp_backend": "fully_sharded"}},
        "must be 1 with --ddp-backend fully_sharded",
    ),
    ({"distributed_training": {"zero_sharding": "os"}}, "must be 1 with --zero-sharding os"),
    ({"optimizer": {"_name": "composite"}}, "must be 1 with --optimizer composite"),
]


@pytest.mark.parametrize("training, problem", NOT_KEPT)
def test_a_factor_of_the_learning_rate_that_the_optimizer_would_not_keep_is_refused(
    training, problem
):
    model = build("mixhead_transformer_lm", mixing_lr_scale=2.0)
    with pytest.raises(OptionError) as error:
        begin(model, training=training, **SCALED)
    assert str(error.value) == f"--mixing-lr-scale 2.0: {problem}"


def test_a_factor_that_the_optimizer_keeps_is_trained():
    model = build("mixhead_transformer_lm", mixing_lr_scale=2.0)
    apart = {"fp16": True, "fp16_no_flatten_grads": True}
    with pytest.raises(Begun):
        begin(model, training={"common": apart}, **SCALED)


# ---- fields of YAML ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, refused",
    [
        ({"head_mixng": "average"}, "model.head_mixng: unknown; did you mean head_mixing?"),
        (
            {"attention_scop": "self"},
            "model.attention_scop: unknown; did you mean attention_scope?",
        ),
        ({"xyzzy": 1}, "model.xyzzy: unknown; must be left out"),
    ],
)
@pytest.mark.parametrize(
    "arch", ["mixhead_transformer", "mixhead_roberta_base", "mixhead_transformer_lm_gpt"]
)
def test_a_field_that_nothing_reads_is_refused_by_name(arch, fields, refused):
    with pytest.raises(OptionError) as error:
        begin(build(arch), _name=arch, **fields)
    assert str(error.value).partition(" or ")[0].rstrip("?") == refused.rstrip("?")


def test_a_field_of_the_plugin_in_fairseqs_own_model_is_refused():
    with pytest.raises(OptionError, match=r"^model.head_mixing: unknown; "):
        begin(build("transformer"), _name="transformer", head_mixing="position-wise")
    with pytest.raises(Begun):
        begin(
            build("transformer"), _name="transformer", encoder_layers=2, share_all_embeddings=True
        )


def test_a_field_that_an_architecture_of_fairseqs_language_model_lacks_is_refused():
    with pytest.raises(OptionError, match=r"^model.dropuot: unknown; did you mean dropout"):
        begin(build("transformer_lm_gpt"), _name="transformer_lm_gpt", dropuot=0.1)


def test_the_whole_config_of_a_language_model_is_known():
    for family in ("", "mixhead_"):
        for name in ("transformer_lm", "transformer_lm_gpt"):
            arch = f"{family}{name}"
            config = MODEL_DATACLASS_REGISTRY[f"{family}transformer_lm"]()
            fields = {each: None for each in vars(config) if each != "_name"}
            with pytest.raises(Begun):
                begin(build(arch), _name=arch, **fields)


@pytest.mark.parametrize("family", ["", "mixhead_"], ids=["fairseq's", "the plugin's"])
def test_the_fields_that_fairseq_itself_adds_are_known(family):
    for name in ARCHITECTURES:
        arch = f"{family}{name}"
        if arch not in ARCH_CONFIG_REGISTRY or arch in MODEL_DATACLASS_REGISTRY:
            continue  # fairseq itself checks the fields of the second
        cfg = OmegaConf.create({"_name": arch, "tokens_per_sample": 32})
        # as fairseq's build_model completes the fields of a YAML file
        ARCH_CONFIG_REGISTRY[arch](cfg)
        kind = ARCH_MODEL_REGISTRY[arch]
        assert is_checked(kind) and set(cfg) <= known_fields(kind, arch), arch


# ---- flags that fairseq drops ------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["transformer_lm", "mixhead_transformer_lm"])
def test_a_scale_that_fairseqs_language_model_drops_is_refused(arch):
    for option in SCALES:
        with pytest.raises(OptionError) as error:
            begin(build(arch), **{option: True})
        assert str(error.value) == (
            f"--{option.replace('_', '-')}: must be left out, fairseq's transformer_lm drops it "
            "without a word, and "
            "the plugin's computes with it"
        )
    with pytest.raises(Begun):
        begin(build(arch), **dict.fromkeys(SCALES, False))


# ---- who reads attention weights ---------------------------------------------------------------

NO_DISTRIBUTION = [
    ({}, "--head-mixing position-wise mixes them, so they may be below 0 or above 1"),
    (
        {"head_mixing": "random"},
        "--head-mixing random mixes them, so they may be below 0 or above 1",
    ),
    (
        {**PLAIN, "attention_normalizer": "entmax15"},
        "--attention-normalizer entmax15 gives weights that may be 0, or not sum to 1",
    ),
    ({**PLAIN, "attention_sink": "learned"}, "--attention-sink learned takes a part of them away"),
]
DISTRIBUTION = [
    PLAIN,
    {"attention_scope": "self"},
    {"attention_scope": "encoder", "attention_normalizer": "relu2"},
    {"head_mixing": "average"},
    {**PLAIN, "attention_normalizer": "sigsoftmax", "score_mixing": "position-wise"},
]


@pytest.mark.parametrize("flags, problem", NO_DISTRIBUTION)
def test_guided_alignment_gets_a_distribution_or_is_refused(flags, problem):
    with pytest.raises(OptionError) as error:
        begin(build("mixhead_transformer", **flags), Alignment)
    assert str(error.value) == (
        "--criterion loss: takes the logarithm of the weights of encoder-decoder attention, but "
        f"{problem}; must be another criterion, or used with --attention-scope self"
    )


@pytest.mark.parametrize("flags", DISTRIBUTION)
def test_guided_alignment_of_a_distribution_begins(flags):
    with pytest.raises(Begun):
        begin(build("mixhead_transformer", **flags), Alignment)


def printed_alignment(caplog, **flags):
    """Return what is said where a generator with alignments is built.

    fairseq's commands and its hub build one so.
    """
    words = dictionary()
    with caplog.at_level(logging.WARNING):
        SequenceGeneratorWithAlignment(
            [build("mixhead_transformer", **flags)], words, print_alignment="soft"
        )
    return [record.message for record in caplog.records]


def test_printed_weights_that_are_no_probabilities_are_warned_of(caplog):
    assert printed_alignment(caplog) == [
        f"--print-alignment soft: {NO_DISTRIBUTION[0][1]}; they are no probabilities"
    ]


def test_other_alignments_are_not_warned_of(caplog):
    assert printed_alignment(caplog, attention_scope="self") == []
