"""Test that pruned attentions and models compute what masked ones compute."""

import pytest
import torch

from mixhead_plugin.errors import OptionError
from mixhead_plugin.modules.attention import HeadGates, MixheadAttention
from mixhead_plugin.modules.pruning import KeptHeads, cut_parameters, cut_state, heads_per_layer, mask, pruned_flags
from mixhead_plugin.parts.head_mixing import HEAD_MIXINGS
from tests.covering import covering, each_once
from tests.helpers import build, shake, tokens
from tests.modules import definition
from tests.modules.definition import KINDS, MIXINGS, NORMALIZERS, H, inputs, variant

SIZE = 6
UNCUT = ("low-rank", "differential", "features heads", "features output")
CUT = [name for name in MIXINGS if name not in UNCUT and "scores" not in name]
UNMIXED = KeptHeads((0, 2, 3), (0, 2, 3))
MIXED = KeptHeads((1, 3), (0, 1, 3))


def attention(mixing="position-wise", **flags):
    return definition.build(mixing=mixing, head_dim=SIZE, **flags).double()


@each_once(normalizer=NORMALIZERS, mixing=CUT, kind=KINDS, bias=[True, False])
def test_the_smaller_module_is_the_masked_one(normalizer, mixing, kind, bias):
    kept = UNMIXED if MIXINGS[mixing]["head_mixing"] == "none" else MIXED
    options = {**variant(normalizer, mixing), "head_dim": SIZE, "bias": bias}
    options |= {"self_attention": kind != "cross", "causal": kind != "cross", **KINDS[kind]}
    module = definition.build(kind, mixing, normalizer, head_dim=SIZE, bias=bias).double()
    smaller = (
        MixheadAttention(definition.E, len(kept.source), num_mixed_heads=len(kept.mixed), **options).double().eval()
    )
    smaller.load_state_dict(cut_parameters("attention", module, kept))
    query, key, masks = inputs(kind, dtype=torch.float64)
    whole = module(query, key, key, **masks)[0]
    module.gates = mask(module, kept)
    for weights in (False, True):
        expected = module(query, key, key, need_weights=weights, **masks)[0]
        found = smaller(query, key, key, need_weights=weights, **masks)[0]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(whole, expected)


def test_the_mask_leaves_whole_attentions_alone():
    everything = KeptHeads((0, 1, 2, 3), (0, 1, 2, 3))
    assert mask(attention(), everything) == HeadGates(None, None)
    assert mask(attention("none"), UNMIXED).source is None
    assert mask(attention(), MIXED).source.tolist() == [0, 1, 0, 1]


def test_a_parameter_without_axes_is_refused():
    module = attention("none")
    module.positions = torch.nn.Parameter(torch.zeros(H))
    with pytest.raises(OptionError, match=r"^layer: cannot be cut, its positions belongs to"):
        cut_parameters("layer", module, UNMIXED)


@pytest.mark.parametrize("mixing", [name for name in MIXINGS if name not in CUT])
def test_heads_that_all_others_need_are_refused_by_flag(mixing):
    with pytest.raises(
        OptionError, match=r"^layer: cannot be cut with --(head|score|feature)-mixing .*; its heads can only"
    ):
        cut_parameters("layer", attention(mixing), MIXED)


def test_the_flag_says_both_numbers_where_they_differ():
    layers = {"encoder-self": [UNMIXED, KeptHeads((0,), (0,))], "cross": [MIXED, KeptHeads((0, 1), (2, 3))]}
    assert heads_per_layer(layers) == "encoder-self=3,1;cross=2:3,2"


def test_one_flag_cannot_name_two_head_sizes():
    attentions = {"a": attention(), "b": MixheadAttention(10, 2)}
    with pytest.raises(OptionError, match="heads of sizes 5, 6: cannot be cut"):
        pruned_flags(attentions, {})


def forward(model, sentences):
    if hasattr(model, "decoder") and hasattr(model, "encoder"):
        return model(sentences, torch.full((len(sentences),), sentences.shape[1]), sentences)[0]
    return model(sentences)[0]


SITES = {
    "mixhead_transformer": ("encoder-self", "decoder-self", "cross"),
    "mixhead_transformer_lm": ("decoder-self",),
    "mixhead_roberta_base": ("encoder-self",),
}


@covering(arch=SITES, mixing=["none", "position-wise"])
def test_a_pruned_model_is_the_masked_one(arch, mixing):
    """Every attention keeps other heads, so that no two can be mistaken for each other."""
    torch.manual_seed(2)
    model = shake(build(arch, head_mixing=mixing)).double().eval()
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, MixheadAttention)}
    kept, sites = {}, SITES[arch]
    layers = {site: [] for site in sites}
    for i, name in enumerate(attentions):
        heads = tuple(sorted(torch.randperm(4)[: 1 + i % 4].tolist()))
        others = tuple(sorted(torch.randperm(4)[: 1 + (i + 1) % 3].tolist()))
        kept[name] = KeptHeads(heads, others if HEAD_MIXINGS[mixing].build else heads)
        site = "cross" if "encoder_attn" in name else f"{name.split('.')[0]}-self"
        layers[site if site in sites else sites[0]].append(kept[name])
    smaller = build(arch, seed=9, head_mixing=mixing, **pruned_flags(attentions, layers)).double().eval()
    smaller.load_state_dict(cut_state(model.state_dict(), attentions, kept))
    sentences = tokens(padded=True)
    whole = forward(model, sentences)
    for name, module in attentions.items():
        module.gates = mask(module, kept[name])
    torch.testing.assert_close(forward(smaller, sentences), forward(model, sentences), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(whole, forward(model, sentences))
