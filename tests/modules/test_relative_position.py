"""Test relative positions and gains alone; test_attention.py has them in whole attentions."""

import math

import pytest
import torch

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.parts.relative_position import BucketedBias, DistanceGain
from tests.modules.definition import NQ, RELATIVE, B, E, H, build, future, inputs

every_kind = pytest.mark.parametrize("kind", RELATIVE)


def bucket_by_hand(distance, buckets, exact):
    """Return the bucket of one distance by T5's section 2.1."""
    if distance < exact:
        return distance
    return min(buckets - 1, exact + int(math.log(distance / exact) / math.log(128 / exact) * (buckets - exact)))


@pytest.mark.parametrize("causal", [True, False])
def test_distances_have_the_buckets_of_t5(causal):
    bias = BucketedBias(H, 4, causal)
    offsets = torch.arange(-300, 301)
    expected = []
    for offset in offsets.tolist():
        if causal:
            expected.append(bucket_by_hand(max(0, -offset), 32, 16))
        else:
            expected.append((16 if offset > 0 else 0) + bucket_by_hand(abs(offset), 16, 8))
    assert bias.buckets(offsets).tolist() == expected
    assert set(expected) == (set(range(32)) if causal else set(range(32)) - {16})  # 16: a later key at distance 0


@every_kind
def test_only_distances_count(kind):
    """Words give the same outputs some positions later, behind words that are hidden."""
    module = build(kind).double()
    x = torch.randn(NQ + 3, B, E).double()
    hidden = torch.zeros(B, NQ + 3, dtype=torch.bool)
    hidden[:, :3] = True
    later = module(x, x, x, attn_mask=future(NQ + 3), key_padding_mask=hidden, need_weights=False)[0]
    alone = module(x[3:], x[3:], x[3:], attn_mask=future(), need_weights=False)[0]
    torch.testing.assert_close(later[3:], alone)


@every_kind
def test_order_counts_on_both_sides(kind):
    module, (x, *_) = build(kind, causal=False), inputs()
    middle = module(x, x, x, need_weights=False)[0][2]
    for order in ([1, 0, 2, 3, 4], [0, 1, 2, 4, 3]):
        swapped = x[order]
        assert not torch.allclose(module(swapped, swapped, swapped, need_weights=False)[0][2], middle)


@pytest.mark.parametrize("name", ["relative_position", "relative_gain"])
def test_a_checkpoint_without_it_gets_its_start(name):
    plain = MixheadAttention(E, H, self_attention=True)
    options = {"relative_position": "t5"} if name == "relative_position" else {"relative_gain": 3}
    module = build(**options)
    state = plain.state_dict()
    getattr(module, name).upgrade_state_dict_named(state, name)
    module.load_state_dict(state)
    x, *_ = inputs()
    torch.testing.assert_close(module(x, x, x), plain(x, x, x))


def test_the_gain_of_far_distances_is_shared():
    gain = DistanceGain(H, 2)
    torch.nn.init.normal_(gain.weight)
    table = gain(6, 6)
    assert table.shape == (H, 11)
    assert torch.equal(table[:, :4], gain.weight[:, :1].expand(H, 4))
    assert torch.equal(table[:, 5], gain.weight[:, 2])  # a key at its query's own position
