"""Test that a sentence of the page has the words that its attentions read."""

import pytest
import torch

from mixhead_plugin.heads.page import ShownHeads
from mixhead_plugin.heads.text import sentence


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
    assert (found.encoder, found.decoder) == (encoder, decoder)
    assert len(found.written) == len(decoder)
