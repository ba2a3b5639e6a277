"""The architectures of the recipes, and that models have as many parameters as the papers say."""

from argparse import Namespace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, build_model
from omegaconf import OmegaConf

from mixhead_plugin.models import RECIPE_ARCHITECTURES
from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.options import FAMILIES
from tests.helpers import build, task, tokens

# Transformer-XL, with other flags and another task, has tests of its own.
NAMES = [name for name, entry in RECIPE_ARCHITECTURES.items() if entry.model != "transformer_xl"]
LANGUAGE_MODELS = [name for name in NAMES if RECIPE_ARCHITECTURES[name].model.endswith("_lm")]
TRANSLATION_MODELS = [name for name in NAMES if name not in LANGUAGE_MODELS]


def dictionary_size(types: int) -> int:
    """Symbols of fairseq's dictionary for a corpus of so many types, its unknown word and end of line among them."""
    return -(-(types - 2 + Dictionary().nspecial) // 8) * 8


WIKITEXT2 = dictionary_size(33_278)
WIKITEXT103 = dictionary_size(267_735)
LM1B = dictionary_size(793_471 - 1)  # the published list of words has a start of line too


class Vocabulary:
    """A dictionary of a given size without its words."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size

    def pad(self) -> int:
        return 1


def task_of(size: int) -> SimpleNamespace:
    words = Vocabulary(size)
    return SimpleNamespace(source_dictionary=words, target_dictionary=words)


def parameters(arch: str, vocabulary: int, **flags) -> int:
    """How many parameters the model of `arch` has in its real sizes; nothing of them is in memory."""
    args = Namespace(arch=arch, tokens_per_sample=512, max_target_positions=512, **flags)
    ARCH_CONFIG_REGISTRY[arch](args)
    with torch.device("meta"):
        model = build_model(args, task_of(vocabulary))
    return sum(p.numel() for p in model.parameters())


class Row(NamedTuple):
    arch: str  # without the family
    vocabulary: int
    flags: dict
    parameters: int
    paper: int  # millions
    independent: int  # what Mixhead A adds
    wise: int  # what Mixhead B adds


SHARED = {"share_decoder_input_output_embed": True}
ROWS = [
    Row("transformer_lm", WIKITEXT103, SHARED, 155_999_232, 156, 384, 3_456),
    Row("transformer_lm_wiki2", WIKITEXT2, {}, 67_478_528, 67, 1_024, 9_216),
    Row("transformer_lm_wiki103", WIKITEXT103, {}, 246_933_504, 247, 1_024, 17_408),
    Row("transformer_lm_wiki103_512", WIKITEXT103, {}, 246_933_504, 247, 1_024, 17_408),
    Row("synthesizer_lm_wiki103", WIKITEXT103, {}, 247_982_080, 248, 1_024, 17_408),
    Row("transformer_lm_gbw_512", LM1B, {}, 330_500_096, 330, 1_024, 17_408),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.arch)
def test_mixhead_models_have_as_many_parameters_as_in_the_paper(row):
    arch = f"mixhead_{row.arch}"
    base = parameters(arch, row.vocabulary, head_mixing="none", **row.flags)
    assert base == row.parameters
    # the nearest million, but that the paper cuts the 330.5 of LM1B
    assert row.paper in (round(base / 1e6), base // 10**6)
    assert parameters(arch, row.vocabulary, head_mixing="position-independent", **row.flags) == base + row.independent
    assert parameters(arch, row.vocabulary, head_mixing="position-wise", **row.flags) == base + row.wise


@pytest.mark.parametrize("flags, expected, paper", [({"head_dim": 256}, 314_091_520, 314), ({}, 448_407_552, 448)])
def test_fixhead_models_have_as_many_parameters_as_in_the_paper(flags, expected, paper):
    count = parameters("fixhead_transformer_lm_wiki103_512", WIKITEXT103, **flags)
    assert count == expected
    assert round(count / 1e6) == paper


def test_a_dictionary_is_as_long_as_the_counts_assume():
    words = Dictionary()
    for i in range(33_278 - 2):
        words.add_symbol(str(i))
    words.finalize()
    assert len(words) == WIKITEXT2 == 33_280
    assert (WIKITEXT103, LM1B) == (267_744, 793_472)


def test_the_heads_of_a_translation_model_are_no_question_of_parameters():
    def count(arch):
        args = Namespace(arch=arch)
        ARCH_CONFIG_REGISTRY[arch](args)
        with torch.device("meta"):
            model = build_model(args, task_of(8_848))
        heads = {(m.num_heads, m.head_dim) for m in model.modules() if isinstance(m, MixheadAttention)}
        return sum(p.numel() for p in model.parameters()), heads

    counts = {arch: count(f"sigsoftmax_{arch}") for arch in TRANSLATION_MODELS}
    assert [heads for _, heads in counts.values()] == [{(4, 128)}, {(32, 16)}, {(64, 8)}]
    assert len({number for number, _ in counts.values()}) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_the_low_rank_papers_head_size_is_fixed_in_every_family(family):
    vocabulary, rest = 32_000, {"head_mixing": "none"}
    arch = f"{family}_transformer_lm_lm1b"
    eight = parameters(arch, vocabulary, **rest)
    assert eight == parameters("mixhead_transformer_lm_lm1b", vocabulary, head_dim=256 // 8, **rest)  # figure 3
    # 70 heads do not divide the embedding; each head has q, k, v with bias, and its share of the output
    more = parameters(arch, vocabulary, decoder_attention_heads=70, **rest)
    assert more - eight == 6 * (70 - 8) * 32 * (4 * 256 + 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_architecture_builds_and_trains_in_every_family(name, family):
    adaptive = {"adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20"}
    bands = adaptive if name.endswith(("_512", "_wiki103")) else {}
    model = build(f"{family}_{name}", head_dim=6, **bands)
    assert type(model) is ARCH_MODEL_REGISTRY[f"{family}_{name}"]
    assert model.family == family
    sentences = tokens()
    output = model(sentences)[0] if name in LANGUAGE_MODELS else model(sentences, None, sentences)[0]
    output.square().mean().backward()
    attentions = [m for m in model.modules() if isinstance(m, MixheadAttention)]
    assert attentions and all(m.q_proj.weight.grad.abs().sum() > 0 for m in attentions)


def test_the_recipe_on_wikitext103_has_the_stock_model():
    recipe, stock = (command(f"mixhead_transformer_lm_wiki103{end}") for end in ("_512", ""))
    assert {**vars(recipe), "arch": stock.arch} == vars(stock)


def command(arch: str, *flags: str) -> Namespace:
    """What fairseq-train understands."""
    fairseq_task = "language_modeling" if "_lm" in arch else "translation"
    return options.parse_args_and_arch(
        options.get_training_parser(), ["data", "--task", fairseq_task, "--arch", arch, *flags]
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_gets_the_table(name):
    args = command(f"sigsoftmax_{name}")
    for option, value in RECIPE_ARCHITECTURES[name].defaults.items():
        assert getattr(args, option) == value, option


def other(value):
    return {"60000,160000": "20000,60000"}.get(value) or value * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_flag_overrides_the_table(name):
    table = RECIPE_ARCHITECTURES[name].defaults
    given = {option: other(value) for option, value in table.items() if not isinstance(value, bool)}
    assert given
    flags = [part for option, value in given.items() for part in (f"--{option.replace('_', '-')}", str(value))]
    args = command(f"mixhead_{name}", *flags)
    assert {option: getattr(args, option) for option in given} == given
    if name in LANGUAGE_MODELS:
        assert args.decoder_input_dim == args.decoder_output_dim == args.decoder_embed_dim


def yaml(arch: str, **flags):
    """The model's config as fairseq-hydra-train completes it."""
    fairseq_task = {"_name": "language_modeling", "data": "data", "tokens_per_sample": 48}
    cfg = OmegaConf.create({"task": fairseq_task, "model": {"_name": arch, **flags}, "common": {"tpu": False}})
    add_defaults(cfg)
    return cfg.model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_a_yaml_file_gets_the_table_and_the_family(name, family):
    entry = RECIPE_ARCHITECTURES[name]
    cfg = yaml(f"{family}_{name}", **({} if name in LANGUAGE_MODELS else {"head_dim": 32}))
    with torch.device("meta"):
        model = build_model(cfg, task_of(LM1B))
    assert {option: cfg[option] for option in entry.defaults} == entry.defaults
    attentions = [m for m in model.modules() if isinstance(m, MixheadAttention)]
    assert {m.num_heads for m in attentions} == {entry.defaults["decoder_attention_heads"]}
    preset = FAMILIES[family]
    embed_dim = entry.defaults.get("decoder_embed_dim", 512)
    head_dim = entry.defaults.get("head_dim") or (48 if "head_dim" in preset else embed_dim // attentions[0].num_heads)
    assert {m.head_dim for m in attentions} == {head_dim if name in LANGUAGE_MODELS else 32}
    assert {m.head_mixing_kind for m in attentions} == {preset.get("head_mixing", "none")}
    assert {m.normalizer for m in attentions} == {preset.get("attention_normalizer", "softmax")}


def test_a_yaml_file_gets_what_the_stock_architecture_adds_to_the_table():
    cfg, args = yaml("mixhead_transformer_lm_wiki103_512"), command("mixhead_transformer_lm_wiki103")
    differ = {option for option in vars(args) if option in cfg and cfg[option] != getattr(args, option)}
    assert differ == {"tokens_per_sample"}
    assert (cfg.adaptive_input, cfg.adaptive_input_cutoff, cfg.dropout) == (True, "20000,60000", 0.3)


def test_a_yaml_file_overrides_the_table():
    # switches can be turned off in YAML only, as those of fairseq's own architectures
    given = {"share_decoder_input_output_embed": False, "dropout": 0.3, "decoder_layers": 2, "head_dim": 6}
    cfg = yaml("mixhead_transformer_lm_wiki2", **given)
    model = build_model(cfg, task())
    assert {option: cfg[option] for option in given} == given
    assert model.decoder.output_projection.weight is not model.decoder.embed_tokens.weight
    assert len(model.decoder.layers) == 2 and model.decoder.dropout_module.p == 0.3


@pytest.mark.parametrize("name", ["transformer_lm_wiki2", "transformer_lm_lm1b", "transformer_iwslt_de_en_h32"])
def test_the_trainer_builds_what_the_command_line_says(name):
    args = command(f"l2_{name}", "--decoder-layers", "1", "--decoder-ffn-embed-dim", "8")
    model = build_model(convert_namespace_to_omegaconf(args).model, task())
    (layer,) = model.decoder.layers
    table = RECIPE_ARCHITECTURES[name].defaults
    assert (layer.fc1.out_features, layer.nh) == (8, table["decoder_attention_heads"])
    assert layer.self_attn.head_dim == table.get("head_dim", 512 // layer.nh)
    assert layer.activation_dropout_module.p == table.get("activation_dropout", 0)
