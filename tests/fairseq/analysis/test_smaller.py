"""Test that pruned attentions and models compute what masked ones compute."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis.heads import KeptHeads, mask
from mixhead_plugin.fairseq.analysis.smaller import cut_parameters, pruned_flags, training_flags
from mixhead_plugin.fairseq.attention import HeadGates, MixheadAttention
from tests.covering import each_once
from tests.fairseq import definition
from tests.fairseq.definition import KINDS, MIXINGS, NORMALIZERS, H, inputs, variant

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
    smaller = MixheadAttention(
        definition.E, len(kept.source), num_mixed_heads=len(kept.mixed), **options
    )
    smaller.double().eval().load_state_dict(cut_parameters("attention", module, kept))
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
    said = r"^layer: cannot be cut with --(head|score|feature)-mixing .*; its heads can only"
    with pytest.raises(OptionError, match=said):
        cut_parameters("layer", attention(mixing), MIXED)


def test_the_flag_says_both_numbers_where_they_differ():
    layers = {
        "encoder-self": [UNMIXED, KeptHeads((0,), (0,))],
        "cross": [MIXED, KeptHeads((0, 1), (2, 3))],
    }
    assert (
        pruned_flags({"a": attention()}, layers)["heads_per_layer"]
        == "encoder-self=3,1;cross=2:3,2"
    )


def test_one_flag_cannot_name_two_head_sizes():
    attentions = {"a": attention(), "b": MixheadAttention(10, 2)}
    with pytest.raises(OptionError, match="heads of sizes 5, 6: cannot be cut"):
        pruned_flags(attentions, {})


def test_the_flags_of_further_training_name_the_user_dir_that_was_given():
    """fairseq takes the last --user-dir alone; examples/bert registers the plugin, too."""
    model = Namespace(
        _name="mixhead_bert_base",
        head_mixing="none",
        heads_per_layer="encoder-self=3,2",
        head_dim=4,
    )
    flags = training_flags(
        SimpleNamespace(cfg=SimpleNamespace(model=model)), "small.pt", "my examples/bert"
    )
    assert flags.startswith(
        "--user-dir 'my examples/bert' --arch mixhead_bert_base --head-mixing none "
    )
