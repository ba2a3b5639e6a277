import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.ops import NORMALIZERS, RelativeScores, attention, blockwise
from mixhead_plugin.ops.relative import relative_scores

INF = float("inf")
B, H, NQ, NK, D, DR = 3, 4, 11, 14, 5, 6

every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)
every_mixing = pytest.mark.parametrize("mixed", [None, "shared", "per query"])
both_lengths = pytest.mark.parametrize("all_distances", [False, True], ids=["past alone", "past and future"])


# Blocks of some heads and queries, and of several sentences.
@pytest.fixture(params=[(2, 2**6), (3, 2**10)], ids=lambda p: f"{p[0]} threads, blocks of {p[1]}")
def blocks(request, monkeypatch):
    threads, scores = request.param
    monkeypatch.setattr(blockwise, "_BLOCK", {"cpu": scores})
    monkeypatch.setattr(blockwise, "_MIN_QUERIES", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    yield
    torch.set_num_threads(before)


def inputs(mixed=None, all_distances=False, dtype=torch.float64, n_queries=NQ, n_keys=NK):
    shapes = {
        "query": (B, H, n_queries, D),
        "key": (B, H, n_keys, D),
        "value": (B, H, n_keys, D),
        "relative query": (B, H, n_queries, DR),
        "relative key": (H, n_queries + n_keys - 1 if all_distances else n_keys, DR),
    }
    if mixed:
        shapes["mixing"] = (H, H) if mixed == "shared" else (B, n_queries, H, H)
    return {name: torch.randn(shape, dtype=dtype).requires_grad_() for name, shape in shapes.items()}


def attend(tensors, **options):
    relative = RelativeScores(tensors["relative query"], tensors["relative key"])
    return attention(
        tensors["query"],
        tensors["key"],
        tensors["value"],
        mixing=tensors.get("mixing"),
        relative=relative,
        **options,
    )


def results(tensors, **options):
    out = attend(tensors, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weight).sum(), list(tensors.values()))]


@both_lengths
@pytest.mark.parametrize("n_queries, n_keys", [(NQ, NK), (NK, NQ), (1, 5), (5, 1), (4, 4)])
def test_scores_are_those_of_the_distances(n_queries, n_keys, all_distances):
    tensors = inputs(all_distances=all_distances, n_queries=n_queries, n_keys=n_keys)
    query, key = tensors["relative query"], tensors["relative key"]
    found = relative_scores(RelativeScores(query, key), n_keys)
    for t in range(n_queries):
        for k in range(n_keys):
            place = k - t + n_queries - 1
            for h in range(H):
                expected = query[:, h, t] @ key[h, place] if place < key.shape[1] else torch.zeros(B)
                torch.testing.assert_close(found[:, h, t, k], expected.to(found.dtype))


def test_they_are_added_to_the_scores_after_scaling():
    tensors = inputs(all_distances=True)
    relative = RelativeScores(tensors["relative query"], tensors["relative key"])
    scores = 0.3 * tensors["query"] @ tensors["key"].transpose(2, 3) + relative_scores(relative, NK)
    expected = torch.softmax(scores, -1) @ tensors["value"]
    for impl in ("auto", "reference", "blockwise"):
        torch.testing.assert_close(attend(tensors, scale=0.3, impl=impl), expected)


def future_of_two_heads():
    return torch.full((NQ, NK), -INF).triu(1 + NK - NQ).expand(1, H, NQ, NK) + torch.randn(1, H, 1, 1)


MASKS = {
    "causal": lambda: {"causal": True},
    "causal as a tensor": lambda: {"attn_mask": torch.full((NQ, NK), -INF).triu(1 + NK - NQ)},
    "of each head": lambda: {"attn_mask": future_of_two_heads()},
    "padded": lambda: {"causal": True, "key_padding_mask": torch.arange(NK) < torch.tensor([[0], [5], [NK]])},
}


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("masks", MASKS)
@every_mixing
@every_normalizer
def test_blocks_give_the_values_and_gradients_of_the_reference(normalizer, mixed, masks):
    tensors, masks = inputs(mixed, all_distances=masks != "causal"), MASKS[masks]()
    blocks, reference = (
        results(tensors, normalizer=normalizer, impl=impl, **masks) for impl in ("blockwise", "reference")
    )
    for got, expected in zip(blocks, reference, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("n_queries, n_keys", [(1, 9), (9, 1), (13, 6), (6, 13), (0, 4), (4, 0)])
@every_mixing
def test_any_number_of_queries_and_keys(mixed, n_queries, n_keys):
    tensors = inputs(mixed, n_queries=n_queries, n_keys=n_keys)
    blocks, reference = (results(tensors, causal=True, impl=impl) for impl in ("blockwise", "reference"))
    for got, expected in zip(blocks, reference, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("blocks")
@every_mixing
def test_gradients_are_those_of_finite_differences(mixed):
    tensors = inputs(mixed, n_queries=5, n_keys=6)
    names = list(tensors)

    def function(*values):
        # the forward pass drops the same weights each time
        torch.manual_seed(5)
        return attend(dict(zip(names, values)), causal=True, dropout_p=0.3, impl="blockwise")

    torch.autograd.gradcheck(function, tuple(tensors.values()), fast_mode=True)


@pytest.mark.usefixtures("blocks")
def test_results_do_not_depend_on_chance():
    tensors = inputs("shared", dtype=torch.float32)
    first = results(tensors, causal=True, impl="blockwise")
    for _ in range(5):
        for got, expected in zip(results(tensors, causal=True, impl="blockwise"), first, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@every_normalizer
def test_errors_are_within_twice_those_of_the_formula(normalizer, dtype):
    exact = inputs("per query")
    tensors = {name: t.detach().to(dtype).requires_grad_() for name, t in exact.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    options = {"normalizer": normalizer, "causal": True}
    truth = results(exact, impl="reference", **options)
    formula = results(tensors, impl="reference", **options)
    for got, same, true in zip(results(tensors, impl="blockwise", **options), formula, truth, strict=True):
        assert got.dtype == dtype
        allowed = 2 * (same.double() - true).abs().max() + torch.finfo(dtype).eps * true.abs().max()
        assert (got.double() - true).abs().max() <= allowed


def test_a_causal_query_needs_the_past_alone():
    tensors = inputs(all_distances=True)
    known = attend(tensors, causal=True)
    tensors["relative key"] = tensors["relative key"][:, :NK]
    torch.testing.assert_close(attend(tensors, causal=True), known)
    assert not torch.equal(attend(tensors), attend(tensors, causal=True))


def test_a_hidden_key_stays_hidden_whatever_its_distance_says():
    tensors = inputs()
    with torch.no_grad():
        tensors["relative key"].mul_(1e6)
    for impl in ("reference", "blockwise"):
        out = attend(tensors, key_padding_mask=torch.ones(B, NK, dtype=torch.bool), impl=impl)
        assert torch.equal(out, torch.zeros_like(out))


def test_with_activation_checkpointing_the_same_weights_are_dropped():
    tensors = inputs("per query")
    options = {"causal": True, "dropout_p": 0.4, "impl": "blockwise"}
    found = []
    for wrap in (False, True):
        torch.manual_seed(2)
        run = (lambda: checkpoint(attend, tensors, use_reentrant=False, **options)) if wrap else None
        out = run() if wrap else attend(tensors, **options)
        found.append([out, *torch.autograd.grad(out.square().sum(), list(tensors.values()))])
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["relative query", "relative key"])
def test_shapes_and_dtypes_that_do_not_fit_are_refused(name):
    tensors = inputs()
    with pytest.raises(TypeError, match=f"relative.{name.split()[1]} is torch.float32"):
        attend({**tensors, name: tensors[name].float()})
    for wrong in (tensors[name][..., :-1], tensors[name][:, :-1], tensors[name][:-1], tensors[name][0]):
        with pytest.raises(ValueError, match=r"relative.(query|key) .*: must be"):
            attend({**tensors, name: wrong})


def test_torch_takes_the_operator_for_sound():
    tensors = {name: t.float().detach().requires_grad_() for name, t in inputs("per query").items()}
    distances = [tensors["relative query"], tensors["relative key"], gain(dtype=torch.float32)]
    rest = [tensors["mixing"], None, None, *distances, torch.tensor(3)]
    arguments = [tensors["query"], tensors["key"], tensors["value"], *rest, "softmax", True, 0.0, 0.4]
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(torch.ops.mixhead_plugin.blockwise, arguments, test_utils=tests)


def gain(n_queries=NQ, n_keys=NK, dtype=torch.float64):
    return torch.randn(H, n_queries + n_keys - 1, dtype=dtype).requires_grad_()


def gained(tensors, gain, **options):
    """Output and gradients with a gain on the weights"""
    inputs = [tensors[name] for name in ("query", "key", "value")]
    mixing = tensors.get("mixing")
    out = attention(*inputs, mixing=mixing, gain=gain, **options)
    wanted = [*inputs, gain] if mixing is None else [*inputs, gain, mixing]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


def test_a_gain_multiplies_the_weights_of_its_distance_before_they_are_mixed():
    tensors, gains = inputs("shared"), gain()
    found = attention(
        tensors["query"], tensors["key"], tensors["value"], mixing=tensors["mixing"], gain=gains, causal=True
    )
    scores = tensors["query"] @ tensors["key"].transpose(2, 3) * D**-0.5
    weights = torch.softmax(scores + torch.full((NQ, NK), -INF).triu(1 + NK - NQ), -1)
    factors = torch.tensor([[[g[k - t + NQ - 1] for k in range(NK)] for t in range(NQ)] for g in gains.detach()])
    mixed = torch.einsum("ji,bjtk->bitk", tensors["mixing"], weights * factors)
    torch.testing.assert_close(found, mixed @ tensors["value"])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("masks", MASKS)
@every_mixing
@every_normalizer
def test_blocks_give_the_reference_s_values_and_gradients_with_a_gain(normalizer, mixed, masks):
    tensors, gains, masks = inputs(mixed), gain(), MASKS[masks]()
    blocks, reference = (
        gained(tensors, gains, normalizer=normalizer, impl=impl, **masks) for impl in ("blockwise", "reference")
    )
    for got, expected in zip(blocks, reference, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("blocks")
@every_mixing
def test_gain_and_relative_scores_together(mixed):
    tensors, gains = inputs(mixed), gain()
    relative = RelativeScores(tensors["relative query"], tensors["relative key"])
    found = []
    for impl in ("blockwise", "reference"):
        found.append(gained(tensors, gains, causal=True, relative=relative, impl=impl))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("blocks")
@every_mixing
def test_gradients_with_a_gain_are_those_of_finite_differences(mixed):
    tensors, gains = inputs(mixed, n_queries=5, n_keys=6), gain(5, 6)
    mixing = (tensors["mixing"],) if mixed else ()

    def function(query, key, value, gains, *mixing):
        torch.manual_seed(5)
        mixing = mixing[0] if mixing else None
        options = {"causal": True, "dropout_p": 0.3, "impl": "blockwise"}
        return attention(query, key, value, gain=gains, mixing=mixing, **options)

    given = (tensors["query"], tensors["key"], tensors["value"], gains, *mixing)
    torch.autograd.gradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("wrong", [lambda g: g[:-1], lambda g: g[:, 1:], lambda g: g[None]])
def test_gains_that_do_not_fit_are_refused(wrong):
    tensors = inputs()
    with pytest.raises(ValueError, match=r"gain .*: must be"):
        gained(tensors, wrong(gain()))
    with pytest.raises(TypeError, match=r"gain is torch.int64"):
        gained(tensors, gain().detach().long())
