import pytest
import torch

from mixhead_plugin.ops.masks import BlockMasks, additive_mask

INF = float("inf")
B, H, NQ, NK = 3, 2, 8, 10


def cut(n, size):
    return [slice(start, min(n, start + size)) for start in range(0, n, size)]


def masks(causal=False, attn_mask=None, key_padding_mask=None, n_queries=NQ, n_keys=NK, learned=False):
    cuts = (cut(B, 2), cut(H, 2), cut(n_queries, 3))
    return BlockMasks(causal, attn_mask, key_padding_mask, n_queries, n_keys, *cuts, torch.empty(0), learned)


def padding():
    mask = torch.zeros(B, NK, dtype=torch.bool)
    mask[0, 7:] = mask[1, :4] = mask[2, 5] = True
    return mask


CASES = {
    "nothing": dict(),
    "causal": dict(causal=True),
    "causal, more queries than keys": dict(causal=True, n_keys=5),
    "padding": dict(key_padding_mask=padding()),
    "padding, causal": dict(key_padding_mask=padding(), causal=True),
    "future": dict(attn_mask=torch.full((NQ, NK), -INF).triu(3)),
    "bias": dict(attn_mask=torch.randn(B, H, NQ, NK)),
    "bias of keys": dict(attn_mask=torch.randn(1, NK), causal=True),
}


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_blocks_together_are_the_whole_mask(case, learned):
    """Every score that no block holds is hidden; the others get what the additive mask says."""
    arguments = CASES[case]
    found = masks(**arguments, learned=learned)
    sizes = {"n_queries": NQ, "n_keys": NK, **arguments}
    expected = additive_mask(
        arguments.get("causal", False),
        arguments.get("attn_mask"),
        arguments.get("key_padding_mask"),
        sizes["n_queries"],
        sizes["n_keys"],
        torch.device("cpu"),
        torch.float32,
    )
    full = (B, H, sizes["n_queries"], sizes["n_keys"])
    expected = torch.zeros(full) if expected is None else expected.expand(full)
    got = torch.full(full, -INF)
    for block in found.blocks:
        part = got[block.sentences, block.heads, block.queries, block.keys]
        part.zero_()
        found.add_to(part, block)
    assert torch.equal(got, expected)
    assert not found.seen or (expected[..., 0] > -INF).all()


@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_future_is_in_no_block(as_tensor):
    future = torch.full((NQ, NQ), -INF).triu(1)
    found = masks(**(dict(attn_mask=future) if as_tensor else dict(causal=True)), n_keys=NQ)
    assert {(block.queries.stop, block.keys.stop) for block in found.blocks} == {(3, 3), (6, 6), (8, 8)}
    assert found.seen


def test_padding_on_either_side_is_in_no_block():
    mask = torch.ones(B, NK, dtype=torch.bool)
    mask[0, 2:5] = mask[1, 3:7] = mask[2, 1:2] = False
    keys = {(block.sentences.start, block.keys.start, block.keys.stop) for block in masks(key_padding_mask=mask).blocks}
    assert keys == {(0, 2, 7), (2, 1, 2)}


@pytest.mark.parametrize("shape", [(NQ, NK), (1, NK), (NQ, 1), (H, NQ, NK), (B, 1, 1, NK), (B, H, NQ, NK)])
def test_the_gradient_of_a_bias_is_the_sum_over_its_scores(shape):
    bias = torch.randn(shape)
    found = masks(attn_mask=bias, causal=True, learned=True)
    d_scores = torch.randn(B, H, NQ, NK)
    got = torch.zeros(bias[(None,) * (4 - bias.dim())].shape)
    for block in found.blocks:
        found.add_grad(got, d_scores[block.sentences, block.heads, block.queries, block.keys], block)
    visible = torch.zeros(B, H, NQ, NK)
    for block in found.blocks:
        visible[block.sentences, block.heads, block.queries, block.keys] = 1
    torch.testing.assert_close(got, (d_scores * visible).sum_to_size(got.shape))


def test_the_future_of_many_queries_on_few_keys_stays_small():
    found = BlockMasks(
        True, None, None, 10**6, 3, [slice(0, 1)], [slice(0, 1)], [slice(0, 10**6)], torch.empty(0), False
    )
    scores = torch.zeros(1, 1, 10**6, 3)
    found.add_to(scores, found.blocks[0])
    assert (scores[0, 0, : 10**6 - 3] == -INF).all()
    assert torch.equal(scores[0, 0, -3:], torch.full((3, 3), -INF).triu(1))
