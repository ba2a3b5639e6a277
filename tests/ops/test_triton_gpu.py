"""Test the fused kernels at full size, compiled."""

import pytest
import torch

from mixhead_plugin.ops.triton import support
from mixhead_plugin.ops.triton.support import KERNEL_NORMALIZERS
from tests.covering import covering, each_once
from tests.ops.triton_cases import (
    DEVICE,
    MIXINGS,
    a_sentence_of_nothing,
    by_kernels,
    calls,
    future,
    holes,
    inputs,
    must_be_right,
    must_be_right_with_dropout,
    padding,
    passes,
    record,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

# A case compiles a dozen kernels. Where nothing else is said: 8 heads of 64, causal, in bfloat16.
FULL_SIZE = {
    **{f"1024 {name}": dict(length=1024, normalizer=name) for name in KERNEL_NORMALIZERS},
    "1000 float16": dict(length=1000, dtype=torch.float16),
    "1000 float32": dict(length=1000, dtype=torch.float32),
    "1000 tf32": dict(length=1000, dtype=torch.float32, tf32=True),
    "777 x 128": dict(length=777, head_dim=128, normalizer="sigsoftmax"),
    "16 heads": dict(length=512, heads=16, normalizer="l2"),
    "64 heads of 8": dict(length=512, heads=64, head_dim=8),
    "512 x 256": dict(length=512, head_dim=256),
    "512 x 80": dict(length=512, head_dim=80, normalizer="l2"),
    "500 x 100 float16": dict(length=500, head_dim=100, dtype=torch.float16),
    "values of 128": dict(length=512, value_dim=128, normalizer="sigsoftmax"),
    "values of 40": dict(length=700, head_dim=96, value_dim=40),
    "values of 9": dict(length=777, value_dim=9),  # rows of 32 and of 128 bytes: ptxas 12.8
    "more keys": dict(length=300, n_keys=1000, normalizer="l2"),
    "more queries": dict(length=1000, n_keys=300),
    "more keys, float32": dict(
        length=129, n_keys=517, head_dim=33, value_dim=65, dtype=torch.float32
    ),
}


def full_size(
    mixed, length, heads=8, head_dim=64, dtype=torch.bfloat16, n_keys=None, value_dim=None, **more
):
    shape = dict(heads=heads, n_queries=length, n_keys=n_keys or length, head_dim=head_dim)
    return inputs(mixed, dtype, **shape, value_dim=value_dim or head_dim, **more)


@pytest.fixture
def set_tf32():
    """Return a function that sets torch's switch, which is put back.

    monkeypatch cannot: the switch is no attribute.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    yield lambda allowed: setattr(matmul, "allow_tf32", allowed)
    matmul.allow_tf32 = before


@each_once(case=FULL_SIZE, mixed=MIXINGS)
def test_full_size(set_tf32, case, mixed):
    case = dict(FULL_SIZE[case])
    options = dict(normalizer=case.pop("normalizer", "softmax"), causal=True)
    tf32 = case.pop("tf32", False)
    set_tf32(tf32)
    assert support.allows_tf32() == tf32
    tensors = full_size(mixed, **case)
    must_be_right(tensors, **options, key_padding_mask=padding(tensors["key"].shape[2]))


@covering(head_dim=[64, 128], normalizer=KERNEL_NORMALIZERS, mixed=[None, "per query"])
def test_the_last_of_a_batch_of_long_sentences(head_dim, normalizer, mixed):
    """Check the largest size that is timed: in the last sentence an address could overflow."""
    tensors = full_size(mixed, 4096, head_dim=head_dim, batch=16)
    last = {name: tensor.detach()[-1:].requires_grad_() for name, tensor in tensors.items()}
    must_be_right(last, normalizer=normalizer, causal=True)
    d_out = torch.randn(16, 8, 4096, head_dim, dtype=torch.bfloat16, device=DEVICE)
    results = []
    for given in (tensors, last):
        out = by_kernels(**given, normalizer=normalizer, causal=True)
        results.append([out, *torch.autograd.grad(out, list(given.values()), d_out[-len(out) :])])
    for together, alone in zip(*results):
        # Another size may take other tiles, and so round differently.
        size = alone.float().square().mean().sqrt().item()
        torch.testing.assert_close(together[-1:], alone, rtol=0.016, atol=0.01 * size)


FULL_MASKS = {
    "causal as a tensor": lambda n: {"attn_mask": future(n, n)},
    "one bias": lambda n: {"attn_mask": holes(n, n), "key_padding_mask": padding(n)},
    "bias for each head": lambda n: {"attn_mask": holes(1, 8, n, n).bfloat16(), "causal": True},
    "a sentence of nothing": lambda n: {"key_padding_mask": a_sentence_of_nothing(n)},
}


@covering(size=[(1024, 64), (777, 128)], masks=FULL_MASKS, mixed=MIXINGS)
def test_full_size_with_masks(size, masks, mixed):
    length, head_dim = size
    must_be_right(
        full_size(mixed, length, head_dim=head_dim),
        normalizer="softmax",
        **FULL_MASKS[masks](length),
    )


@covering(
    length=[1024, 777],
    dtype=[torch.bfloat16, torch.float16],
    normalizer=KERNEL_NORMALIZERS,
    mixed=MIXINGS,
)
def test_full_size_with_dropout(length, dtype, normalizer, mixed):
    must_be_right_with_dropout(full_size(mixed, length, dtype=dtype), normalizer, 0.1)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("width", [128, 9])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_values_that_are_columns_of_a_wide_matrix(place, width, dropout_p):
    """Rows of 777 numbers are never aligned, and all heads share them.

    Each tile runs alone, so a crash is its own.
    """
    n = 777
    dtype = torch.bfloat16
    query, key, _ = (torch.zeros_like(tensor) for tensor in full_size(None, n).values())
    value = torch.eye(n, device=DEVICE, dtype=dtype)[:, n - width :].expand(
        *query.shape[:2], -1, -1
    )
    seed = torch.tensor(3, device=DEVICE) if dropout_p else None
    call = calls.Call(
        record({"query": query, "key": key, "value": value}, seed=seed, dropout_p=dropout_p),
        place,
        poison=True,
    )
    out, _ = passes.forward(call)
    torch.cuda.synchronize()
    kept = out != 0
    assert abs(kept.double().mean() - (1 - dropout_p)) < 0.01
    torch.testing.assert_close(out, (kept / (n * (1 - dropout_p))).to(dtype))


@pytest.mark.parametrize("mixed", MIXINGS)
def test_a_captured_graph_draws_new_zeros_at_each_replay(mixed):
    tensors = inputs(mixed, torch.bfloat16, n_queries=64, n_keys=64)

    def run():
        out = by_kernels(**tensors, causal=True, dropout_p=0.5)
        return [
            out.detach(),
            *torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out)),
        ]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        for _ in range(2):
            graph.replay()
            runs.append([tensor.clone() for tensor in captured])
    assert all(torch.equal(a, b) for a, b in zip(runs[0] + runs[1], runs[2] + runs[3]))
    assert not torch.equal(runs[0][0], runs[1][0]) and not torch.equal(runs[0][0], runs[4][0])
