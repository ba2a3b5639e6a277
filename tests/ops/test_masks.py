"""Test what masks save: blocks, scores and memory.

test_attention.py compares their values with the definition.
"""

import pytest
import torch

from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.inputs import AttentionInputs
from tests.ops.calls import blocks
from tests.ops.definitions import INF

B, H, NQ, NK = 3, 2, 8, 10


def inputs(n_queries=NQ, n_keys=NK, **masks):
    given = {
        name: torch.zeros(B, H, n, 1)
        for name, n in (("query", n_queries), ("key", n_keys), ("value", n_keys))
    }
    return AttentionInputs(**given | masks)


@pytest.mark.parametrize(
    "masks, seen",
    [
        (dict(causal=True), True),
        (dict(causal=True, n_keys=NQ - 1), False),
        (dict(key_padding_mask=(torch.arange(NK) == 0).expand(B, NK)), False),
        (dict(attn_mask=torch.full((NQ, NK), -INF).triu()), False),
    ],
)
def test_rows_that_see_no_key_are_known(masks, seen):
    """A normalizer would give NaN where it is promised a key in every row."""
    assert Plan(inputs(**masks)).masks.every_query_sees_a_key == seen


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_future_is_in_no_block(as_tensor):
    future = torch.full((NQ, NQ), -INF).triu(1)
    with blocks(1, 1, 3):
        plan = Plan(
            inputs(n_keys=NQ, **(dict(attn_mask=future) if as_tensor else dict(causal=True)))
        )
    assert {(block.queries.stop, block.keys.stop) for block in plan.blocks} == {
        (3, 3),
        (6, 6),
        (8, 8),
    }
    assert plan.masks.every_query_sees_a_key


def test_padding_on_either_side_is_in_no_block():
    mask = torch.ones(B, NK, dtype=torch.bool)
    mask[0, 2:5] = mask[1, 3:7] = mask[2, 1:2] = False
    with blocks(1, 2 * H * 3 * NK, 3):  # two sentences in a block
        plan = Plan(inputs(n_queries=3, key_padding_mask=mask))
    found = {(b.batch.start, b.keys.start, b.keys.stop) for b in plan.blocks}
    assert found == {(0, 2, 7), (2, 1, 5)}  # a span has 4 keys at least


def test_the_future_of_many_queries_on_few_keys_stays_small():
    n = 10**6
    zeros = torch.zeros(1, 1, 1, 1)
    long = inputs(causal=True)._replace(query=zeros.expand(1, 1, n, 1), key=torch.zeros(1, 1, 3, 1))
    with blocks(1, 3 * n):
        plan = Plan(long._replace(value=long.key))
    (block,) = plan.blocks
    scores = torch.zeros(1, 1, n, 3)
    plan.masks.add_to(scores, block)
    assert (scores[0, 0, : n - 3] == -INF).all()
    assert torch.equal(scores[0, 0, -3:], torch.full((3, 3), -INF).triu(1))
