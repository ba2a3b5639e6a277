"""Test the values and gradients of the fused kernels: interpreted on a CPU, compiled on a GPU."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.ops import LowRank, attention
from mixhead_plugin.ops.triton.support import KERNEL_NORMALIZERS
from tests.covering import covering, each_once, first_of
from tests.ops.triton_cases import (
    DEVICE,
    INF,
    MIXED,
    MIXINGS,
    NK,
    NQ,
    SINKS,
    TABLES,
    TILES,
    B,
    H,
    Tile,
    a_sentence_of_nothing,
    by_kernels,
    detached,
    future,
    holes,
    inputs,
    kept_weights,
    must_be_right,
    must_be_right_with_dropout,
    padding,
    tuning,
    use_tiles,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("kernels")


def extreme():
    """Return low and high scores.

    A low one is not a hidden key, and a large one does not overflow.
    """
    bias = torch.full((NQ, NK), -INF, device=DEVICE)
    for first, number in enumerate([torch.finfo(torch.float32).min, -300.0, 300.0]):
        bias[first::4, :7] = number
    # fairseq's encoders hide keys by -1e8; a float32 then holds nothing of the score
    bias[3::4] = -1e8
    bias[3, 5:] = bias[7, 30] = bias[11, ::2] = 0
    return bias


MASKS = {
    "padding": lambda: {"key_padding_mask": padding(), "causal": True},
    "causal as a tensor": lambda: {"attn_mask": future()},
    "bias for each head": lambda: {"attn_mask": holes(1, H, NQ, NK), "causal": True},
    "bias for each sentence": lambda: {"attn_mask": holes(B, 1, NQ, NK).bfloat16()},
    "bias for each key": lambda: {
        "attn_mask": torch.randn(B, 1, 1, NK, device=DEVICE).expand(B, H, NQ, NK)
    },
    "expanded bias": lambda: {
        "attn_mask": holes(NQ, NK).double().expand(B, H, NQ, NK),
        "key_padding_mask": a_sentence_of_nothing(),
    },
    "extreme": lambda: {"attn_mask": extreme()},
}


@covering(mixed=[None, "per query"], normalizer=[*KERNEL_NORMALIZERS, *SINKS])
def test_values_and_gradients_are_those_of_the_formula(mixed, normalizer):
    values_and_gradients_must_be_right(mixed, normalizer)


# By the same kernels. The test of masks has a shared mixing with other normalizers.
@first_of(normalizer=[*KERNEL_NORMALIZERS, *SINKS])
def test_values_and_gradients_with_a_shared_mixing_likewise(normalizer):
    values_and_gradients_must_be_right("shared", normalizer)


def values_and_gradients_must_be_right(mixed, normalizer):
    tensors = inputs(mixed, batch=1, sink=normalizer in SINKS)
    options = {"attn_mask": holes(1, H, NQ, NK), "causal": True}
    must_be_right(tensors, normalizer=normalizer.removesuffix(", sink"), **options)


@each_once(masks=MASKS, mixed=MIXINGS, normalizer=KERNEL_NORMALIZERS)
def test_values_and_gradients_are_those_of_the_formula_under_any_mask(masks, mixed, normalizer):
    must_be_right(inputs(mixed), normalizer=normalizer, **MASKS[masks]())


@each_once(
    normalizer=[*KERNEL_NORMALIZERS, *SINKS], dtype=[torch.float16, torch.bfloat16], mixed=MIXINGS
)
def test_lower_precision_is_at_most_twice_as_wrong_as_the_formula(normalizer, mixed, dtype):
    tensors = inputs(mixed, dtype, 1, 3, 9, 17, sink=normalizer in SINKS)
    must_be_right(tensors, normalizer=normalizer.removesuffix(", sink"), causal=True)


@pytest.mark.parametrize(
    "dtype, of_mixing", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_mixing_may_have_another_dtype(dtype, of_mixing):
    """Under autocast queries are in half precision, but the mixing matrix is float32."""
    tensors = inputs("shared", dtype, 1, 3, 9, 17)
    tensors["mixing"] = tensors["mixing"].detach().to(of_mixing).requires_grad_()
    must_be_right(tensors, normalizer="softmax", causal=True)


# queries, keys, heads, their size
SIZES = [
    (33, 17, 3, 8),
    (9, 1, 3, 8),
    (1, 9, 3, 8),
    (65, 64, 2, 8),
    (17, 18, 1, 8),
    (17, 18, 5, 64),
    (17, 18, 16, 8),
]


@first_of(size=[*SIZES, (17, 18, 64, 8)], mixed=["shared", "per query", None])
def test_any_number_and_size_of_heads_queries_and_keys_is_right(monkeypatch, size, mixed):
    monkeypatch.setattr(tuning, "tiles_for", TABLES)
    n_queries, n_keys, heads, head_dim = size
    tensors = inputs(mixed, torch.float32, 1, heads, n_queries, n_keys, head_dim, head_dim)
    must_be_right(tensors, normalizer="sigsoftmax", causal=True)


@first_of(tile=TILES, mixed=MIXED)
def test_any_tile_is_right(monkeypatch, tile, mixed):
    use_tiles(monkeypatch, Tile(16, 32, 4, 1), tile)
    tensors = inputs(mixed, batch=1, heads=5, n_queries=9, n_keys=18)
    must_be_right(tensors, normalizer="softmax", attn_mask=holes(1, 5, 9, 18), causal=True)


# dtype, mixing, heads and their size, place in the lists of tiles
SHAPES = [(16, 64), (8, 64), (64, 16), (4, 128), (2, 256)]
OF_TABLES = []
for dtype, mixed, shape in itertools.product(
    (torch.bfloat16, torch.float32), ("per query", None), SHAPES
):
    OF_TABLES.append((dtype, mixed, shape, 0))
    if dtype == torch.bfloat16 and mixed is None:  # the only kernels with a second candidate
        OF_TABLES.append((dtype, mixed, shape, 1))


@first_of(case=OF_TABLES)
def test_every_tile_of_the_tables(monkeypatch, case):
    """Run the tiles that a GPU would try."""
    dtype, mixed, (heads, head_dim), place = case
    monkeypatch.setattr(
        tuning, "tiles_for", lambda *size: TABLES(*size)[place:] or TABLES(*size)[-1:]
    )
    # more queries and keys than a tile has, unless it has many
    n_queries, n_keys = (17, 18) if heads > 8 else (131, 133)
    tensors = inputs(mixed, dtype, 1, heads, n_queries, n_keys, head_dim, head_dim)
    must_be_right(tensors, normalizer="softmax", causal=True)


@each_once(normalizer=KERNEL_NORMALIZERS, mixed=MIXINGS)
def test_a_query_that_sees_no_key_changes_nothing(normalizer, mixed):
    """Of two sentences one is padding alone; the first queries of the other see no key."""
    padding = torch.zeros(2, 12, dtype=torch.bool, device=DEVICE)
    padding[0] = True
    padding[1, :3] = True
    tensors = inputs(mixed, heads=2, n_queries=12, n_keys=12)
    found = with_gradients(
        by_kernels, tensors, normalizer=normalizer, causal=True, key_padding_mask=padding
    )
    expected = with_gradients(
        lambda **given: attention(**given, impl="reference"),
        tensors,
        normalizer=normalizer,
        causal=True,
        key_padding_mask=padding,
    )
    for got, right in zip(found, expected):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-5)


def test_factors_are_mixed_by_their_matrix():
    tensors = inputs(batch=1)
    factors = LowRank(
        *(torch.randn(1, NQ, H, 2, device=DEVICE).requires_grad_() for _ in range(2)),
        torch.randn(1, NQ, H, device=DEVICE).requires_grad_(),
    )
    found = {}
    for impl in ("triton", "reference"):
        out = attention(**tensors, mixing=factors, causal=True, impl=impl)
        found[impl] = out, *torch.autograd.grad(out.square().sum(), [*tensors.values(), *factors])
    torch.testing.assert_close(found["triton"], found["reference"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mixed", MIXINGS)
def test_nan_stays_where_it_is(mixed):
    tensors = detached(inputs(mixed, n_queries=7, n_keys=6))
    tensors["query"][1, 2, 5, 0] = float("nan")
    out = by_kernels(**tensors)
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[1, 2 if mixed is None else slice(None), 5] = True
    assert torch.equal(out.isnan(), spoilt)


@each_once(sizes=[(0, 3, 4, 6), (2, 0, 4, 6), (2, 3, 0, 6), (2, 3, 4, 0)], mixed=MIXINGS)
def test_nothing_gives_nothing(sizes, mixed):
    batch, heads, n_queries, n_keys = sizes
    tensors = inputs(mixed, batch=batch, heads=heads, n_queries=n_queries, n_keys=n_keys)
    for tensor in with_gradients(by_kernels, tensors):
        assert (tensor == 0).all()


@each_once(normalizer=[*KERNEL_NORMALIZERS, *SINKS], mixed=[None, "per query"])
def test_dropout_is_the_same_forward_and_backward(normalizer, mixed):
    tensors = inputs(mixed, batch=1, sink=normalizer in SINKS)
    must_be_right_with_dropout(tensors, normalizer.removesuffix(", sink"), 0.4)


@pytest.mark.parametrize("p", [1e-3, 0.1])
def test_dropout_has_its_probability_and_no_pattern(p):
    q = torch.zeros(3, 3, 64, 8, device=DEVICE)
    kept = kept_weights(p, q, q).float()
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * deviation
    for dim in range(4):
        for distance in (1, 2, 4)[: 3 if dim > 1 else 2]:  # four draws share a counter
            pairs = kept * kept.roll(distance, dim)
            assert abs(pairs.mean() - (1 - p) ** 2) < 10 * deviation


def test_dropout_is_the_same_in_every_tile(monkeypatch):
    tensors = detached(inputs("shared", batch=1, n_queries=17, n_keys=18))
    del tensors["value"]
    found = [kept_weights(0.5, tensors["query"], tensors["key"])]
    for tile in TILES[:3]:
        use_tiles(monkeypatch, Tile(32, 32, 4, 1), tile)
        found.append(kept_weights(0.5, **tensors))
    assert all(torch.equal(kept, found[0]) for kept in found)


@first_of(mixed=["per query", "shared", None])
def test_dropout_repeats_with_the_seed_and_under_activation_checkpointing(mixed):
    tensors = inputs(mixed, batch=1, heads=2, n_queries=5, n_keys=6)
    names = list(tensors)

    def run(*values):
        return by_kernels(**dict(zip(names, values)), causal=True, dropout_p=0.3)

    runs = []
    for seed, function in (
        (5, run),
        (5, lambda *values: checkpoint(run, *values, use_reentrant=False)),
        (6, run),
    ):
        torch.manual_seed(seed)
        runs.append(with_gradients(lambda f=function, **t: f(*t.values()), tensors))
    assert all(torch.equal(a, b) for a, b in zip(*runs[:2]))
    assert not torch.equal(runs[0][0], runs[2][0])


def test_all_may_be_dropped():
    for tensor in with_gradients(
        by_kernels, inputs("shared", batch=1, n_queries=5, n_keys=6), dropout_p=1.0
    ):
        assert (tensor == 0).all()


@first_of(causal=[False, True])
def test_a_mask_that_leaves_changes_and_hides_whole_tiles_is_right(causal):
    """The kernels skip the mask where a whole tile of it is zero, and the tile where it hides."""
    bias = torch.zeros(70, 100, device=DEVICE)
    bias[40:50, 60:70] = torch.randn(10, 10, device=DEVICE)
    bias[:35, 90:] = bias[66] = -INF
    tensors = inputs(batch=1, heads=1, n_queries=70, n_keys=100)
    must_be_right(tensors, normalizer="softmax", attn_mask=bias, causal=causal)
