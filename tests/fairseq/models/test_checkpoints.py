"""fairseq's checkpoints load, and the plugin's load unchanged.

Those of other flags are refused in one line.
"""

import copy
import io
import re
from argparse import Namespace

import pytest
import torch
from fairseq.distributed import utils as distributed_utils

from mixhead_plugin.errors import CheckpointError
from mixhead_plugin.fairseq.models.synthesizer.attention import SYNTHESIZERS
from mixhead_plugin.fairseq.options import SCOPES
from mixhead_plugin.parts import PARTS
from tests.covering import each_once
from tests.fairseq.models.cases import NEUTRAL, forward
from tests.helpers import TINY, build, shake, tokens
from tests.transformer_xl import build_xl

TRANSLATION = "mixhead_transformer"
TRAINED = ("position-independent", "position-wise")
VALUES = []  # all but those without a part
for option, table in PARTS.items():
    VALUES += [{option: value} for value in table if value != "none"]


def same(left, right):
    """Tell whether the model `right` has all tensors of `left`."""
    tensors = right.state_dict()
    return all(torch.equal(value, tensors[name]) for name, value in left.state_dict().items())


@each_once(upstream=TINY, flags=[{}, *NEUTRAL])
def test_fairseqs_checkpoint_gives_fairseqs_outputs(upstream, flags):
    trained = build(upstream, seed=2).eval()
    model = shake(build(f"mixhead_{upstream}", seed=3, **{"head_mixing": "none", **flags})).eval()
    model.load_state_dict(copy.deepcopy(trained.state_dict()), strict=True)
    sentences = tokens(padded=True)
    torch.testing.assert_close(forward(model, sentences), forward(trained, sentences))


@pytest.mark.parametrize(
    "arch, flags",
    [
        *((f"l2_{upstream}", {}) for upstream in TINY),
        *(("l2_transformer_lm", flags) for flags in VALUES),
        *(("mixhead_synthesizer_lm", {"synthesizer": name}) for name in SYNTHESIZERS),
        ("mixhead_transformer", {"relative_position": "t5", "relative_gain": 3}),
        ("mixhead_transformer_lm", {"head_dim": 4, "heads_per_layer": "decoder-self=3:2,1:4"}),
        ("mixhead_roberta_base", {"head_dim": 4, "heads_per_layer": "encoder-self=2,3:1"}),
    ],
)
def test_a_checkpoint_comes_back_as_it_was_saved_pickled_and_copied(arch, flags, tmp_path):
    trained = shake(build(arch, seed=2, **flags)).eval()
    model = build(arch, seed=3, **flags).eval()
    model.load_state_dict(copy.deepcopy(trained.state_dict()), strict=True)
    torch.save(trained, tmp_path / "whole.pt")
    sentences = tokens(padded=True)
    for other in (
        model,
        torch.load(tmp_path / "whole.pt", weights_only=False),
        copy.deepcopy(trained),
    ):
        assert torch.equal(forward(other, sentences), forward(trained, sentences))


def test_an_average_of_checkpoints_is_tensors_alone_and_loads():
    for flags in VALUES:
        state = dict(build(LM, **flags).state_dict())
        loaded = build(LM, **flags, seed=2)
        loaded.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())


LM = "mixhead_transformer_lm"
SYNTHESIZER = "mixhead_synthesizer_lm"
L2 = {"attention_normalizer": "l2"}
SOFT = {"head_mixing": "none"}
LOW_RANK = {"head_mixing": "low-rank"}
# The trained model, the model that loads it, and the flag that the message must name.
TOLD_BY_TENSORS = [
    ((TRANSLATION, {}), (TRANSLATION, SOFT), "--head-mixing position-wise"),
    ((TRANSLATION, {}), (TRANSLATION, {"head_mixing": TRAINED[0]}), "--head-mixing position-wise"),
    ((TRANSLATION, {"head_mixing": TRAINED[0]}), (TRANSLATION, {}), f"--head-mixing {TRAINED[0]}"),
    ((TRANSLATION, {}), (TRANSLATION, {"head_dim": 9}), "--head-dim 4"),
    ((TRANSLATION, {}), (TRANSLATION, {"value_head_dim": 9}), "--value-head-dim 4"),
    ((LM, {"value_head_dim": 9}), (LM, {}), "--value-head-dim 9"),
    ((LM, {**LOW_RANK, "mixing_rank": 3}), (LM, LOW_RANK), "--mixing-rank 3"),
    ((LM, LOW_RANK), (LM, {**LOW_RANK, "mixing_rank": 1}), "--mixing-rank 2"),
    (("transformer", {}), (TRANSLATION, {"value_head_dim": 2}), "--value-head-dim 4"),
    ((TRANSLATION, {}), (TRANSLATION, {"encoder_embed_dim": 32}), "--encoder-embed-dim 16"),
    ((TRANSLATION, {}), (TRANSLATION, {"attention_scope": "self"}), "--attention-scope"),
    (("transformer", {}), (TRANSLATION, {"head_mixing": "differential"}), "--head-mixing none"),
    (
        ("transformer", {}),
        (TRANSLATION, {**SOFT, "attention_sink": "learned"}),
        "--attention-sink none",
    ),
    (
        (TRANSLATION, {"score_mixing": TRAINED[1]}),
        (TRANSLATION, {}),
        f"--score-mixing {TRAINED[1]}",
    ),
    ((TRANSLATION, {"attention_gate": "head"}), (TRANSLATION, {}), "--attention-gate"),
    (
        (LM, {"feature_mixing": "output"}),
        (LM, {"feature_mixing": "heads"}),
        "--feature-mixing output",
    ),
    (("transformer_lm", {}), (SYNTHESIZER, {}), "transformer_lm"),
    ((SYNTHESIZER, {}), (LM, {}), "--synthesizer dense"),
    (
        (SYNTHESIZER, {"synthesizer": "factorized-dense"}),
        (SYNTHESIZER, {}),
        "--synthesizer factorized-dense",
    ),
]
# What fairseq's own model would compute with softmax attention.
WITHOUT_TENSORS = [
    ("l2_transformer", {}, "--attention-normalizer l2"),
    (TRANSLATION, {**SOFT, "attention_sink": "zero"}, "--attention-sink zero"),
    (LM, {**SOFT, "relative_position": "rotary"}, "--relative-position rotary"),
    ("sigsoftmax_roberta_base", {}, "--attention-normalizer sigsoftmax"),
]


@pytest.mark.parametrize("arch, flags, message", WITHOUT_TENSORS)
def test_fairseqs_own_model_refuses_weights_that_it_would_read_in_another_way(arch, flags, message):
    trained = build(arch, **flags)
    model = build(arch.partition("_")[2])
    with pytest.raises(CheckpointError, match=f"was trained with {message}, which this model does"):
        model.load_state_dict(trained.state_dict())


def as_sent_to_other_workers(state_dict):
    """Return a state dict as fairseq's trainer sends it from the first worker to the others."""
    tensors = []
    rest = distributed_utils._split_tensors_from_obj({"model": state_dict}, tensors)
    sent = io.BytesIO()
    torch.save(rest, sent)
    sent.seek(0)
    received = torch.load(sent)
    return distributed_utils._put_tensors_in_obj(received, tensors)["model"]


def test_a_checkpoint_that_went_to_other_workers_is_refused_in_the_same_words():
    trained = as_sent_to_other_workers(build("l2_transformer").state_dict())
    for arch in ("sigsoftmax_transformer", "transformer"):
        with pytest.raises(CheckpointError, match="was trained with --attention-normalizer l2, "):
            build(arch).load_state_dict(trained)


def test_fairseqs_own_model_loads_the_plugins_softmax_attention():
    trained = build(TRANSLATION, **SOFT)
    model = build("transformer", seed=2)
    model.load_state_dict(trained.state_dict())
    assert same(trained, model)


TOLD_BY_THE_RECORD = [
    ((TRANSLATION, {}), (TRANSLATION, {"attention_sink": "zero"}), "--attention-sink none"),
    (("sigsoftmax_transformer", {}), (TRANSLATION, SOFT), "--attention-normalizer sigsoftmax"),
    (
        (TRANSLATION, {}),
        (TRANSLATION, {"encoder_attention_heads": 2}),
        "--encoder-attention-heads 4",
    ),
    (
        (TRANSLATION, {}),
        (TRANSLATION, {"decoder_attention_heads": 2}),
        "--decoder-attention-heads 4",
    ),
    (
        (TRANSLATION, {"head_mixing": "random"}),
        (TRANSLATION, {"head_mixing": "average"}),
        "--head-mixing random",
    ),
    (
        (TRANSLATION, {**L2, **SOFT}),
        (TRANSLATION, {**L2, **SOFT, "attention_scope": "self"}),
        "--attention-scope",
    ),
    (
        (TRANSLATION, {**L2, **SOFT, "attention_scope": "self"}),
        (TRANSLATION, {**L2, **SOFT}),
        "--attention-scope",
    ),
    ((LM, {"relative_position": "rotary"}), (LM, {}), "--relative-position rotary"),
    ((LM, {"relative_gain": 3}), (LM, {}), "--relative-gain 3"),
    (
        (LM, {"feature_mixing": "heads", "mixed_features": "qk"}),
        (LM, {"feature_mixing": "heads"}),
        "--mixed-features qk",
    ),
    (
        (LM, {"feature_mixing": "heads"}),
        (LM, {"feature_mixing": "shared"}),
        "--feature-mixing heads",
    ),
    ((LM, {"relative_gain": 3}), (LM, {"relative_gain": 5}), "--relative-gain 3"),
    (
        (LM, {"head_dim": 4, "heads_per_layer": "decoder-self=4:2,4"}),
        (LM, {"head_dim": 4}),
        "--heads-per-layer",
    ),
    (
        (SYNTHESIZER, {"synthesizer": "random"}),
        (SYNTHESIZER, {"synthesizer": "fixed-random"}),
        "--synthesizer random",
    ),
    ((SYNTHESIZER, {}), (SYNTHESIZER, {"max_target_positions": 48}), "--max-target-positions 64"),
    (
        (SYNTHESIZER, {"synthesizer": "factorized-random"}),
        (SYNTHESIZER, {"synthesizer": "factorized-random", "synthesizer_rank": 3}),
        "--synthesizer-rank 8",
    ),
    (
        (SYNTHESIZER, {"synthesizer": "factorized-dense", "synthesizer_factor": 5}),
        (SYNTHESIZER, {"synthesizer": "factorized-dense"}),
        "--synthesizer-factor 5",
    ),
]


@pytest.mark.parametrize("trained, into, flag", [*TOLD_BY_TENSORS, *TOLD_BY_THE_RECORD])
def test_a_checkpoint_of_other_flags_is_refused_by_flag(trained, into, flag):
    state = build(trained[0], **trained[1]).state_dict()
    model = build(into[0], **into[1])
    states = [state]
    if (trained, into, flag) in TOLD_BY_TENSORS:
        states.append(dict(state))  # a plain dict has no record of the flags
    for known in states:
        with pytest.raises(CheckpointError) as error:
            model.load_state_dict(known)
        assert flag in str(error.value) and "\n" not in str(error.value)


# Flags of one model each; of every pair, the first is trained and the second loads it.
OF_PARTS = [
    *({**SOFT, **flags} for flags in [{}, *VALUES]),
    *({**SOFT, "feature_mixing": "heads", "mixed_features": mixed} for mixed in ("qk", "v")),
    {**SOFT, "head_dim": 2},
    {**SOFT, "value_head_dim": 2},
    {"head_mixing": "differential", "value_head_dim": 2},
    {**SOFT, "head_dim": 2, "heads_per_layer": "decoder-self=3"},
    {"head_dim": 2, "heads_per_layer": "decoder-self=4:2"},
    *({**SOFT, "relative_gain": farthest} for farthest in (2, 3)),
]
OF_SCOPES = [
    *({**SOFT, "head_dim": 2, "attention_scope": scope} for scope in SCOPES),
    {**SOFT, **L2, "attention_scope": "encoder"},
    {"head_mixing": "differential", "attention_scope": "cross"},
    {**SOFT, "relative_gain": 3, "attention_scope": "decoder-self"},
]


@pytest.mark.parametrize("known", ["with a record", "tensors alone"])
@pytest.mark.parametrize(
    "arch, flags", [(LM, OF_PARTS), (TRANSLATION, OF_SCOPES)], ids=["parts", "scopes"]
)
def test_a_checkpoint_of_any_other_flags_loads_or_is_refused_by_a_flag(arch, flags, known):
    """Never by torch's list of tensors."""
    models = [build(arch, encoder_layers=1, decoder_layers=1, **each) for each in flags]
    loaded = 0
    refused = 0
    for trained in models:
        for model in models:
            state = trained.state_dict() if known == "with a record" else dict(trained.state_dict())
            try:
                model.load_state_dict(state)
                loaded += 1
            except CheckpointError as error:
                assert re.search(r"use (--[a-z-]+ \S+)|use an architecture", str(error))
                refused += 1
    assert loaded >= len(flags) and refused > len(flags)


def test_a_record_from_before_a_flag_has_what_was_usual_then():
    trained = build(LM, head_mixing="low-rank", decoder_layers=1).state_dict()
    record = trained._metadata["decoder.layers.0.self_attn"]
    assert (record.pop("mixing_rank"), record.pop("value_head_dim")) == (2, 4)
    build(LM, head_mixing="low-rank", decoder_layers=1).load_state_dict(trained)
    for flags, flag in (
        ({"mixing_rank": 3}, "--mixing-rank 2"),
        ({"value_head_dim": 3}, "--value"),
    ):
        with pytest.raises(CheckpointError, match=f"use {flag}"):
            build(LM, head_mixing="low-rank", decoder_layers=1, **flags).load_state_dict(trained)


# The whole message, the trained model, and the model that loads its tensors.
WHOLE_MESSAGES = {
    "its encoder.layers.0.self_attn was trained with --head-dim 4, this model with 2; use "
    "--head-dim 4, or another --attention-scope": (
        (TRANSLATION, {**SOFT, "head_dim": 2, "attention_scope": "decoder"}),
        (TRANSLATION, {**SOFT, "head_dim": 2}),
    ),
    "its decoder.layers.0.self_attn was trained with --decoder-embed-dim 32, this model with 16; "
    "use --decoder-embed-dim 32": ((LM, {"decoder_embed_dim": 32}), (LM, {})),
    "its decoder.layers.0.self_attn was trained with --decoder-attention-heads 2, this model with "
    "4; use --decoder-attention-heads 2, or --heads-per-layer and --head-dim for a pruned model": (
        (LM, {"decoder_attention_heads": 2}),
        (LM, {}),
    ),
    "its decoder.layers.0.self_attn was trained with 2 mixed heads, this model with 4; use "
    "--heads-per-layer with 4:2 for this layer, and --head-dim": (
        (LM, {"head_dim": 4, "heads_per_layer": "decoder-self=4:2,4"}),
        (LM, {"head_dim": 4}),
    ),
    "its decoder.layers.0.self_attn was trained with --synthesizer none, this model with dense; "
    "use an architecture *_transformer_lm": ((LM, {}), (SYNTHESIZER, {})),
    "its decoder.layers.0.self_attn was trained with --synthesizer dense, this model with none; "
    "use an architecture *_synthesizer_lm with this flag": ((SYNTHESIZER, {}), (LM, {})),
}


@pytest.mark.parametrize("message", WHOLE_MESSAGES)
def test_a_message_says_what_differs_and_what_would_fit(message):
    trained, into = WHOLE_MESSAGES[message]
    state = build(trained[0], **trained[1]).state_dict()
    with pytest.raises(CheckpointError) as error:
        build(into[0], **into[1]).load_state_dict(state)
    assert str(error.value) == f"checkpoint does not fit: {message}"


# The whole message about tensors without a record, which no value of a flag explains.
UNEXPLAINED = {
    "its decoder.layers.0.self_attn.q_proj has 17 rows, no multiple of --decoder-attention-heads "
    "4; use --decoder-attention-heads or --heads-per-layer with numbers that divide them": (
        "q_proj.weight",
        torch.zeros(17, 16),
    ),
    "its decoder.layers.0.self_attn.head_mixing has the tensors bar, bias, query_weight, as no "
    "--head-mixing of this version; must be a checkpoint of this version": (
        "head_mixing.bar",
        torch.zeros(4, 4),
    ),
}


@pytest.mark.parametrize("message", UNEXPLAINED)
def test_tensors_that_no_flag_explains_are_named(message):
    name, tensor = UNEXPLAINED[message]
    state = dict(build(LM).state_dict())
    state[f"decoder.layers.0.self_attn.{name}"] = tensor
    with pytest.raises(CheckpointError) as error:
        build(LM, seed=2).load_state_dict(state)
    assert str(error.value) == f"checkpoint does not fit: {message}"


def test_a_checkpoint_of_other_sizes_of_transformer_xl_is_refused_by_its_own_flags():
    state = build_xl("l2_transformer_xl").state_dict()
    for flags, flag in (
        ({"n_head": 5}, "--n-head 3"),
        ({"d_model": 16}, "--d-model 12"),
        ({"d_head": 4}, "--head-dim 5"),
    ):
        with pytest.raises(CheckpointError, match=f"use {flag}"):
            build_xl("l2_transformer_xl", **flags).load_state_dict(state)


@pytest.mark.parametrize(
    "arch, before, after",
    [
        (TRANSLATION, {"attention_scope": "self"}, {}),
        (LM, {}, {"relative_gain": 3}),
        *((LM, {}, flags) for flags in NEUTRAL if "head_mixing" not in flags),
        *(
            (SYNTHESIZER, {"synthesizer": name, **SOFT}, {"synthesizer": name})
            for name in SYNTHESIZERS
        ),
    ],
)
def test_what_a_checkpoint_lacks_starts_without_effect(arch, before, after):
    trained = shake(build(arch, seed=2, **before)).eval()
    model = build(arch, seed=3, **after).eval()
    model.load_state_dict(copy.deepcopy(trained.state_dict()))
    sentences = tokens()
    torch.testing.assert_close(forward(model, sentences), forward(trained, sentences))


FROZEN = [name for name, kind in PARTS["head_mixing"].items() if kind.frozen]


@pytest.mark.parametrize("without", [("transformer", {}), (TRANSLATION, SOFT)], ids=lambda w: w[0])
@pytest.mark.parametrize("frozen", FROZEN)
def test_a_frozen_mixing_that_a_checkpoint_lacks_is_warned_of_once(frozen, without, caplog):
    trained = build(without[0], **without[1], seed=2).eval()
    model = build(TRANSLATION, head_mixing=frozen).eval()
    model.load_state_dict(copy.deepcopy(trained.state_dict()))
    sentences = tokens()
    assert not torch.allclose(forward(model, sentences), forward(trained, sentences))
    assert caplog.messages == [
        f"the checkpoint has no --head-mixing; from now on it is {frozen}, which changes the "
        "outputs"
    ]

    caplog.clear()
    build(TRANSLATION, head_mixing=frozen).load_state_dict(model.state_dict())
    assert caplog.messages == []


def test_another_normalizer_for_fairseqs_checkpoint_is_warned_of(caplog):
    build("sigsoftmax_transformer").load_state_dict(build("transformer").state_dict())
    assert "--attention-normalizer it was trained; from now on it is sigsoftmax" in caplog.text
    build(TRANSLATION, attention_sink="zero").load_state_dict(build("transformer").state_dict())
    assert "--attention-sink it was trained; from now on it is zero" in caplog.text


def test_tensors_that_fit_two_values_of_a_flag_are_warned_of(caplog):
    heads = build(LM, feature_mixing="heads")  # 4 heads of 4
    without_record = dict(heads.state_dict())
    build(LM, feature_mixing="shared").load_state_dict(without_record)
    warning = "whether its --feature-mixing is heads or shared; from now on it is shared"
    assert warning in caplog.text


KEPT = {
    "encoder_layers": 4,
    "encoder_layers_to_keep": "1,3",
    "decoder_layers": 4,
    "decoder_layers_to_keep": "1,3",
}


def with_kept_layers(arch, trained):
    """Return a model with two of the four layers of a trained one."""
    model = build(arch, seed=3, **KEPT).eval()
    flags = Namespace(arch=arch, **KEPT)
    model.load_state_dict(copy.deepcopy(trained.state_dict()), model_cfg=flags)
    return model


def test_some_layers_of_fairseqs_checkpoint_give_the_outputs_of_fairseqs_smaller_model():
    trained = build("transformer", seed=2, encoder_layers=4, decoder_layers=4)
    fairseqs = with_kept_layers("transformer", trained)
    mixed = with_kept_layers(TRANSLATION, trained)
    sentences = tokens()
    torch.testing.assert_close(forward(mixed, sentences), forward(fairseqs, sentences))


def test_some_layers_of_the_plugins_checkpoint_keep_their_records(caplog):
    trained = build("l2_transformer", encoder_layers=4, decoder_layers=4)
    model = with_kept_layers("l2_transformer", trained)
    assert "the checkpoint does not say" not in caplog.text
    for kept, layer in enumerate((1, 3)):
        assert same(trained.decoder.layers[layer], model.decoder.layers[kept])
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn was trained with .* l2, "):
        with_kept_layers("sigsoftmax_transformer", trained)


@pytest.mark.parametrize("arch, cutoff", [(LM, "5,10"), (TRANSLATION, [5, 10])])
def test_an_adaptive_softmax_with_shared_embeddings_can_be_loaded_again(arch, cutoff):
    """Load a checkpoint to which fairseq has added a matrix that its model does not have."""
    flags = {"adaptive_softmax_cutoff": cutoff, "share_decoder_input_output_embed": True}
    trained = build(arch, **flags)
    loaded = build(arch, seed=2, **flags)
    loaded.load_state_dict(copy.deepcopy(trained.state_dict()))
    assert same(loaded, trained)


@pytest.mark.parametrize("mixing", TRAINED)
def test_a_checkpoint_without_a_mixing_becomes_the_identity_whatever_a_new_model_starts_as(mixing):
    model = build(TRANSLATION, head_mixing=mixing, mixing_start="uniform").eval()
    assert model.encoder.layers[0].self_attn.head_mixing.mixing_start == "uniform"
    sentences = tokens()
    fairseqs = build("transformer", seed=2).eval()
    assert not torch.allclose(
        forward(model, sentences), forward(build("transformer").eval(), sentences)
    )
    model.load_state_dict(copy.deepcopy(fairseqs.state_dict()))
    torch.testing.assert_close(forward(model, sentences), forward(fairseqs, sentences))
