"""Test relative positions alone; tests/fairseq/test_attention.py has them in whole attentions."""

import math

import pytest
import torch

from mixhead_plugin.parts import AttentionSizes
from mixhead_plugin.parts.relative_position import BucketedBias
from tests.attention_equations import NQ, RELATIVE, E, H, build, definition, inputs


def bucket_by_hand(distance, buckets, exact):
    """Return the bucket of one distance by T5's section 2.1."""
    if distance < exact:
        return distance
    return min(
        buckets - 1,
        exact + int(math.log(distance / exact) / math.log(128 / exact) * (buckets - exact)),
    )


@pytest.mark.parametrize("causal", [True, False])
def test_distances_have_the_buckets_of_t5(causal):
    bias = BucketedBias(AttentionSizes(H, 4, H, 4, E, causal))
    offsets = torch.arange(-300, 301)
    expected = []
    for offset in offsets.tolist():
        if causal:
            expected.append(bucket_by_hand(max(0, -offset), 32, 16))
        else:
            expected.append((16 if offset > 0 else 0) + bucket_by_hand(abs(offset), 16, 8))
    assert bias.buckets(offsets).tolist() == expected
    # 16: a later key at distance 0
    assert set(expected) == (set(range(32)) if causal else set(range(32)) - {16})


@pytest.mark.parametrize("kind", RELATIVE)
def test_later_keys_are_as_far_as_earlier_ones(kind):
    """Compare with the equations where nothing is hidden; test_attention.py hides the future."""
    module, (x, *_) = build(kind, causal=False).double(), inputs(dtype=torch.float64)
    expected = definition(module, x, x, torch.zeros(NQ, NQ).bool())
    torch.testing.assert_close(module(x, x, x, need_head_weights=True), expected)
