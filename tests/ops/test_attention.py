import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS, api, attention, implementation_problem
from mixhead_plugin.ops.blockwise import blockwise_attention

INF = float("inf")
B, H, NQ, NK, D, DV = 2, 3, 4, 6, 5, 7

# The kernels of a GPU have tests of their own, in the types that they have.
USABLE = [name for name in IMPLEMENTATIONS if name != "triton" and not implementation_problem(name)]
every_impl = pytest.mark.parametrize("impl", ["auto", *USABLE])
every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)
every_mixing = pytest.mark.parametrize(
    "mixing_shape", [None, (H, H), (B, NQ, H, H)], ids=["none", "shared", "per query"]
)


def tensors(dtype=torch.float64, mixing_shape=None, n_queries=NQ, n_keys=NK):
    q = torch.randn(B, H, n_queries, D, dtype=dtype)
    k = torch.randn(B, H, n_keys, D, dtype=dtype)
    v = torch.randn(B, H, n_keys, DV, dtype=dtype)
    mixing = None if mixing_shape is None else torch.randn(mixing_shape, dtype=dtype)
    return q, k, v, mixing


def by_hand(q, k, v, *, normalizer, mixing=None, causal=False, attn_mask=None, key_padding_mask=None, scale=None):
    """design.md's equations, one query, head and key at a time."""
    (batch, heads, n_queries, head_dim), n_keys = q.shape, k.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(batch, heads, n_queries, v.shape[3], dtype=q.dtype)
    for b in range(batch):
        for t in range(n_queries):
            weights = torch.zeros(heads, n_keys, dtype=q.dtype)
            for j in range(heads):
                scores = []
                for s in range(n_keys):
                    score = scale * (q[b, j, t] @ k[b, j, s])
                    if attn_mask is not None:
                        score = score + attn_mask.expand(batch, heads, n_queries, n_keys)[b, j, t, s]
                    if causal and s > t + (n_keys - n_queries):
                        score = score - INF
                    if key_padding_mask is not None and key_padding_mask[b, s]:
                        score = score - INF
                    scores.append(score)
                weights[j] = NORMALIZERS[normalizer].weights(torch.stack(scores))
            if mixing is not None:
                m = mixing if mixing.dim() == 2 else mixing[b, t]
                weights = torch.stack([sum(m[j, i] * weights[j] for j in range(heads)) for i in range(heads)])
            out[b, :, t] = torch.stack([weights[i] @ v[b, i] for i in range(heads)])
    return out


@every_impl
@every_mixing
@every_normalizer
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_equations(impl, normalizer, mixing_shape, causal):
    q, k, v, mixing = tensors(mixing_shape=mixing_shape)
    padding = torch.tensor([[False] * NK, [True, False, False, False, True, True]])
    bias = torch.randn(H, NQ, NK, dtype=torch.float64)
    bias[0, 1, 2] = -INF
    arguments = dict(normalizer=normalizer, mixing=mixing, causal=causal, attn_mask=bias, key_padding_mask=padding)
    torch.testing.assert_close(attention(q, k, v, impl=impl, **arguments), by_hand(q, k, v, **arguments))


@every_impl
@every_mixing
@every_normalizer
def test_gradients_are_those_of_finite_differences(impl, normalizer, mixing_shape):
    inputs = [t.requires_grad_() if t is not None else None for t in tensors(mixing_shape=mixing_shape)]

    def run(q, k, v, mixing=None):
        return attention(q, k, v, mixing=mixing, normalizer=normalizer, causal=True, impl=impl)

    # of the reference entry by entry; of what is compared with it, along random directions: a tenth of the time
    torch.autograd.gradcheck(run, [t for t in inputs if t is not None], fast_mode=impl != "reference")


@every_impl
@every_normalizer
@pytest.mark.parametrize("n_queries, n_keys", [(1, 1), (1, 6), (6, 6), (4, 6), (6, 4)])
def test_a_causal_query_sees_the_past_only(impl, normalizer, n_queries, n_keys):
    q, k, v, _ = tensors(n_queries=n_queries, n_keys=n_keys)
    before = attention(q, k, v, normalizer=normalizer, causal=True, impl=impl)
    for t in range(n_queries):
        seen = max(0, t + n_keys - n_queries + 1)
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, seen:] = torch.randn_like(k[:, :, seen:])
        other_v[:, :, seen:] = torch.randn_like(v[:, :, seen:])
        after = attention(q, other_k, other_v, normalizer=normalizer, causal=True, impl=impl)
        torch.testing.assert_close(after[:, :, t], before[:, :, t])
        if seen == 0:
            assert (before[:, :, t] == 0).all()


@every_impl
@every_mixing
@every_normalizer
def test_padding_changes_nothing(impl, normalizer, mixing_shape):
    q, k, v, mixing = tensors(mixing_shape=mixing_shape)
    arguments = dict(normalizer=normalizer, mixing=mixing, impl=impl)
    short = attention(q, k, v, **arguments)
    padded_k = torch.cat([k, 100 * torch.randn(B, H, 3, D, dtype=k.dtype)], dim=2)
    padded_v = torch.cat([v, 100 * torch.randn(B, H, 3, DV, dtype=v.dtype)], dim=2)
    padding = torch.arange(NK + 3).expand(B, -1) >= NK
    torch.testing.assert_close(attention(q, padded_k, padded_v, key_padding_mask=padding, **arguments), short)


@every_impl
@every_mixing
@every_normalizer
def test_a_query_that_sees_nothing_gives_zero_and_finite_gradients(impl, normalizer, mixing_shape):
    q, k, v, mixing = tensors(torch.float32, mixing_shape)
    q.requires_grad_()
    everything = torch.ones(B, NK, dtype=torch.bool)
    out = attention(q, k, v, normalizer=normalizer, mixing=mixing, key_padding_mask=everything, impl=impl)
    assert (out == 0).all()
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert (gradient == 0).all()


@every_impl
@every_normalizer
def test_without_any_key_the_output_is_zero(impl, normalizer):
    q, k, v, _ = tensors(n_keys=0)
    assert torch.equal(
        attention(q, k, v, normalizer=normalizer, causal=True, impl=impl), torch.zeros(B, H, NQ, DV).double()
    )


@every_impl
@every_normalizer
def test_mixing_by_the_identity_is_no_mixing(impl, normalizer):
    q, k, v, _ = tensors()
    plain = attention(q, k, v, normalizer=normalizer, impl=impl)
    mixed = attention(q, k, v, normalizer=normalizer, mixing=torch.eye(H, dtype=q.dtype), impl=impl)
    torch.testing.assert_close(mixed, plain)


def test_plain_softmax_is_torchs():
    q, k, v, _ = tensors()
    bias = torch.randn(B, 1, NQ, NK, dtype=q.dtype)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(attention(q, k, v, attn_mask=bias), expected)


@every_impl
@every_mixing
@every_normalizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lower_precision_is_at_most_twice_as_wrong_as_the_eager_formula(impl, normalizer, mixing_shape, dtype):
    q, k, v, mixing = tensors(torch.float64, mixing_shape)
    low = [None if t is None else t.to(dtype) for t in (q, k, v, mixing)]
    exact = [None if t is None else t.double() for t in low]
    expected = attention(*exact[:3], normalizer=normalizer, mixing=exact[3], causal=True, impl="reference")

    def eager(q, k, v, mixing):
        scores = q @ k.transpose(2, 3) * D**-0.5
        future = torch.ones(NQ, NK, dtype=torch.bool).triu(1 + NK - NQ)
        weights = NORMALIZERS[normalizer].weights(scores.masked_fill(future, -INF))
        if mixing is not None:
            mixing = mixing.expand(B, NQ, H, H)
            weights = (weights.permute(0, 2, 3, 1) @ mixing).permute(0, 3, 1, 2)
        return weights @ v

    out = attention(*low[:3], normalizer=normalizer, mixing=low[3], causal=True, impl=impl)
    assert out.dtype == dtype
    error = (out.double() - expected).abs().max()
    eager_error = (eager(*low).double() - expected).abs().max()
    assert error <= 2 * eager_error + torch.finfo(dtype).eps * expected.abs().max()


@every_impl
@every_normalizer
def test_autocast_does_not_lower_the_precision(impl, normalizer):
    q, k, v, mixing = tensors(torch.float32, (B, NQ, H, H))
    expected = attention(q, k, v, normalizer=normalizer, mixing=mixing, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v, normalizer=normalizer, mixing=mixing, impl=impl), expected)


@every_impl
def test_dropout_comes_after_the_mixing(impl):
    """With V the identity, the output is the dropped and mixed weights: each is 0 or the mixed weight / (1 - p)."""
    n = 64
    q, k = torch.randn(2, B, H, n, D)
    v = torch.eye(n).expand(B, H, n, n).contiguous()
    mixing = torch.randn(H, H)
    whole = attention(q, k, v, mixing=mixing, impl=impl)
    dropped = attention(q, k, v, mixing=mixing, dropout_p=0.25, impl=impl)
    zero = dropped == 0
    torch.testing.assert_close(dropped[~zero], whole[~zero] / 0.75)
    assert abs(zero.float().mean().item() - 0.25) < 0.01


@every_impl
def test_dropout_repeats_with_the_seed(impl):
    q, k, v, mixing = tensors(mixing_shape=(H, H))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(attention(q, k, v, mixing=mixing, dropout_p=0.5, impl=impl))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def lowest(dtype):
    return torch.full((NQ, NK), -INF, dtype=dtype).index_fill(1, torch.tensor([0, 4]), torch.finfo(dtype).min)


ADDITIVE = {
    "a number": torch.tensor(0.5),
    "keys": torch.tensor([0.0, -1.0, 2.0, -INF, 0.0, 1.0]),
    "queries": torch.randn(NQ, 1),
    "queries and keys": torch.randn(NQ, NK),
    "heads": torch.randn(H, NQ, NK),
    "sentences": torch.randn(B, 1, 1, NK),
    "all hidden": torch.full((NQ, NK), -INF),
    "some rows hidden": torch.zeros(NQ, NK).index_fill(0, torch.tensor([1]), -INF),
    "very low": torch.full((NQ, NK), -1e8),  # as fairseq's encoders hide keys
    "lowest": lowest(torch.float32),
    "float64": torch.randn(NQ, NK).double(),
    "lowest of float64": lowest(torch.float64),
    "half": torch.randn(NQ, NK).half(),
}


@every_impl
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ADDITIVE)
def test_every_additive_mask_is_the_formula(impl, mask, dtype):
    q, k, v, _ = tensors(dtype)
    v = v[..., :D].contiguous()
    bias = ADDITIVE[mask].to(torch.float32 if dtype != torch.float64 else torch.float64)  # as the scores
    expected = by_hand(q.double(), k.double(), v.double(), normalizer="softmax", attn_mask=bias.double())
    got = attention(q, k, v, attn_mask=ADDITIVE[mask], impl=impl)
    # -1e8 leaves a float32 score no more than multiples of 8
    low = mask in ("very low", "lowest")
    if low and dtype != torch.float64:
        expected = by_hand(*(t.double() for t in (0 * q, k, v)), normalizer="softmax", attn_mask=bias.double())
    tolerance = 4 * torch.finfo(dtype).eps if not low else 1e-2
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=8 * tolerance)


@every_impl
@every_mixing
@pytest.mark.parametrize("sizes", [(0, 3, 4, 6), (2, 0, 4, 6), (2, 3, 0, 6), (2, 3, 4, 0)])
def test_nothing_gives_nothing(impl, mixing_shape, sizes):
    b, h, n_queries, n_keys = sizes
    q, k, v = torch.randn(b, h, n_queries, D), torch.randn(b, h, n_keys, D), torch.randn(b, h, n_keys, DV)
    mixing = {None: None, (H, H): torch.randn(h, h), (B, NQ, H, H): torch.randn(b, n_queries, h, h)}[mixing_shape]
    out = attention(
        q,
        k,
        v.requires_grad_(),
        mixing=mixing,
        attn_mask=torch.zeros(n_queries, n_keys),
        key_padding_mask=torch.zeros(b, n_keys, dtype=torch.bool),
        impl=impl,
    )
    assert torch.equal(out, torch.zeros(b, h, n_queries, DV))
    out.sum().backward()
    assert torch.equal(v.grad, torch.zeros_like(v))


LEARNED = torch.zeros(1, 8, requires_grad=True)
PADDING = torch.zeros(1, 8, dtype=torch.bool)


@pytest.mark.parametrize(
    "arguments, chosen",
    [
        (dict(), "fused"),
        (dict(causal=True), "fused"),
        (dict(key_padding_mask=PADDING), "fused"),
        (dict(attn_mask=torch.zeros(8, 8)), "fused"),
        # on a CPU, torch would write all weights out
        (dict(dropout_p=0.1), "blockwise"),
        (dict(attn_mask=LEARNED), "blockwise"),
        (dict(value_dim=5), "blockwise"),
        (dict(causal=True, key_padding_mask=PADDING), "blockwise"),
        (dict(normalizer="sigsoftmax"), "blockwise"),
        (dict(mixing=torch.eye(2)), "blockwise"),
        (dict(mixing=torch.eye(2), n_queries=1), "reference"),
        (dict(n_queries=1), "reference"),
        (dict(mixing=torch.eye(2), head_dim=8), "reference"),
        (dict(dropout_p=0.1, head_dim=8), "reference"),
    ],
)
def test_auto_takes_the_shortest_way(monkeypatch, arguments, chosen):
    taken = []
    for place, name in (
        (api, "reference_attention"),
        (api, "blockwise_attention"),
        (api.fused, "fused_attention"),
    ):
        function = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, f=function, n=name, **k: taken.append(n) or f(*a, **k))
    arguments = dict(arguments)
    head_dim = arguments.pop("head_dim", 4)
    q = torch.randn(1, 2, arguments.pop("n_queries", 8), head_dim)
    k = torch.randn(1, 2, 8, head_dim)
    v = torch.randn(1, 2, 8, arguments.pop("value_dim", head_dim))
    attention(q, k, v, **arguments)
    assert taken == [f"{chosen}_attention"]


@pytest.mark.parametrize(
    "on_machine, for_call, chosen",
    [("", "", api.triton.triton_attention), ("none there", "", blockwise_attention), ("", "no", blockwise_attention)],
)
def test_auto_takes_the_kernels_where_they_serve(monkeypatch, on_machine, for_call, chosen):
    monkeypatch.setattr(api.triton, "machine_problem", lambda: on_machine)
    monkeypatch.setattr(api.triton, "problem", lambda *a, **k: for_call)
    q = torch.empty(1, 2, 8, 4, device="meta")  # any device but a CPU
    options = dict(normalizer="l2", mixing=None, causal=True, attn_mask=None, key_padding_mask=None, dropout_p=0.0)
    assert api._fastest(q, q, q, {**options, "relative": None, "gain": None}) is chosen
    on_cpu = torch.empty(1, 2, 8, 4)
    assert api._fastest(on_cpu, on_cpu, on_cpu, {**options, "relative": None, "gain": None}) is blockwise_attention


@every_mixing
@pytest.mark.parametrize("n_keys", [3, NK])
def test_auto_drops_the_same_with_and_without_gradients(mixing_shape, n_keys):
    """Activation checkpointing computes the output without them and again with them."""
    q, k, v, mixing = tensors(mixing_shape=mixing_shape, n_keys=n_keys)
    outputs = []
    for learning in (False, True):
        torch.manual_seed(4)
        with torch.set_grad_enabled(learning):
            outputs.append(attention(q.requires_grad_(learning), k, v, mixing=mixing, dropout_p=0.5).detach())
    assert torch.equal(*outputs)


def wrong(**changes):
    q, k, v, _ = tensors()
    return {"query": q, "key": k, "value": v, **changes}


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(normalizer="max"), ValueError, "normalizer 'max': must be one of softmax, sigsoftmax"),
        (dict(impl="fast"), ValueError, "impl 'fast': must be one of auto, reference"),
        (dict(query=torch.zeros(2, 3)), ValueError, r"query \[2, 3\]: must be"),
        (dict(query=torch.zeros(B, H, NQ, D)), TypeError, "key is torch.float64"),
        (dict(query=torch.zeros(B, H, NQ, D, dtype=torch.long)), TypeError, "query is torch.int64"),
        (dict(key=torch.zeros(B, H, NK, D + 1).double()), ValueError, "key .* does not fit query"),
        (dict(value=torch.zeros(B, H, NK + 1, D).double()), ValueError, "value .* does not fit key"),
        (
            dict(mixing=torch.zeros(H, H + 1).double()),
            ValueError,
            r"mixing \[3, 4\]: must be \[3, 3\] or \[2, 4, 3, 3\]",
        ),
        (dict(attn_mask=torch.zeros(NQ, NK, dtype=torch.bool)), TypeError, "attn_mask is torch.bool"),
        (dict(attn_mask=torch.zeros(NQ, NK + 1)), ValueError, "attn_mask .* broadcastable"),
        (dict(key_padding_mask=torch.zeros(B, NK)), TypeError, "key_padding_mask is torch.float32"),
        (dict(key_padding_mask=torch.zeros(B, NQ).bool()), ValueError, "key_padding_mask .* must be"),
        (dict(dropout_p=1.5), ValueError, "dropout_p 1.5"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        attention(**wrong(**arguments))


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if implementation_problem(name)])
def test_an_explicit_choice_that_cannot_serve_raises_with_the_reason(impl):
    with pytest.raises(RuntimeError, match=f"impl '{impl}': .*usable here: auto, reference"):
        attention(**wrong(), impl=impl)


def test_the_package_works_without_fairseq():
    program = (
        "import sys; sys.modules['fairseq'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'fairseq' else find(name, *a)\n"
        "import torch, mixhead_plugin\n"
        "from mixhead_plugin.ops import attention\n"
        "x = torch.randn(1, 2, 3, 4)\n"
        "print(tuple(attention(x, x, x, normalizer='l2').shape))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "(1, 2, 3, 4)", result.stderr


@every_impl
@pytest.mark.parametrize("shared", [True, False])
def test_a_rectangular_mixing_is_part_of_a_square_one(impl, shared):
    """Mixed heads that are cut off change nothing for the others, nor do source heads that nobody takes anything of."""
    q, k, v, mixing = tensors(mixing_shape=(H, H) if shared else (B, NQ, H, H))
    mixing[..., 1, :] = 0
    every = attention(q, k, v, mixing=mixing, causal=True, impl=impl)
    sources, mixed = [0, 2], [2, 0]
    part = attention(
        q[:, sources], k[:, sources], v[:, mixed], mixing=mixing[..., sources, :][..., mixed], causal=True, impl=impl
    )
    torch.testing.assert_close(part, every[:, mixed])


def test_a_mixing_that_does_not_fit_the_values_is_refused():
    q, k, v, mixing = tensors(mixing_shape=(H, H))
    with pytest.raises(ValueError, match=r"mixing .* must be"):
        attention(q, k, v, mixing=mixing[:, 1:])
    with pytest.raises(ValueError, match=r"value .* does not fit"):
        attention(q, k, v[:, 1:])


@every_mixing
@every_normalizer
def test_auto_takes_the_formula_for_forward_mode_derivatives(normalizer, mixing_shape):
    q, k, v, mixing = tensors(mixing_shape=mixing_shape, n_keys=9)
    tangent = torch.randn_like(q)
    results = [
        torch.func.jvp(
            lambda q, i=impl: attention(q, k, v, mixing=mixing, normalizer=normalizer, impl=i), (q,), (tangent,)
        )
        for impl in ("auto", "reference")
    ]
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    assert results[0][1].abs().max() > 0
