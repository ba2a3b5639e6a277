"""Compare masks, as one tensor and block by block, with masks that are written number by number."""

import pytest
import torch

from mixhead_plugin.ops.blockwise.masks import add_mask_grad
from mixhead_plugin.ops.blockwise.plan import Plan
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import additive_mask, no_masks
from tests.covering import covering
from tests.ops.calls import blocks
from tests.ops.definitions import INF

B, H, NQ, NK = 3, 2, 8, 10


def inputs(n_queries=NQ, n_keys=NK, **masks):
    given = {name: torch.zeros(B, H, n, 1) for name, n in (("query", n_queries), ("key", n_keys), ("value", n_keys))}
    return AttentionInputs(**given | masks)


def padding():
    mask = torch.zeros(B, NK, dtype=torch.bool)
    mask[0, 7:] = mask[1, :4] = mask[2, 5] = True
    return mask


CASES = {
    "nothing": dict,
    "causal": lambda: dict(causal=True),
    "causal, more queries than keys": lambda: dict(causal=True, n_keys=5),
    "padding": lambda: dict(key_padding_mask=padding()),
    "padding, causal": lambda: dict(key_padding_mask=padding(), causal=True),
    "future": lambda: dict(attn_mask=torch.full((NQ, NK), -INF).triu(3)),
    "bias": lambda: dict(attn_mask=torch.randn(B, H, NQ, NK)),
    "bias of keys": lambda: dict(attn_mask=torch.randn(1, NK), causal=True),
}


def by_hand(call):
    """Return the sum of all masks, [B, H, Nq, Nk]."""
    n_queries, n_keys = call.query.shape[2], call.key.shape[2]
    mask = torch.zeros(B, H, n_queries, n_keys) + (0.0 if call.attn_mask is None else call.attn_mask)
    for t in range(n_queries):
        for k in range(n_keys):
            if call.causal and k > t + n_keys - n_queries:
                mask[:, :, t, k] = -INF
            for b in range(B):
                if call.key_padding_mask is not None and call.key_padding_mask[b, k]:
                    mask[b, :, t, k] = -INF
    return mask


@pytest.mark.parametrize("case", CASES)
def test_the_additive_mask_is_the_sum_of_all(case):
    call = inputs(**CASES[case]())
    found = additive_mask(call, torch.float32)
    expected = by_hand(call)
    assert torch.equal(torch.zeros_like(expected) if found is None else found.expand_as(expected), expected)
    assert (found is None) == no_masks(call) == (case == "nothing")


@covering(case=CASES, learned=[False, True], size=[1, 60, 2**18])
def test_the_blocks_together_are_the_whole_mask(case, learned, size):
    """Every score that no block holds is hidden."""
    call = inputs(**CASES[case]())
    with blocks(1, size, 3):
        plan = Plan(call, learned)
    expected = by_hand(call)
    found = torch.full_like(expected, -INF)
    for block in plan.blocks:
        part = found[block.batch, block.heads, block.queries, block.keys]
        part.zero_()
        plan.masks.add_to(part, block)
    assert torch.equal(found, expected)
    assert not plan.masks.seen or (expected[..., 0] > -INF).all()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_future_is_in_no_block(as_tensor):
    future = torch.full((NQ, NQ), -INF).triu(1)
    with blocks(1, 1, 3):
        plan = Plan(inputs(n_keys=NQ, **(dict(attn_mask=future) if as_tensor else dict(causal=True))))
    assert {(block.queries.stop, block.keys.stop) for block in plan.blocks} == {(3, 3), (6, 6), (8, 8)}
    assert plan.masks.seen


def test_padding_on_either_side_is_in_no_block():
    mask = torch.ones(B, NK, dtype=torch.bool)
    mask[0, 2:5] = mask[1, 3:7] = mask[2, 1:2] = False
    with blocks(1, 2 * H * 3 * NK, 3):  # two sentences in a block
        plan = Plan(inputs(n_queries=3, key_padding_mask=mask))
    found = {(b.batch.start, b.keys.start, b.keys.stop) for b in plan.blocks}
    assert found == {(0, 2, 7), (2, 1, 5)}  # a span has 4 keys at least


@covering(shape=[(NQ, NK), (1, NK), (NQ, 1), (H, NQ, NK), (B, 1, 1, NK), (B, H, NQ, NK)], size=[1, 60, 2**18])
def test_the_gradient_of_a_bias_is_the_sum_over_its_visible_scores(shape, size):
    call = inputs(attn_mask=torch.randn(shape), causal=True)
    with blocks(1, size, 3):
        plan = Plan(call, True)
    d_scores = torch.randn(B, H, NQ, NK).masked_fill(by_hand(call) == -INF, 0.0)
    found = torch.zeros(plan.masks.attn_mask.shape)
    for block in plan.blocks:
        add_mask_grad(found, d_scores[block.batch, block.heads, block.queries, block.keys], block)
    torch.testing.assert_close(found, d_scores.sum_to_size(found.shape))


def test_the_future_of_many_queries_on_few_keys_stays_small():
    n, zeros = 10**6, torch.zeros(1, 1, 1, 1)
    long = inputs(causal=True)._replace(query=zeros.expand(1, 1, n, 1), key=torch.zeros(1, 1, 3, 1))
    with blocks(1, 3 * n):
        plan = Plan(long._replace(value=long.key))
    (block,) = plan.blocks
    scores = torch.zeros(1, 1, n, 3)
    plan.masks.add_to(scores, block)
    assert (scores[0, 0, : n - 3] == -INF).all()
    assert torch.equal(scores[0, 0, -3:], torch.full((3, 3), -INF).triu(1))
