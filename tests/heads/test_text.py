"""Test which texts the page takes, and that a sentence has the words that its attentions read."""

import pytest
import torch

from mixhead_plugin.heads.attention import HeadsError
from mixhead_plugin.heads.page import ShownHeads
from mixhead_plugin.heads.text import sentence, with_targets


@pytest.mark.parametrize(
    "text, target, pairs",
    [
        ("a", None, [("a", None)]),
        (["a", "b"], "c", [("a", "c"), ("b", "c")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
        (iter(["a", "b"]), iter(["c", "d"]), [("a", "c"), ("b", "d")]),
    ],
    ids=["no target", "one for all", "one for each", "iterators"],
)
def test_each_text_has_its_target(text, target, pairs):
    assert with_targets(text, target) == pairs


@pytest.mark.parametrize(
    "text, target, message",
    [
        (5, None, "text 5: must be a str, or a list of at least one"),
        ([], None, "text is a list: must be a str, or a list of at least one"),
        (["a", 1], None, "text is a list: must be a str, or a list of at least one"),
        ("a", 5, "target 5: must be a str, a list with one for each text, or None"),
        ("a", [1], "target is a list: must be a str, a list with one for each text, or None"),
        ("a", [], "target: has 0, must be one for each of 1 texts"),
        ("a", ["b", "c"], "target: has 2, must be one for each of 1 texts"),
    ],
    ids=str,
)
def test_what_is_no_text_or_no_target_is_refused_in_one_line(text, target, message):
    with pytest.raises(HeadsError) as error:
        with_targets(text, target)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "sites, encoder, decoder",
    [
        (["encoder-self"], ["a"], []),
        (["decoder-self"], [], ["b"]),
        (["cross"], ["a"], ["b"]),
        (["decoder-self", "cross"], ["a"], ["b"]),
        (["encoder-self", "cross"], ["a"], ["b"]),
    ],
    ids=str,
)
def test_a_side_has_words_if_an_attention_reads_it(sites, encoder, decoder):
    heads = [ShownHeads(site, 0, torch.ones(1, 1, 1)) for site in sites]
    found = sentence(["a"], ["b"], ["c"], heads)
    assert (found.encoder_reads, found.decoder_reads) == (encoder, decoder)
    assert len(found.decoder_predicts) == len(decoder)
