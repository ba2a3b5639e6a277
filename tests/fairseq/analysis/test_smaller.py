"""Test what the smaller checkpoint refuses, and the flags that it needs."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.analysis.smaller import (
    pruned_flags,
    refuse_what_cannot_be_cut,
    training_flags,
)
from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.heads.assembly_attention import AssemblyAttention
from mixhead_plugin.heads.choosing import KeptHeads
from tests import attention_equations

SIZE = 6
UNCUT = ["low-rank", "differential", "features heads", "features output"]
UNCUT += [name for name in attention_equations.COMBINATIONS if "scores" in name]
UNMIXED = KeptHeads((0, 2, 3), (0, 2, 3))
MIXED = KeptHeads((1, 3), (0, 1, 3))


def attention(mixing="position-wise", **flags):
    module = attention_equations.build(mixing=mixing, head_dim=SIZE, **flags).double()
    return AssemblyAttention("layer", module)


def whole(**flags):
    """Return a model of the plugin as `refuse_what_cannot_be_cut` sees it."""
    model = Namespace(_name="mixhead_transformer_lm", attention_scope="all", **flags)
    return SimpleNamespace(path="whole.pt", cfg=SimpleNamespace(model=model))


@pytest.mark.parametrize("mixing", UNCUT)
def test_heads_that_all_others_need_are_refused_by_flag(mixing):
    said = r"^layer: cannot be cut with --(head|score|feature)-mixing .*; its heads can only"
    with pytest.raises(OptionError, match=said):
        refuse_what_cannot_be_cut(whole(), [attention(mixing)])


def test_the_flag_says_both_numbers_where_they_differ():
    layers = {
        "encoder-self": [UNMIXED, KeptHeads((0,), (0,))],
        "cross": [MIXED, KeptHeads((0, 1), (2, 3))],
    }
    assert pruned_flags([attention()], layers)["heads_per_layer"] == "encoder-self=3,1;cross=2:3,2"


def test_one_flag_cannot_name_two_head_sizes():
    attentions = [attention(), AssemblyAttention("other", MixheadAttention(10, 2))]
    with pytest.raises(OptionError, match="heads of sizes 5, 6: cannot be cut"):
        refuse_what_cannot_be_cut(whole(), attentions)


def test_heads_with_trained_scales_are_refused():
    with pytest.raises(OptionError) as error:
        refuse_what_cannot_be_cut(whole(scale_heads=True), [attention()])
    assert str(error.value) == (
        "whole.pt: was trained with --scale-heads, which layers of unequal heads do not have"
    )


def test_a_model_of_fairseq_that_the_plugin_lacks_is_refused():
    loaded = whole()
    loaded.cfg.model = Namespace(_name="lightconv_lm")
    with pytest.raises(OptionError) as error:
        refuse_what_cannot_be_cut(loaded, [attention()])
    assert str(error.value) == (
        "--save: lightconv_lm has no counterpart in the plugin, which could be smaller"
    )


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
