"""Before a training, a model refuses a config or a criterion.

It refuses what would not train what was asked for.
"""

import logging

import pytest
from fairseq import options
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
    LabelSmoothedCrossEntropyCriterionWithAlignment as Alignment,
)
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed.fully_sharded_data_parallel import FullyShardedDataParallel, has_FSDP
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import nn

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


# ---- how a program gives a training ------------------------------------------------------------


class Sharded(FullyShardedDataParallel):
    """A model as fairscale's FSDP wraps it: the module that flattens its parameters has it."""

    def __init__(self, model):
        nn.Module.__init__(self)
        self.flatten_parameters = True
        self.module = nn.Module()
        self.module.module = model


@pytest.mark.skipif(has_FSDP, reason="the class of fairscale has a `module` of its own")
def test_the_model_behind_fsdp_is_checked():
    with pytest.raises(OptionError, match=r"^model.dropuot: unknown; did you mean dropout"):
        begin(Sharded(build("transformer")), _name="transformer", dropuot=0.1)
    with pytest.raises(OptionError, match=r"^--scale-attn: must be left out"):
        begin(Sharded(build("transformer_lm")), scale_attn=True)
    with pytest.raises(Begun):
        begin(Sharded(build("transformer")), _name="transformer", dropout=0.1)


@pytest.mark.parametrize("sharded", [False, True], ids=["before", "behind FSDP"])
@pytest.mark.parametrize("arch", ["mixhead_transformer", "mixhead_transformer_lm"])
def test_a_model_of_the_plugin_refuses_fsdp_which_would_not_check_its_checkpoint(arch, sharded):
    model = build(arch)
    with pytest.raises(OptionError) as error:
        begin(
            Sharded(model) if sharded else model,
            training={"distributed_training": {"ddp_backend": "fully_sharded"}},
        )
    assert str(error.value) == (
        "--ddp-backend fully_sharded: must be another, as pytorch_ddp, because it loads "
        "checkpoints without the checks of the plugin"
    )


@pytest.mark.parametrize("arch", ["transformer_tiny", "mixhead_transformer_tiny"])
def test_a_program_may_give_the_flags_of_a_command(arch):
    flags = ["data", "--arch", arch, "--optimizer", "adam"]
    parsed = options.parse_args_and_arch(options.get_training_parser(), flags)
    model = build(arch)
    with pytest.raises(Begun):
        Trainer(parsed, None, model, CrossEntropyCriterion.__new__(CrossEntropyCriterion))
    with pytest.raises(OptionError, match=r"^--mixing-lr-scale 2.0: must be 1 with --zero-shard"):
        parsed.mixing_lr_scale = 2.0
        parsed.zero_sharding = "os"
        Trainer(parsed, None, model, CrossEntropyCriterion.__new__(CrossEntropyCriterion))


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


def test_a_users_model_is_not_taken_for_one_of_the_plugin():
    class Own(TransformerModel):
        presets = ("small", "large")

    assert not is_checked(Own)
    assert is_checked(TransformerModel) and is_checked(ARCH_MODEL_REGISTRY["mixhead_transformer"])


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
