"""Test how heads are named, removed and silenced."""

import pytest
import torch

from mixhead_plugin.analysis.heads import Head, all_heads, kept_heads, kinds, without
from mixhead_plugin.modules.attention import HeadGates, MixheadAttention
from mixhead_plugin.modules.pruning import KeptHeads
from tests.helpers import shake


def attentions():
    mixed = shake(MixheadAttention(8, 4, head_mixing="position-wise", self_attention=True)).eval()
    return {"mixed": mixed, "plain": MixheadAttention(8, 2, self_attention=True).eval()}


def test_where_heads_do_not_mix_there_is_one_kind_of_them():
    both = attentions()
    assert kinds(both["mixed"]) == ("source", "mixed")
    assert kinds(both["plain"]) == ("mixed",)
    assert len(all_heads(both)) == 4 + 4 + 2
    assert all_heads(both)[-1] == Head("plain", "mixed", 1)


def test_what_is_kept_is_what_was_not_removed():
    removed = [Head("mixed", "source", 0), Head("mixed", "mixed", 3), Head("plain", "mixed", 0)]
    assert kept_heads(attentions(), removed) == {
        "mixed": KeptHeads((1, 2, 3), (0, 1, 2)),
        "plain": KeptHeads((1,), (1,)),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_the_gates_that_were_there_come_back(fails):
    both = attentions()
    both["plain"].gates = HeadGates(mixed=torch.tensor([0.5, 2.0]))
    try:
        with without(both, all_heads(both)):
            assert both["mixed"].gates is not None
            assert not fails, "out of memory"
    except AssertionError:
        assert fails
    assert both["plain"].gates.mixed.tolist() == [0.5, 2.0]
    assert both["mixed"].gates is None
