"""What fairseq's own flags cannot do is one line before training, where fairseq ends in a traceback or goes on."""

import copy
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

from mixhead_plugin.errors import OptionError
from tests.helpers import OWN, TINY, build

CUTOFF = {"adaptive_softmax_cutoff": "5,10"}
ADAPTIVE = {**CUTOFF, "adaptive_input": True, "adaptive_input_cutoff": "5,10"}
MASKING = {"task": "masked_lm", "mask_prob": 0.15, "leave_unmasked_prob": 0.1, "random_token_prob": 0.1}
LM, TRANSLATION, ROBERTA = "mixhead_transformer_lm", "mixhead_transformer", "mixhead_roberta_base"
BERT, SYNTHESIZER = "mixhead_bert_base", "mixhead_synthesizer_lm"

WRONG = [
    (TRANSLATION, {"encoder_embed_dim": 0}, "--encoder-embed-dim 0: must be at least 1"),
    (TRANSLATION, {"decoder_layers": -1}, "--decoder-layers -1: must be at least 1"),
    (TRANSLATION, {"decoder_output_dim": "0"}, "--decoder-output-dim 0: must be at least 1"),
    (ROBERTA, {"max_positions": 0}, "--max-positions 0: must be at least 1"),
    (LM, {"tokens_per_sample": -1}, "--tokens-per-sample -1: must be at least 1"),
    (TRANSLATION, {"dropout": 1.5}, "--dropout 1.5: must be a probability, between 0 and 1"),
    (SYNTHESIZER, {"attention_dropout": float("nan")}, "--attention-dropout nan: must be a probability, between"),
    (LM, {"decoder_layerdrop": 1.0}, "--decoder-layerdrop 1.0: must be a probability, from 0 to less than 1"),
    (BERT, {"quant_noise_pq": 2.0}, "--quant-noise-pq 2.0: must be a probability, from 0 to less than 1"),
    (TRANSLATION, {"encoder_layers_to_keep": "a"}, "--encoder-layers-to-keep a: must be numbers of layers"),
    (
        LM,
        {"decoder_layers_to_keep": "0", "heads_per_layer": "decoder-self=2,2", "head_dim": 4},
        "--decoder-layers-to-keep 0: must be left out with --heads-per-layer",
    ),
    (LM, {"adaptive_softmax_cutoff": "10,5"}, "--adaptive-softmax-cutoff 10,5: must be words greater than 0 in asc"),
    (TRANSLATION, {"adaptive_softmax_cutoff": [0, 5]}, "--adaptive-softmax-cutoff [0, 5]: must be words greater"),
    (LM, {**ADAPTIVE, "adaptive_input_cutoff": "a"}, "--adaptive-input-cutoff a: must be words greater than 0"),
    (LM, {**CUTOFF, "adaptive_softmax_factor": 0.0}, "--adaptive-softmax-factor 0.0: must be a number greater than 0"),
    (
        LM,
        {**ADAPTIVE, "adaptive_input_factor": 5.0},
        "--adaptive-input-factor 5.0: leaves the last of 3 bands (--adaptive-input-cutoff) no column of "
        "--decoder-input-dim 16",
    ),
    (LM, {"adaptive_input": True}, "--adaptive-input: needs --adaptive-input-cutoff"),
    (TRANSLATION, {"tie_adaptive_weights": True}, "--tie-adaptive-weights: needs --adaptive-input, which language"),
    (
        TRANSLATION,
        {"share_all_embeddings": True, "decoder_embed_dim": 8},
        "--share-all-embeddings: needs --encoder-embed-dim 8, not 16",
    ),
    (
        TRANSLATION,
        {"cross_self_attention": True, "decoder_embed_dim": 8},
        "--cross-self-attention: needs --encoder-embed-dim 8, not 16",
    ),
    (
        TRANSLATION,
        {"share_decoder_input_output_embed": True, "decoder_output_dim": 8},
        "--share-decoder-input-output-embed: needs --decoder-output-dim 16, not 8",
    ),
    (
        LM,
        {"share_decoder_input_output_embed": True, "adaptive_input": True, "adaptive_input_cutoff": "5"},
        "--share-decoder-input-output-embed: must be left out with --adaptive-input",
    ),
    (
        TRANSLATION,
        {"quant_noise_pq": 0.1, "decoder_ffn_embed_dim": 20},
        "--quant-noise-pq-block-size 8: must divide --decoder-ffn-embed-dim 20, with --quant-noise-pq 0.1",
    ),
    (
        LM,
        {**CUTOFF, "quant_noise_pq": 0.1},
        "--quant-noise-pq-block-size 8: must divide 4, the columns of band 2 of --adaptive-softmax-cutoff",
    ),
    (
        LM,
        {**ADAPTIVE, "quant_noise_pq": 0.1, "tie_adaptive_weights": True},
        "--quant-noise-pq 0.1: cannot act on --tie-adaptive-weights",
    ),
    (
        BERT,
        {"quant_noise_pq": 0.1, "head_dim": 4, "heads_per_layer": "encoder-self=4,3"},
        "--head-dim 4: 3 heads of it are no multiple of --quant-noise-pq-block-size 8",
    ),
    (ROBERTA, {"spectral_norm_classification_head": True}, "--spectral-norm-classification-head: must be left out"),
    (ROBERTA, {"quant_noise_scalar": 0.1}, "--quant-noise-scalar 0.1: fairseq has no learned positions with noise"),
    (LM, {"quant_noise_scalar": 0.1, "decoder_learned_pos": True}, "--quant-noise-scalar 0.1: fairseq has no learned"),
    (LM, {"optimizer": "composite"}, "--optimizer composite: takes its groups from a YAML file alone"),
    (LM, {"fp16": True, "cpu": True}, "--fp16: needs a GPU"),
    (LM, {"quant_noise_scalar": 0.1, "cpu": True}, "--quant-noise-scalar 0.1: needs a GPU; must be 0"),
    (LM, {"amp": True, "cpu": True}, "--amp: needs a GPU"),
    (TRANSLATION, {"label_smoothing": 1.5}, "--label-smoothing 1.5: must be from 0 to less than 1"),
    (
        LM,
        {"criterion": "label_smoothed_cross_entropy", **CUTOFF},
        "--criterion label_smoothed_cross_entropy: has no gradient through --adaptive-softmax-cutoff 5,10",
    ),
    (
        SYNTHESIZER,
        {"criterion": "orthogonal_adaptive_loss"},
        "--criterion orthogonal_adaptive_loss: needs --adaptive-softmax-cutoff",
    ),
    (
        ROBERTA,
        {"criterion": "masked_lm", "mha_reg_scale_factor": 0.1},
        "--mha-reg-scale-factor 0.1: has no effect with --criterion masked_lm",
    ),
    (ROBERTA, {**MASKING, "mask_prob": 1.0}, "--mask-prob 1.0: must be more than 0 and less than 1"),
    (ROBERTA, {**MASKING, "random_token_prob": -1.0}, "--random-token-prob -1.0: must be between 0 and 1"),
    (ROBERTA, {**MASKING, "random_token_prob": 0.95}, "--random-token-prob 0.95: must be at most 1 with"),
    (ROBERTA, {"tokens_per_sample": 65}, "--tokens-per-sample 65: more than --max-positions 64"),
    (BERT, {"spectral_norm_classification_head": True}, "--spectral-norm-classification-head: must be left out"),
    (BERT, {"pooler_activation_fn": "relu"}, "--pooler-activation-fn relu: must be tanh"),
    (
        TRANSLATION,
        {"cross_self_attention": True, "relative_position": "t5"},
        "--relative-position t5: must be none with --cross-self-attention",
    ),
    (
        TRANSLATION,
        {"cross_self_attention": True, "relative_gain": 4, "attention_scope": "decoder"},
        "--relative-gain 4: must be 0 with --cross-self-attention",
    ),
]


def sizes(arch):
    tables = {**OWN, **TINY, "bert_base": TINY["roberta_base"]}
    return next(tiny for name, tiny in tables.items() if name.split("_base")[0] in arch)


@pytest.mark.parametrize("arch, flags, message", WRONG, ids=[f"{a}-{'-'.join(f)}" for a, f, _ in WRONG])
def test_what_cannot_work_is_refused_in_one_line_that_names_the_flag(arch, flags, message, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fairseq-train"])
    with pytest.raises(OptionError) as error:
        ARCH_CONFIG_REGISTRY[arch](Namespace(**{**sizes(arch), **flags}))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arch, flags",
    [
        (LM, {**ADAPTIVE, "criterion": "adaptive_loss", "tie_adaptive_weights": True}),
        (LM, {**CUTOFF, "quant_noise_pq": 0.1, "quant_noise_pq_block_size": 1, "criterion": "adaptive_loss"}),
        (LM, {"dropout": 1.0, "bf16": True, "criterion": "cross_entropy"}),
        (TRANSLATION, {"cross_self_attention": True, "relative_position": "t5", "attention_scope": "encoder"}),
        (TRANSLATION, {"share_all_embeddings": True, "label_smoothing": 0.1, "encoder_layers_to_keep": "0"}),
        (ROBERTA, {**MASKING, "criterion": "masked_lm"}),
        (ROBERTA, {"criterion": "orthogonal_sentence_prediction", "mha_reg_scale_factor": 0.1}),
    ],
)
def test_what_works_is_let_through(arch, flags, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fairseq-train"])
    ARCH_CONFIG_REGISTRY[arch](Namespace(**{**sizes(arch), **flags}))


@pytest.mark.parametrize("arch, cutoff", [(LM, "5,100"), (TRANSLATION, [5, 100])])
def test_cutoffs_beyond_the_vocabulary_are_refused(arch, cutoff):
    with pytest.raises(OptionError, match=r"--adaptive-softmax-cutoff .*100.*: must be at most 29, the size of the"):
        build(arch, adaptive_softmax_cutoff=cutoff)


def test_layers_to_keep_are_taken_as_fairseqs_parser_reads_them():
    assert len(build(TRANSLATION, encoder_layers_to_keep=[1]).encoder.layers) == 1


@pytest.mark.parametrize("kept", ["0", "1", "0,7"])
def test_a_model_of_few_layers_from_the_start_is_not_pruned_when_it_is_loaded(kept):
    """fairseq keeps the flag in the checkpoint, and would look there for layers of a larger one."""
    trained = build(TRANSLATION, encoder_layers_to_keep=kept)
    loaded = build(TRANSLATION, seed=2, encoder_layers_to_keep=kept)
    cfg = Namespace(arch=TRANSLATION, encoder_layers_to_keep=kept, decoder_layers_to_keep=None)
    loaded.load_state_dict(trained.state_dict(), model_cfg=cfg)
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_one_side_is_pruned_and_the_other_stays():
    """fairseq would drop all layers of the decoder."""
    trained = build(TRANSLATION)
    loaded = build(TRANSLATION, seed=2, encoder_layers_to_keep="1")
    cfg = Namespace(arch=TRANSLATION, encoder_layers_to_keep="1", decoder_layers_to_keep=None)
    loaded.load_state_dict(copy.deepcopy(trained.state_dict()), model_cfg=cfg)
    for ours, theirs in ((loaded.encoder.layers[0], trained.encoder.layers[1]), (loaded.decoder, trained.decoder)):
        assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("arch, cutoff", [(LM, "5,10"), (TRANSLATION, [5, 10])])
def test_an_adaptive_softmax_with_shared_embeddings_can_be_loaded_again(arch, cutoff):
    """fairseq adds a matrix to the checkpoint that its model does not have."""
    flags = {"adaptive_softmax_cutoff": cutoff, "share_decoder_input_output_embed": True}
    trained, loaded = build(arch, **flags), build(arch, seed=2, **flags)
    loaded.load_state_dict(copy.deepcopy(trained.state_dict()))
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_a_checkpoint_in_fp16_can_be_used_without_a_gpu(monkeypatch):
    """What a training is refused for is no matter for who loads the model later."""
    monkeypatch.setattr("sys.argv", ["fairseq-generate"])
    assert build(LM, fp16=True, cpu=True) and build("mixhead_bert_base", fp16=True, cpu=True)
