"""BERT has its token types, pooler and heads, and the sizes and counts of the papers."""

from argparse import Namespace

import pytest
import torch
from bert import model as bert
from bert.model import BERT_ARCHITECTURES, NEXT_SENTENCE, infer_segments
from fairseq.models import ARCH_CONFIG_REGISTRY, build_model
from fairseq.models.roberta import model as fairseq_roberta
from recipes import parse

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.models import roberta
from tests.fairseq.models.cases import task_of
from tests.helpers import build

BOS, PAD, EOS = 0, 1, 2


def pairs():
    """Return rows of [CLS] a [SEP] b [SEP], of different lengths."""
    rows = [[BOS, 5, 6, EOS, 7, 8, 9, EOS], [BOS, 10, EOS, 11, EOS, PAD, PAD, PAD]]
    return torch.tensor(rows)


# The parameters of each architecture, and the millions that the paper prints (tables 1, 2A, 2B,
# 3A).
COUNTS = {
    "bert_base": (110_107_964, 110),  # as BERT's authors say
    "bert_large": (336_228_156, 336),
    "bert_d1024_h8_k128": (336_228_156, 336),
    "bert_d1024_h16_k64": (336_228_156, 336),
    "bert_d1024_h32_k32": (336_228_156, 336),
    "bert_d512_h8_k128": (167_691_068, 168),
    "bert_d512_h12_k128": (192_893_756, 193),
    "bert_d512_h16_k128": (218_096_444, 218),
    "bert_d512_h32_k128": (318_907_196, 319),
    "bert_d512_h8_k32": (129_887_036, 130),
    "bert_d512_h8_k64": (142_488_380, 142),
    "bert_d512_h8_k256": (218_096_444, 218),
    "bert_d768_h8_k128": (214_055_228, 214),
    "bert_d768_h12_k128": (251_840_828, 252),
    "bert_d768_h16_k128": (289_626_428, 290),
    "bert_d768_h20_k128": (327_412_028, 327),
}


@pytest.mark.parametrize("name", COUNTS)
def test_there_are_as_many_parameters_as_in_the_papers(name, monkeypatch):
    """Count the embeddings, the pooler and both heads of pre-training, too."""
    for module in (fairseq_roberta, roberta, bert):  # it copies values, which the meta device lacks
        monkeypatch.setattr(module, "init_bert_params", lambda module: None)
    args = Namespace(arch=f"fixhead_{name}", tokens_per_sample=128)
    if BERT_ARCHITECTURES[name].head_dim is None:
        args.head_dim = 64
    ARCH_CONFIG_REGISTRY[args.arch](args)
    with torch.device("meta"):
        model = build_model(args, task_of(30_522))
        model.register_classification_head(NEXT_SENTENCE, num_classes=2)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (count, round(count / 1e6)) == COUNTS[name]
    attentions = [m for m in model.modules() if isinstance(m, MixheadAttention)]
    sizes = BERT_ARCHITECTURES[name]
    assert len(attentions) == sizes.encoder_layers == (12 if name == "bert_base" else 24)
    assert {(m.num_heads, m.head_dim) for m in attentions} == {
        (sizes.encoder_attention_heads, sizes.head_dim or 64)
    }


@pytest.mark.parametrize("name", ["bert_base", "bert_d512_h8_k32"])
def test_the_command_line_gets_the_sizes(name):
    sizes = {k: v for k, v in BERT_ARCHITECTURES[name]._asdict().items() if isinstance(v, int)}
    args = parse(
        [
            "fairseq-train",
            "data",
            "--task=masked_lm",
            f"--arch=mixhead_{name}",
            "--tokens-per-sample=128",
        ]
    )
    assert {option: getattr(args, option) for option in sizes} == sizes
    assert (args.max_positions, args.layer_norm_eps, args.activation_fn) == (512, 1e-12, "gelu")
    assert (args.dropout, args.attention_dropout, args.pooler_dropout) == (0.1, 0.1, 0.1)


def test_token_types_change_after_the_first_separator():
    found = infer_segments(pairs(), EOS, PAD)
    assert found.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0]]
    single = torch.tensor([[BOS, 5, 6, EOS, PAD]])
    assert infer_segments(single, EOS, PAD).sum() == 0


def test_layer_norms_have_berts_epsilon_and_the_embeddings_are_tied():
    for flags, eps in (({}, 1e-12), ({"layer_norm_eps": 1e-3}, 1e-3)):
        model = build("mixhead_bert_base", **flags)
        norms = [module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)]
        assert {norm.eps for norm in norms} == {eps} and len(norms) == 2 + 2 * 2
    assert model.encoder.lm_head.weight is model.encoder.sentence_encoder.embed_tokens.weight


@torch.no_grad()
def test_heads_see_the_pooled_first_token():
    model = build("mixhead_bert_base", pooler_dropout=0.0).eval()
    model.register_classification_head("kinds", num_classes=3)
    states, _ = model(pairs(), features_only=True)
    pooled = torch.tanh(states[:, 0] @ model.pooler.dense.weight.T + model.pooler.dense.bias)
    head = model.classification_heads["kinds"].out_proj
    expected = pooled @ head.weight.T + head.bias
    torch.testing.assert_close(
        model(pairs(), classification_head_name="kinds", features_only=True)[0], expected
    )


def test_without_heads_every_parameter_is_trained():
    """Check the gradients, without which data parallel training refuses a parameter."""
    model = build("mixhead_bert_base", pooler_dropout=0.0)
    model(pairs(), masked_tokens=pairs().gt(4))[0].log_softmax(-1)[:, 5].sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_the_pooler_goes_on_to_another_task_and_a_head_where_it_is_the_same():
    lender = build("mixhead_bert_base", pooler_dropout=0.0)
    lender.register_classification_head("kinds", num_classes=3)
    state = {name: value + 1 for name, value in lender.state_dict().items()}
    for classes, same in ((3, True), (2, False)):
        model = build("mixhead_bert_base", seed=3)
        model.register_classification_head("kinds", num_classes=classes)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state)
        for name, value in model.state_dict().items():
            expected = before if name.startswith("classification_heads") and not same else state
            assert torch.equal(value, expected[name]), name
