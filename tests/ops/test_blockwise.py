import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.ops import NORMALIZERS, attention, blockwise
from mixhead_plugin.ops.normalizers import Normalizer

INF = float("inf")
B, H, NQ, NK, D, DV = 3, 4, 11, 14, 5, 3

every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)
every_mixing = pytest.mark.parametrize("mixed", [None, "shared", "per query"])


# Small blocks, so that there are many of them: parts of the heads or queries, or several sentences at once.
@pytest.fixture(
    autouse=True, params=[(2, 2**6), (1, 2**8), (3, 2**10)], ids=lambda p: f"{p[0]} threads, blocks of {p[1]}"
)
def setting(request, monkeypatch):
    threads, scores = request.param
    monkeypatch.setattr(blockwise, "_BLOCK", {"cpu": scores})
    monkeypatch.setattr(blockwise, "_MIN_QUERIES", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield request.param
    torch.set_num_threads(before)


in_one_setting = pytest.mark.parametrize("setting", [(2, 2**6)], indirect=True)


def inputs(mixed=None, dtype=torch.float64, n_queries=NQ, n_keys=NK):
    q = torch.randn(n_queries, B, H, D, dtype=dtype).permute(1, 2, 0, 3)  # as fairseq's projections leave them
    k = torch.randn(B, H, n_keys, D, dtype=dtype)
    v = torch.randn(B, n_keys, H, DV, dtype=dtype).transpose(1, 2)
    shape = {None: None, "shared": (H, H), "per query": (B, n_queries, H, H)}[mixed]
    tensors = {"query": q, "key": k, "value": v}
    if shape is not None:
        tensors["mixing"] = torch.randn(shape, dtype=dtype)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def gradients(out, *tensors):
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weight).sum(), tensors)


def padding(*spans, n_keys=NK):
    """Visible keys of each sentence, from and to"""
    mask = torch.ones(B, n_keys, dtype=torch.bool)
    for row, (start, stop) in zip(mask, spans):
        row[start:stop] = False
    return mask


def future(n_queries, n_keys):
    return torch.full((n_queries, n_keys), -INF).triu(1 + n_keys - n_queries)


def hole():
    mask = padding((0, NK), (2, NK), (0, NK - 1))
    mask[1, 5:7] = True
    return mask


MASKS = {
    "none": lambda: {},
    "causal": lambda: {"causal": True},
    "padded at the end": lambda: {"key_padding_mask": padding((0, NK), (0, 3), (0, NK - 2))},
    "padded at the start, causal": lambda: {
        "key_padding_mask": padding((6, NK), (NK - 1, NK), (0, NK)),
        "causal": True,
    },
    "a sentence of nothing": lambda: {"key_padding_mask": padding((0, NK), (0, 0), (0, 1))},
    "padded in the middle": lambda: {"key_padding_mask": hole()},
    "causal as a tensor": lambda: {"attn_mask": future(NQ, NK)},
    "nothing visible": lambda: {"attn_mask": torch.full((NQ, NK), -INF)},
    "a window": lambda: {"attn_mask": future(NQ, NK) + future(NK, NQ).t().flip(0, 1)},
    "bias for each head": lambda: {"attn_mask": torch.randn(H, NQ, NK), "causal": True},
    "bias for each sentence": lambda: {"attn_mask": torch.randn(B, 1, NQ, NK), "key_padding_mask": hole()},
    "bias for each key": lambda: {"attn_mask": torch.randn(NK).masked_fill(torch.arange(NK) % 3 == 0, -INF)},
    "bias for each query": lambda: {"attn_mask": torch.randn(NQ, 1)},
}


@pytest.mark.parametrize("masks", MASKS)
@every_mixing
@every_normalizer
def test_values_and_gradients_are_those_of_the_reference(normalizer, mixed, masks):
    tensors = inputs(mixed)
    results = []
    for impl in ("blockwise", "reference"):
        torch.manual_seed(3)
        out = attention(**tensors, **MASKS[masks](), normalizer=normalizer, impl=impl)
        results.append([out, *gradients(out, *tensors.values())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@in_one_setting
@pytest.mark.parametrize("masks", ["padded at the start, causal", "bias for each head"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("heads", [H - 1, H + 3])
@every_normalizer
def test_fewer_or_more_mixed_heads_than_source_heads(normalizer, heads, shared, masks):
    tensors = inputs()
    tensors["value"] = torch.randn(B, heads, NK, DV, dtype=torch.float64).requires_grad_()
    tensors["mixing"] = torch.randn(*([] if shared else [B, NQ]), H, heads, dtype=torch.float64).requires_grad_()
    results = []
    for impl in ("blockwise", "reference"):
        torch.manual_seed(3)
        out = attention(**tensors, **MASKS[masks](), normalizer=normalizer, impl=impl)
        assert out.shape == (B, heads, NQ, DV)
        results.append([out, *gradients(out, *tensors.values())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("n_queries, n_keys", [(1, 9), (9, 1), (13, 13), (13, 6), (6, 13), (0, 4), (4, 0)])
@every_mixing
def test_any_number_of_queries_and_keys(mixed, n_queries, n_keys):
    tensors = inputs(mixed, n_queries=n_queries, n_keys=n_keys)
    results = []
    for impl in ("blockwise", "reference"):
        out = attention(**tensors, causal=True, impl=impl)
        results.append([out, *gradients(out, *tensors.values())])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


@every_mixing
@pytest.mark.parametrize("normalizer", ["softmax", "sigsoftmax", "l2"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@in_one_setting
def test_gradients_are_those_of_finite_differences(normalizer, mixed, dropout_p):
    tensors = inputs(mixed, n_queries=4, n_keys=5)
    bias = torch.randn(1, H, 4, 5, dtype=torch.float64).requires_grad_()

    def run(bias, *values):
        torch.manual_seed(7)  # the same dropout each time
        arguments = dict(zip(tensors, values))
        return attention(
            **arguments, attn_mask=bias, causal=True, normalizer=normalizer, dropout_p=dropout_p, impl="blockwise"
        )

    torch.autograd.gradcheck(run, [bias, *tensors.values()], fast_mode=True)


@pytest.mark.parametrize("shape", [(NQ, NK), (1, H, NQ, NK), (B, 1, 1, NK), (B, H, NQ, NK), (NQ, 1)])
def test_a_learned_bias_gets_its_gradient_even_where_it_is_zero(shape):
    tensors = inputs("shared")
    bias = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    results = []
    for impl in ("blockwise", "reference"):
        out = attention(**tensors, attn_mask=bias, causal=True, impl=impl)
        results.append(gradients(out, bias))
    assert results[1][0].count_nonzero() > 0
    torch.testing.assert_close(*results)


@every_mixing
def test_everything_repeats_bit_by_bit_with_the_seed(mixed):
    tensors = inputs(mixed, torch.float32)
    runs = []
    for _ in range(4):
        torch.manual_seed(11)
        out = attention(**tensors, causal=True, dropout_p=0.4, impl="blockwise")
        runs.append([out, *gradients(out, *tensors.values())])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@in_one_setting
def test_dropout_does_not_depend_on_the_number_of_threads():
    tensors = inputs("per query")
    outputs = []
    for n in (1, 4):
        torch.set_num_threads(n)
        torch.manual_seed(2)
        outputs.append(attention(**tensors, dropout_p=0.5, impl="blockwise"))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_has_its_probability_and_keeps_the_mean(p):
    n = 48
    q = torch.zeros(8, H, n, D)
    v = torch.eye(n).expand(8, H, n, n)
    weights = attention(q, q, v, dropout_p=p, impl="blockwise") * n * (1 - p)  # 0 or 1
    assert ((weights == 0) | ((weights - 1).abs() < 1e-5)).all()
    deviation = (p * (1 - p) / weights.numel()) ** 0.5
    assert abs(weights.mean() - (1 - p)) < 5 * deviation
    # no pattern over heads, sentences or neighbours: products of neighbours are as frequent as chance has it
    for dim in range(4):
        pairs = weights * weights.roll(1, dim)
        assert abs(pairs.mean() - (1 - p) ** 2) < 10 * deviation


@pytest.mark.parametrize("p", [1e-4, 0.9999, 0.99999])
@in_one_setting
def test_extreme_probabilities_are_met_as_well(p):
    n = 256
    q = torch.zeros(8, H, n, D)
    ones = attention(q, q, torch.ones(8, H, n, 1), dropout_p=p, impl="blockwise")  # 1 on average
    deviation = (p / (1 - p) / (8 * H * n * n)) ** 0.5
    assert abs(ones.mean() - 1) < 5 * deviation


@in_one_setting
def test_a_second_derivative_is_refused():
    tensors = inputs("shared")
    out = attention(**tensors, impl="blockwise")
    (gradient,) = torch.autograd.grad(out.square().sum(), tensors["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; impl 'reference' has"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("name", ["query", "key", "value", "mixing"])
@in_one_setting
def test_a_forward_mode_derivative_is_refused(name):
    tensors = {name: t.detach() for name, t in inputs("shared").items()}

    def run(tensor):
        return attention(**{**tensors, name: tensor}, impl="blockwise")

    with pytest.raises(NotImplementedError, match="no forward-mode derivative; impl 'reference' has"):
        torch.func.jvp(run, (tensors[name],), (torch.ones_like(tensors[name]),))


@in_one_setting
def test_the_default_device_does_not_matter():
    tensors = inputs("shared")
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(1)
        with torch.device(device):
            results.append(attention(**tensors, dropout_p=0.5, impl="blockwise"))
    assert torch.equal(*results)


def test_all_may_be_dropped():
    tensors = inputs("shared")
    out = attention(**tensors, dropout_p=1.0, impl="blockwise")
    assert (out == 0).all()
    assert all((g == 0).all() for g in gradients(out, *tensors.values()))


@every_mixing
def test_nothing_but_the_inputs_is_kept_for_the_backward_pass(mixed):
    tensors = inputs(mixed)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attention(**tensors, causal=True, dropout_p=0.1, impl="blockwise")
    known = {t.data_ptr() for t in tensors.values()}
    others = [t for t in kept if t.data_ptr() not in known]
    assert sum(t.numel() for t in others) <= 1  # the seed of the dropout


@every_mixing
def test_it_goes_through_activation_checkpointing_with_dropout(mixed):
    tensors = inputs(mixed)
    for impl in ("blockwise", "auto"):

        def run(*values, impl=impl):
            return attention(**dict(zip(tensors, values)), causal=True, dropout_p=0.3, impl=impl)

        results = []
        for function in (run, lambda *values: checkpoint(run, *values, use_reentrant=False)):
            torch.manual_seed(5)
            out = function(*tensors.values())
            results.append(gradients(out, *tensors.values()))
        torch.testing.assert_close(*results)


@every_mixing
@in_one_setting
def test_it_compiles_without_a_break(mixed):
    tensors = inputs(mixed, torch.float32)
    mask = hole()

    def run(*values):
        out = attention(**dict(zip(tensors, values)), causal=True, key_padding_mask=mask, impl="blockwise")
        return (out.transpose(1, 2).flatten(2) * 2).sin()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    outputs = [f(*tensors.values()) for f in (compiled, run)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(gradients(out, *tensors.values()) for out in outputs))


@every_mixing
@in_one_setting
def test_torch_finds_no_fault_in_the_operators(mixed):
    tensors = inputs(mixed)
    bias = torch.randn(NQ, NK, dtype=torch.float64, requires_grad=True)
    arguments = (*[tensors.get(n) for n in ("query", "key", "value", "mixing")], bias, hole())
    torch.library.opcheck(
        torch.ops.mixhead_plugin.blockwise, (*arguments, None, None, None, torch.tensor(5), "softmax", True, 0.2, 0.5)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@in_one_setting
def test_gradients_lie_in_memory_as_the_compiler_was_told(dtype):
    """As their tensors do, whose order is that of no fresh tensor here."""
    tensors = {name: t.detach().to(dtype) for name, t in inputs("shared").items()}
    mixing, bias = tensors["mixing"].t(), torch.randn(NK, NQ).t()
    relative = torch.randn(B, NQ, H, 2).transpose(1, 2).to(dtype), torch.randn(NK, H, 2).transpose(0, 1).to(dtype)
    gain = torch.randn(NQ + NK - 1, H).t()
    d_output = torch.randn(B, NQ, H, DV).transpose(1, 2).to(dtype)
    arguments = [d_output, *(tensors[n] for n in ("query", "key", "value")), mixing, bias, None, *relative, gain, None]
    arguments += ["softmax", True, 0.0, 0.5, True]
    torch.library.opcheck(torch.ops.mixhead_plugin.blockwise_backward, arguments, test_utils="test_faketensor")


def test_inference_mode_is_carried_into_the_threads():
    with torch.inference_mode():
        tensors = {name: t.detach().clone() for name, t in inputs("shared").items()}
        out = attention(**tensors, causal=True, impl="blockwise")
        torch.testing.assert_close(out, attention(**tensors, causal=True, impl="reference"))


@pytest.mark.parametrize("where", ["weights", "grad"])
@in_one_setting
def test_an_error_in_a_block_is_raised_and_nobody_waits(monkeypatch, where):
    calls = []

    def fail_at_the_third(function):
        def run(*arguments):
            calls.append(threading.get_ident())
            if len(calls) == 3:
                raise MemoryError("no room")
            return function(*arguments)

        return run

    softmax = NORMALIZERS["softmax"]
    broken: Normalizer = softmax._replace(**{where: fail_at_the_third(getattr(softmax, where))})
    monkeypatch.setattr(blockwise, "NORMALIZERS", {"softmax": broken})
    tensors = inputs("shared")
    with pytest.raises(MemoryError, match="no room"):
        attention(**tensors, impl="blockwise").sum().backward()
