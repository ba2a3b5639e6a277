"""Check the architectures of the papers.

The tests read their parameters, and their flags on the command line and in YAML.
"""

from typing import NamedTuple

import pytest
import torch
from fairseq.models import build_model

from mixhead_plugin.fairseq.models import ARCHITECTURES
from mixhead_plugin.fairseq.options import FAMILIES
from tests.commands import as_flags
from tests.fairseq.models.cases import (
    LM1B,
    WIKITEXT2,
    WIKITEXT103,
    attentions,
    command,
    in_real_size,
    parameters,
    task_of,
    yaml,
)
from tests.helpers import task

RECIPES = {name: entry for name, entry in ARCHITECTURES.items() if entry.defaults}
BY_DATACLASS = [name for name, entry in ARCHITECTURES.items() if entry.model.by_dataclass]


class Row(NamedTuple):
    arch: str  # without the family
    vocabulary: int
    heads: tuple[int, int]  # number and size
    parameters: int
    independent: int  # what Mixhead A adds
    wise: int  # what Mixhead B adds
    paper: int | None = None  # millions


ROWS = [
    Row("transformer_lm", WIKITEXT103, (8, 64), 155_999_232, 384, 3_456, 156),
    Row("transformer_lm_wiki2", WIKITEXT2, (8, 64), 67_478_528, 1_024, 9_216, 67),
    Row("transformer_lm_wiki103_512", WIKITEXT103, (8, 128), 246_933_504, 1_024, 17_408, 247),
    Row("synthesizer_lm_wiki103", WIKITEXT103, (8, 128), 247_982_080, 1_024, 17_408, 248),
    # the paper cuts 330.5
    Row("transformer_lm_gbw_512", LM1B, (8, 128), 330_500_096, 1_024, 17_408, 330),
    Row("transformer_xl_wiki103", WIKITEXT103, (10, 41), 151_111_237, 1_600, 8_160, 151),
    Row("transformer_xl_wiki2", WIKITEXT2, (10, 41), 40_296_111, 1_600, 8_160, 40),
    Row("transformer_xl_lm1b", LM1B, (8, 128), 294_452_099, 1_152, 19_584, 294),
    Row("transformer_lm_lm1b", 32_000, (8, 32), 12_931_072, 384, 1_920),
    # The number of heads of a translation model changes nothing but the mixing.
    Row("transformer_iwslt_de_en_h4", 8_848, (4, 128), 45_133_824, 288, 9_504),
    Row("transformer_iwslt_de_en_h32", 8_848, (32, 16), 45_133_824, 18_432, 27_648),
    Row("transformer_iwslt_de_en_h64", 8_848, (64, 8), 45_133_824, 73_728, 82_944),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.arch)
def test_mixhead_models_have_as_many_parameters_as_in_the_paper(row):
    arch = f"mixhead_{row.arch}"
    flags = {"share_decoder_input_output_embed": True} if row.arch == "transformer_lm" else {}
    base = parameters(arch, row.vocabulary, head_mixing="none", **flags)
    assert base == row.parameters and row.paper in (None, round(base / 1e6), base // 10**6)
    assert (
        parameters(arch, row.vocabulary, head_mixing="position-independent", **flags)
        == base + row.independent
    )
    model = in_real_size(arch, row.vocabulary, head_mixing="position-wise", **flags)
    assert sum(p.numel() for p in model.parameters()) == base + row.wise
    assert {(m.num_heads, m.head_dim) for m in attentions(model)} == {row.heads}


def test_every_recipe_has_a_row():
    assert set(RECIPES) <= {row.arch for row in ROWS}


@pytest.mark.parametrize(
    "flags, expected, paper", [({"head_dim": 256}, 314_091_520, 314), ({}, 448_407_552, 448)]
)
def test_fixhead_models_have_as_many_parameters_as_in_the_paper(flags, expected, paper):
    count = parameters("fixhead_transformer_lm_wiki103_512", WIKITEXT103, **flags)
    assert count == expected and round(count / 1e6) == paper


@pytest.mark.parametrize("family", FAMILIES)
def test_the_low_rank_papers_head_size_is_fixed_in_every_family(family):
    arch = f"{family}_transformer_lm_lm1b"
    assert yaml(arch).head_dim == command(arch, "--tokens-per-sample", "48").head_dim == 32


def test_the_low_rank_papers_heads_need_not_divide_the_embedding():
    """Count for each head q, k, v with bias, and its share of the output."""
    eight = parameters("l2_transformer_lm_lm1b", 32_000, decoder_attention_heads=8)
    more = parameters("l2_transformer_lm_lm1b", 32_000, decoder_attention_heads=70)
    assert more - eight == 6 * (70 - 8) * 32 * (4 * 256 + 3)


def test_the_recipe_on_wikitext103_is_fairseqs_architecture_on_the_command_line_and_in_yaml():
    recipe = command("mixhead_transformer_lm_wiki103_512")
    upstream = command("mixhead_transformer_lm_wiki103")
    assert {**vars(recipe), "arch": upstream.arch} == vars(upstream)
    cfg = yaml("mixhead_transformer_lm_wiki103_512")
    differ = {name for name, value in vars(upstream).items() if name in cfg and cfg[name] != value}
    assert differ == {"tokens_per_sample"}


@pytest.mark.parametrize("name", RECIPES)
def test_the_command_line_gets_the_table_and_its_flags_override_it(name):
    table = RECIPES[name].defaults
    usual = vars(command(f"sigsoftmax_{name}"))
    assert {option: usual[option] for option in table} == table

    given = {}
    for option, value in table.items():
        if value == "60000,160000":
            given[option] = "20000,60000"
        elif not isinstance(value, bool):
            given[option] = 2 * value
    args = command(f"mixhead_{name}", *as_flags(given))
    assert {option: getattr(args, option) for option in given} == given
    if "_lm_" in name:
        assert args.decoder_input_dim == args.decoder_output_dim == args.decoder_embed_dim


def test_the_dropouts_of_wikitext2():
    args = command("mixhead_transformer_lm_wiki2")
    assert (args.dropout, args.attention_dropout, args.activation_dropout) == (0.5, 0.2, 0.2)


@pytest.mark.parametrize("name", BY_DATACLASS)
def test_a_yaml_file_gets_the_architecture_that_the_command_line_gets(name):
    cfg = yaml(f"l2_{name}")
    typed = command(f"l2_{name}", "--tokens-per-sample", "48")
    differ = {option for option, value in vars(typed).items() if cfg.get(option, value) != value}
    assert differ == set()
    with torch.device("meta"):
        model = build_model(cfg, task_of(LM1B))
    # gated attention units are no attentions with heads
    with_normalizer = [module for module in model.modules() if hasattr(module, "normalizer")]
    assert {module.normalizer for module in with_normalizer} == {"l2"}


def test_a_yaml_file_overrides_the_table():
    # As with fairseq's own architectures, switches can be turned off in YAML only.
    given = {
        "share_decoder_input_output_embed": False,
        "dropout": 0.3,
        "decoder_layers": 2,
        "head_dim": 6,
    }
    cfg = yaml("mixhead_transformer_lm_wiki2", **given)
    model = build_model(cfg, task())
    assert {option: cfg[option] for option in given} == given
    assert model.decoder.output_projection.weight is not model.decoder.embed_tokens.weight
    assert len(model.decoder.layers) == 2 and model.decoder.dropout_module.p == 0.3
