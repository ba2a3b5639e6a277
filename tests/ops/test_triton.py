"""Test the fused kernels: interpreted on a CPU, compiled on a GPU."""

import importlib.util
import itertools
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.ops import NORMALIZERS, attention, triton
from mixhead_plugin.ops.inputs import AttentionInputs
from tests.covering import covering, each_once

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before TRITON_INTERPRET was set, so nothing here can be interpreted")
    os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime.errors import OutOfResources  # noqa: E402

from mixhead_plugin.ops.triton import operators, tuning  # noqa: E402
from mixhead_plugin.ops.triton.tuning import Tile  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)  # other tests start processes

INF = float("inf")
B, H, NQ, NK, D, DV = 2, 3, 19, 37, 12, 20
DEVICE = "cuda" if ON_GPU else "cpu"
MIXED = ["shared", "per query"]
MIXINGS = [None, *MIXED]


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def over(axis, *chosen, values):
    """Parametrize over values; all but the chosen ones are slow."""
    unpack = "," in axis
    cases = [value if value in chosen else slow(*value) if unpack else slow(value) for value in values]
    return pytest.mark.parametrize(axis, cases)


every_mixing = pytest.mark.parametrize("mixed", MIXINGS)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Interpret the kernels; mend bfloat16, which the interpreter multiplies as integers and truncates."""
    if ON_GPU:
        return
    import numpy as np
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self, source, to):
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda s, a, b, *rest: dot(s, widened(a), widened(b), *rest))
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded)
    monkeypatch.setattr(triton, "INTERPRETED_DTYPES", triton.DTYPES)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(monkeypatch):
    def poisoned(function):
        def make(*arguments, **options):
            made = function(*arguments, **options)
            return made.fill_(float("nan")) if made.is_floating_point() and made.device.type != "meta" else made

        return make

    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(place, name, poisoned(getattr(place, name)))


@pytest.fixture
def as_they_are():
    """Keep the tiles of tuning.py."""


@pytest.fixture(autouse=True)
def tiles(monkeypatch, request):
    """Set fewer and larger tiles than in tuning.py, because the interpreter takes its time by operation."""
    monkeypatch.setattr(tuning, "_chosen", {})

    def use(flash, mixed):
        monkeypatch.setattr(tuning, "_chosen", {})
        monkeypatch.setattr(tuning, "tiles_for", lambda kernel, *size: [flash if "flash" in kernel else mixed])

    if not ON_GPU and "as_they_are" not in request.fixturenames:
        use(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1, HC=4, HG=4))
    return use


def inputs(mixed=None, dtype=torch.float32, batch=B, heads=H, n_queries=NQ, n_keys=NK, head_dim=D, value_dim=DV):
    q = torch.randn(n_queries, batch, heads, head_dim).permute(1, 2, 0, 3)  # as fairseq's projections leave them
    k = torch.randn(batch, heads, head_dim, n_keys).transpose(2, 3)
    v = torch.randn(batch, n_keys, heads, value_dim).transpose(1, 2)
    tensors = {"query": q, "key": k, "value": v}
    if mixed == "shared":
        tensors["mixing"] = torch.eye(heads) + torch.randn(heads, heads) / heads
    elif mixed is not None:
        tensors["mixing"] = torch.eye(heads) + torch.randn(n_queries, batch, heads, heads).transpose(0, 1) / heads
    return {name: tensor.to(DEVICE, dtype).requires_grad_() for name, tensor in tensors.items()}


def record(tensors, **options):
    plain = {"normalizer": "softmax", "causal": False, "dropout_p": 0.0, "scale": 0.5}
    return AttentionInputs(**dict.fromkeys(AttentionInputs._fields) | tensors | plain | options)


def padding(n_keys=NK, batch=B):
    mask = torch.zeros(batch, n_keys, dtype=torch.bool, device=DEVICE)
    mask[0, n_keys // 2 :] = True
    mask[-1, 0] = mask[-1, n_keys // 3] = True
    return mask


def nothing(n_keys=NK):
    return padding(n_keys) | torch.tensor([[True], [False]], device=DEVICE)


def future(n_queries=NQ, n_keys=NK):
    return torch.full((n_queries, n_keys), -INF, device=DEVICE).triu(1 + n_keys - n_queries)


def holes(*shape):
    bias = torch.randn(shape, device=DEVICE)
    bias[..., 3] = -INF
    bias[..., 2, :] = -INF  # a query that sees nothing
    return bias


def extreme():
    """Return low and high scores: a low one is not a hidden key, and a large one does not overflow."""
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
    "expanded bias": lambda: {"attn_mask": holes(NQ, NK).expand(B, H, NQ, NK), "key_padding_mask": nothing()},
}
MORE_MASKS = {
    "none": lambda: {},
    "one bias": lambda: {"attn_mask": holes(NQ, NK).double()},
    "bias for each sentence": lambda: {"attn_mask": holes(B, 1, NQ, NK).bfloat16()},
    "bias for each key": lambda: {"attn_mask": torch.randn(B, 1, 1, NK, device=DEVICE).expand(B, H, NQ, NK)},
    "extreme": lambda: {"attn_mask": extreme()},
}


def eager(query, key, value, mixing=None, *, normalizer, causal=False, attn_mask=None, key_padding_mask=None):
    """Compute the formula as one would write it, in the dtype of its inputs."""
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    hidden = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    if attn_mask is not None:
        hidden |= attn_mask == -INF
        scores = scores + attn_mask.to(scores.dtype).masked_fill(attn_mask == -INF, 0)
    if causal:
        hidden |= future(*scores.shape[2:]) == -INF
    if key_padding_mask is not None:
        hidden |= key_padding_mask[:, None, None]
    weights = NORMALIZERS[normalizer].weights(scores.masked_fill(hidden, -INF))
    if mixing is not None:
        batch, heads, n_queries, _ = scores.shape
        mixing = mixing.expand(batch, n_queries, heads, heads)
        weights = (weights.permute(0, 2, 3, 1) @ mixing.to(weights.dtype)).permute(0, 3, 1, 2)
    return weights @ value


def with_gradients(function, tensors, **options):
    out = function(**tensors, **options)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(tensors.values()), d_out)]


def fused(**arguments):
    return attention(**arguments, impl="triton")


def in_float64(tensors):
    return {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}


def must_be_right(tensors, **options):
    exact = with_gradients(attention, in_float64(tensors), **options, impl="reference")
    must_agree(tensors, with_gradients(fused, tensors, **options), with_gradients(eager, tensors, **options), exact)


def must_agree(names, got, by_formula, exact):
    """Allow twice the error of the formula in the same dtype, and the rounding of sums in float32."""
    largest = max(right.abs().max() for right in exact)
    for name, value, formula, right in zip(["output", *names], got, by_formula, exact, strict=True):
        # the only key of a row has no gradient: what is left of one is rounding
        size = right.abs().max() if right.any() else largest
        allowed = 2 * (formula - right).abs().max() + 4 * torch.finfo(torch.float32).eps * size
        error = (value - right).abs().max()
        assert error <= allowed, f"{name} is wrong by {error:.2g}, {allowed:.2g} is allowed"


# Both families of kernels, with and without mixing, behind every mask, and with every normalizer in turn.
FAMILIES = [(m, f, n) for (m, f), n in zip(itertools.product(MASKS, [None, "per query"]), 3 * triton.NORMALIZERS)]


@over("masks, mixed, normalizer", *FAMILIES, values=itertools.product(MASKS, MIXINGS, triton.NORMALIZERS))
def test_values_and_gradients_are_those_of_the_formula(masks, mixed, normalizer):
    must_be_right(inputs(mixed), normalizer=normalizer, **MASKS[masks]())


MORE = [
    ("none", "sigsoftmax", None),
    ("one bias", "softmax", "per query"),
    ("bias for each sentence", "l2", None),
    ("bias for each key", "sigsoftmax", "shared"),
    ("extreme", "softmax", None),
    ("extreme", "sigsoftmax", "per query"),
]


@over("masks, normalizer, mixed", *MORE, values=itertools.product(MORE_MASKS, triton.NORMALIZERS, MIXINGS))
def test_more_masks(masks, normalizer, mixed):
    must_be_right(inputs(mixed, batch=B if "each" in masks else 1), normalizer=normalizer, **MORE_MASKS[masks]())


@covering(normalizer=triton.NORMALIZERS, dtype=[torch.float16, torch.bfloat16], mixed=MIXINGS)
def test_lower_precision_is_at_most_twice_as_wrong_as_the_formula(normalizer, mixed, dtype):
    must_be_right(inputs(mixed, dtype, 1, 3, 9, 17), normalizer=normalizer, causal=True)


SIZES = [(33, 17, 3, 8), (9, 1, 3, 8), (1, 9, 3, 8), (65, 64, 2, 8), (17, 18, 1, 8), (17, 18, 5, 64), (17, 18, 16, 8)]


@pytest.mark.usefixtures("as_they_are")
@over("n_queries, n_keys, heads, head_dim", SIZES[0], values=[*SIZES, (17, 18, 64, 8)])
@over("mixed", "shared", values=MIXINGS)
def test_any_size(mixed, n_queries, n_keys, heads, head_dim):
    tensors = inputs(mixed, torch.float32, 1, heads, n_queries, n_keys, head_dim, head_dim)
    must_be_right(tensors, normalizer="sigsoftmax", causal=True)


def candidates():
    """Yield dtype, heads, head size, mixing and place of every entry of the tables in tuning.py."""
    for dtype, itemsize in ((torch.bfloat16, 2), (torch.float32, 4)):
        mixed = [table[itemsize] for table in tuning._MIXED.values()]
        for heads, head_dim in dict.fromkeys(sizes for table in mixed for sizes in table):
            for at in range(max(len(table.get((heads, head_dim), ())) for table in mixed)):
                yield dtype, heads, head_dim, MIXED[at % 2], at
                if at == 0:
                    yield dtype, heads, head_dim, MIXED[1], at
        flash = [table[itemsize] for table in tuning._FLASH.values()]
        for head_dim in dict.fromkeys(size for table in flash for size in table):
            for at in range(max(len(table[head_dim]) for table in flash)):
                yield dtype, 2, head_dim, None, at


@pytest.mark.usefixtures("as_they_are")
@over("dtype, heads, head_dim, mixed, at", (torch.bfloat16, 8, 64, "per query", 0), values=list(candidates()))
def test_every_tile_of_the_tables(monkeypatch, dtype, heads, head_dim, mixed, at):
    """Run the tiles that a GPU would try, one case each; `at` 0 is the first."""
    table = tuning.tiles_for
    monkeypatch.setattr(tuning, "tiles_for", lambda *shape: table(*shape)[at:] or table(*shape)[-1:])
    # more queries and keys than a tile has, unless it has many
    n_queries, n_keys = (131, 133) if mixed is None else (35, 37) if heads <= 8 else (17, 18)
    tensors = inputs(mixed, dtype, 1, heads, n_queries, n_keys, head_dim, head_dim)
    must_be_right(tensors, normalizer="softmax", causal=True)


# All heads in one program, some at a time, or a group of them in each program.
SPLITS = [(16, 16, 4, 1, 2, 8), (16, 16, 4, 1, 8, 2), (16, 32, 4, 1, 4, 2), (32, 16, 4, 1, 8, 8), (16, 16, 4, 2, 8, 8)]


@over("split", SPLITS[2], values=SPLITS)
@over("mixed", "per query", values=MIXED)
def test_any_tile(tiles, split, mixed):
    tiles(Tile(16, 32, 4, 1), Tile(*split))
    tensors = inputs(mixed, batch=1, heads=5, n_queries=9, n_keys=18)
    must_be_right(tensors, normalizer="softmax", attn_mask=holes(1, 5, 9, 18), causal=True)


@pytest.mark.usefixtures("as_they_are")
@pytest.mark.parametrize("itemsize", [2, 4])
def test_there_is_a_tile_for_every_shape(itemsize):
    for head_dim in (16, 32, 64, 128, 256):
        for name in tuning._FLASH:
            assert tuning.tiles_for(name, 1, head_dim, itemsize)
        for name in tuning._MIXED:
            for heads in range(1, 65):
                for tile in tuning.tiles_for(name, heads, head_dim, itemsize):
                    assert min(tile.BM, tile.BN) >= 16 and 16 % min(tile.HC, 16) == 0


@pytest.mark.usefixtures("as_they_are")
def test_on_a_small_device_a_tile_shrinks_until_it_fits():
    def launch(tile):
        if tile.BM * tile.BN * tile.HC * tile.stages > 16 * 16 * 4:
            raise OutOfResources(2, 1, "shared memory")

    tiles = tuning.tiles_for("mixed_bwd_dkv_kernel", 8, 64, 2)
    assert tuning._fastest(tiles, launch) == Tile(16, 16, 8, 1, HC=4, HG=4)
    with pytest.raises(OutOfResources):
        tuning._fastest([Tile(16, 16, 8, 1)], lambda tile: launch(tile._replace(HC=8)))


@pytest.mark.parametrize("how", ["timed", "while a graph is captured", "under deterministic algorithms"])
def test_the_choice_of_a_tile(monkeypatch, how):
    tiles, timed, room = [Tile(n, 16, 8, 1) for n in (64, 32, 16)], [], 64
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: how == "while a graph is captured")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: how == "under deterministic algorithms")
    # the second is the fastest
    monkeypatch.setattr(tuning, "_milliseconds", lambda function: timed.append(function()) or abs(timed[-1].BM - 32))

    def launch(tile):
        if room < tile.BM:
            raise OutOfResources(tile.BM, room, "shared memory")
        return tile

    def chosen():
        return tuning.run("key", tiles, launch, torch.device("cuda", 0)).BM

    assert chosen() == (32 if how == "timed" else 64)
    assert len(timed) == (3 if how == "timed" else 0)
    assert chosen() == (32 if how == "timed" else 64) and len(timed) in (0, 3)
    room = 16  # another call, to which the kept tile is too large
    assert chosen() == 16 and chosen() == 16
    room = 8
    with pytest.raises(OutOfResources):
        chosen()


@pytest.mark.parametrize("dtype, of_mixing", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("mixed", ["shared", slow("per query")])
def test_mixing_may_have_another_dtype(dtype, of_mixing, mixed):
    """Under autocast queries are in half precision, but the mixing matrix is float32."""
    tensors = inputs(mixed, dtype, 1, 3, 9, 17)
    tensors["mixing"] = tensors["mixing"].detach().to(of_mixing).requires_grad_()
    must_be_right(tensors, normalizer="softmax", causal=True)


@every_mixing
def test_nan_stays_where_it_is(mixed):
    tensors = {name: tensor.detach() for name, tensor in inputs(mixed, n_queries=7, n_keys=6).items()}
    tensors["query"][1, 2, 5, 0] = float("nan")
    out = fused(**tensors)
    spoilt = torch.zeros_like(out, dtype=torch.bool)
    spoilt[1, 2 if mixed is None else slice(None), 5] = True
    assert torch.equal(out.isnan(), spoilt)


@each_once(sizes=[(0, 3, 4, 6), (2, 0, 4, 6), (2, 3, 0, 6), (2, 3, 4, 0)], mixed=MIXINGS)
def test_nothing_gives_nothing(sizes, mixed):
    batch, heads, n_queries, n_keys = sizes
    tensors = {
        name: torch.randn(batch, heads, n, 8, device=DEVICE, requires_grad=True)
        for name, n in (("query", n_queries), ("key", n_keys), ("value", n_keys))
    }
    if mixed:
        shape = (heads, heads) if mixed == "shared" else (batch, n_queries, heads, heads)
        tensors["mixing"] = torch.randn(shape, device=DEVICE, requires_grad=True)
    for tensor in with_gradients(fused, tensors):
        assert (tensor == 0).all()


def dropped(tensors, p, columns=slice(None), **options):
    """Return which weights dropout keeps: with V the identity, the output is the weights."""
    batch, heads, n_keys, _ = tensors["key"].shape
    identity = torch.eye(n_keys, device=DEVICE)[:, columns].expand(batch, heads, -1, -1).to(tensors["query"].dtype)
    torch.manual_seed(5)
    return fused(**{**tensors, "value": identity}, dropout_p=p, **options) != 0


@pytest.mark.parametrize("normalizer, mixed", [("l2", None), slow("sigsoftmax", "shared"), ("softmax", "per query")])
def test_dropout_is_the_same_forward_and_backward(normalizer, mixed):
    tensors, p = inputs(mixed, batch=1), 0.4
    kept = dropped(tensors, p, normalizer=normalizer)

    def formula(query, key, value, mixing=None):
        n_keys = key.shape[2]
        identity = torch.eye(n_keys, dtype=query.dtype, device=DEVICE).expand(*key.shape[:2], n_keys, n_keys)
        weights = attention(query, key, identity, mixing=mixing, normalizer=normalizer, impl="reference")
        return (weights * kept / (1 - p)) @ value

    exact = with_gradients(formula, in_float64(tensors))
    torch.manual_seed(5)
    got = with_gradients(fused, tensors, normalizer=normalizer, dropout_p=p)
    must_agree(tensors, got, with_gradients(formula, tensors), exact)


@pytest.mark.parametrize("p", [slow(1e-3), 0.1, slow(0.5)])
def test_dropout_has_its_probability_and_no_pattern(p):
    q = torch.zeros(3, 3, 64, 8, device=DEVICE)
    kept = dropped({"query": q, "key": q}, p).float()
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * deviation
    for dim in range(4):
        for distance in (1, 2, 4)[: 3 if dim > 1 else 2]:  # four draws share a counter
            pairs = kept * kept.roll(distance, dim)
            assert abs(pairs.mean() - (1 - p) ** 2) < 10 * deviation


def test_dropout_is_the_same_in_every_tile(tiles):
    tensors = {
        name: tensor.detach() for name, tensor in inputs("shared", batch=1, heads=3, n_queries=17, n_keys=18).items()
    }
    found = [dropped({name: tensors[name] for name in ("query", "key")}, 0.5)]
    for split in SPLITS[1:4]:
        tiles(Tile(32, 32, 4, 1), Tile(*split))
        found.append(dropped(tensors, 0.5))
    assert all(torch.equal(kept, found[0]) for kept in found)


@pytest.mark.parametrize("mixed", [slow(None), slow("shared"), "per query"])
def test_dropout_repeats_with_the_seed_and_under_activation_checkpointing(mixed):
    tensors = inputs(mixed, batch=1, heads=2, n_queries=5, n_keys=6)
    names = list(tensors)

    def run(*values):
        return fused(**dict(zip(names, values)), causal=True, dropout_p=0.3)

    runs = []
    for seed, function in ((5, run), (5, lambda *values: checkpoint(run, *values, use_reentrant=False)), (6, run)):
        torch.manual_seed(seed)
        runs.append(with_gradients(lambda f=function, **t: f(*t.values()), tensors))
    assert all(torch.equal(a, b) for a, b in zip(*runs[:2]))
    assert not torch.equal(runs[0][0], runs[2][0])


def test_all_may_be_dropped():
    for tensor in with_gradients(fused, inputs("shared", batch=1, n_queries=5, n_keys=6), dropout_p=1.0):
        assert (tensor == 0).all()


def test_the_host_reads_no_tensor(monkeypatch):
    """The host would wait for the device, and a captured CUDA graph would keep what it read."""

    def refuse(tensor):
        raise AssertionError("the host read a number")

    tensors = {name: tensor.detach() for name, tensor in inputs("shared", n_queries=5, n_keys=6).items()}
    seed, bias, d_out = torch.tensor(7, device=DEVICE), holes(5, 6), torch.randn(B, H, 5, DV, device=DEVICE)
    options = dict(attn_mask=bias, key_padding_mask=padding(6), seed=seed, dropout_p=0.3)
    for name in ("__int__", "__index__", "__float__", "__bool__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    call = operators.Call(record(tensors, **options))
    out, rows = call.forward()
    call.backward(d_out, rows, out)


@pytest.mark.gpu
@every_mixing
def test_a_captured_graph_draws_new_zeros_at_each_replay(mixed):
    tensors = inputs(mixed, torch.bfloat16, n_queries=64, n_keys=64)

    def run():
        out = fused(**tensors, causal=True, dropout_p=0.5)
        return [out.detach(), *torch.autograd.grad(out, list(tensors.values()), torch.ones_like(out))]

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


@over("mixed", "per query", values=MIXINGS)
@over("backend", "aot_eager", values=["aot_eager", "inductor"])
def test_it_compiles_without_a_break(mixed, backend):
    tensors = inputs(mixed, batch=1, heads=2, n_queries=5, n_keys=6)
    names, mask = list(tensors), padding(6, 1)

    def run(*values):
        out = fused(**dict(zip(names, values)), causal=True, key_padding_mask=mask)
        return (out.transpose(1, 2).flatten(2) * 2).sin()

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    torch.testing.assert_close(*[with_gradients(lambda f=f, **t: f(*t.values()), tensors) for f in (compiled, run)])


@over("mixed", None, values=MIXINGS)
def test_torch_finds_no_fault_in_the_operators(mixed):
    tensors = inputs(mixed, batch=1, heads=2, n_queries=4, n_keys=5)
    masks = dict(attn_mask=holes(4, 5), key_padding_mask=padding(5, 1), causal=True)
    options = dict(masks, seed=torch.tensor(5, device=DEVICE), normalizer="sigsoftmax", dropout_p=0.2)
    torch.library.opcheck(torch.ops.mixhead_plugin.triton, record(tensors, **options))
    call = record({name: tensor.detach() for name, tensor in tensors.items()}, **options)
    out, rows = torch.ops.mixhead_plugin.triton(*call)
    given = (torch.randn_like(out), rows, out if mixed is None else None, *call)
    torch.library.opcheck(torch.ops.mixhead_plugin.triton_backward, given)


def test_a_second_derivative_and_a_forward_mode_one_are_refused():
    tensors = inputs("shared", n_queries=4, n_keys=5)
    (gradient,) = torch.autograd.grad(fused(**tensors).square().sum(), tensors["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; impl 'reference' has"):
        gradient.square().sum().backward()
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    query = tensors.pop("query")
    with pytest.raises(NotImplementedError, match="no forward-mode derivative; impl 'reference' has"):
        torch.func.jvp(lambda q: fused(query=q, **tensors), (query,), (query,))


REFUSED = {
    "has no kernel for torch.float64": dict(dtype=torch.float64),
    "has no kernel for head size 257, only up to 256": dict(head_dim=257),
    "has no kernel for head size 300, only up to 256": dict(value_dim=300),
    "mixes at most 64 heads, not 65": dict(heads=65, mixed="shared"),
    "mixes 3 heads into as many, not into 2": dict(mixed="shared", rectangular=True),
    "has no kernel for a gain by distance": dict(gain=torch.ones(H, NQ + NK - 1, device=DEVICE)),
    "has no kernel for normalizer 'relu2', only for softmax, sigsoftmax, l2": dict(normalizer="relu2"),
    "gives a learned attn_mask no gradient": dict(attn_mask=torch.zeros(NQ, NK, device=DEVICE, requires_grad=True)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_do_is_refused_with_the_reason(reason):
    changes = dict(REFUSED[reason])
    options = {name: changes.pop(name) for name in ("normalizer", "attn_mask", "gain") if name in changes}
    rectangular = changes.pop("rectangular", False)
    tensors = inputs(**changes)
    if rectangular:
        tensors.update(value=tensors["value"][:, :2], mixing=tensors["mixing"][:, :2])
    with pytest.raises(RuntimeError, match=f"impl 'triton': {reason}; usable here: auto, reference, blockwise"):
        fused(**tensors, **options)


def test_more_heads_than_can_be_mixed_are_served_apart():
    tensors = inputs(heads=65, n_queries=2, n_keys=2, head_dim=1, value_dim=1)
    call = record(tensors, normalizer="l2", dropout_p=0.1)
    assert triton.problem(call) == ""
    assert triton.problem(call._replace(relative_query=object())) == "has no kernel for relative positions"


@pytest.mark.skipif(ON_GPU, reason="needs the interpreter")
def test_bfloat16_is_refused_where_it_would_be_interpreted(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tensors = inputs(dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"impl 'triton': computes torch.bfloat16 wrongly under TRITON_INTERPRET=1"):
        fused(**tensors)
    assert attention(**tensors).isfinite().all()  # `auto` takes another


@pytest.mark.parametrize("version, old", [("3.5.1", True), ("2.10.0", True), ("3.6.0", False), ("3.10.0+git1", False)])
def test_an_old_triton_is_refused_in_words(monkeypatch, version, old):
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert triton._package_problem() == (f"needs triton 3.6 or newer, {version} is installed" if old else "")


@pytest.mark.parametrize(
    "capability, hip, problem",
    [
        ((7, 5), None, "needs a GPU of compute capability 8.0, the current one has 7.5"),
        ((9, 4), "6.4", "needs an NVIDIA GPU, this torch is built for AMD's (ROCm 6.4)"),
        ((12, 0), None, ""),
        (None, None, "needs a CUDA device and none is visible"),
    ],
)
def test_another_gpu_or_none_is_refused_before_there_are_tensors(monkeypatch, capability, hip, problem):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.version, "hip", hip)
    device = SimpleNamespace(**dict(zip(("major", "minor"), capability or ())))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert triton.machine_problem() == problem
    if capability == (7, 5):
        assert triton._device_problem("cuda", 1) == problem.replace("the current one", "cuda:1")


@pytest.mark.parametrize("name", ["causal", "holes", "window"])
def test_the_spans_of_a_mask_are_those_of_its_numbers(name):
    n_queries, n_keys = 18, 260  # more than a tile of 16 x 256
    causal = future(n_queries, n_keys)
    mask = {"causal": causal, "holes": holes(n_queries, n_keys), "window": causal + causal.flip(0, 1)}[name]
    for turned in (mask, mask.t()):
        expected = []
        for row in turned:
            for chosen in (row != -INF, row != 0):
                where = chosen.nonzero().flatten().tolist()
                expected += [where[0], where[-1] + 1] if where else [len(row), 0]
        assert operators.spans_of(turned[None, None]).flatten().tolist() == expected


def test_a_causal_mask_of_floats_is_read_only_at_the_diagonal(monkeypatch, tiles):
    """The mask has NaN where it must not be read, and the spans of the mask without NaN."""
    tiles(Tile(32, 32, 4, 1), None)
    n, spans_of = 64, operators.spans_of
    spoilt, at = future(n, n), torch.arange(n, device=DEVICE) // 32
    spoilt[at[:, None] != at] = float("nan")
    by_query, by_key = spans_of(future(n, n)[None, None]), spans_of(future(n, n).t()[None, None])
    monkeypatch.setattr(operators, "spans_of", lambda mask: by_query if mask.stride(3) == 1 else by_key)
    for tensor in with_gradients(fused, inputs(batch=1, n_queries=n, n_keys=n), attn_mask=spoilt):
        assert not tensor.isnan().any()


@pytest.mark.parametrize("causal", [False, slow(True)])
def test_where_a_mask_is_zero_it_need_not_be_read(causal):
    """The mask leaves some tiles as they are, changes some, and hides some."""
    bias = torch.zeros(70, 100, device=DEVICE)
    bias[40:50, 60:70] = torch.randn(10, 10, device=DEVICE)
    bias[:35, 90:] = bias[66] = -INF
    must_be_right(
        inputs(batch=1, heads=1, n_queries=70, n_keys=100), normalizer="softmax", attn_mask=bias, causal=causal
    )


def test_an_expanded_mask_is_taken_for_what_it_was():
    call = operators.Call(record(inputs("shared"), attn_mask=future().expand(B, H, NQ, NK)))
    assert call.attn_mask.shape == (1, 1, NQ, NK) and not call.constants.MASK_HEADS
    assert torch.equal(call.masks.spans, operators.spans_of(future()[None, None]))


FAR = 2**31 + 2**12  # numbers, from one position (head, ...) to the next


def far_apart(tensors, dims, folder):
    """Copy each tensor to shared memory with more than 2^31 numbers between neighbours in one dimension."""
    far, at = {}, 0
    for name, tensor in tensors.items():
        shape, strides, size = tensor.shape, [0] * tensor.dim(), 1
        for dim in reversed(range(tensor.dim())):
            if dim == dims[name]:
                strides[dim] = FAR
            else:
                strides[dim], size = size, size * shape[dim]
        far[name] = (shape, strides, at)
        at += size
    assert at < FAR
    numbers = at + FAR * max(tensors[name].shape[dim] - 1 for name, dim in dims.items())
    if not ON_GPU:  # a file takes no more room than what is written
        storage = torch.from_file(str(folder / "memory"), shared=True, size=numbers, dtype=torch.float16)
    elif torch.cuda.mem_get_info()[0] < 2 * numbers + 2**30:
        pytest.skip(f"needs {2 * numbers / 1e9:.0f} GB of free memory")
    else:
        storage = torch.full((numbers,), float("nan"), dtype=torch.float16, device=DEVICE)
    return {name: storage.as_strided(*place).copy_(tensors[name]) for name, place in far.items()}


DIMS = ["batch", "heads", "positions", "size"]


@over("dim, mixed", ("batch", None), ("positions", "per query"), values=itertools.product(DIMS, [None, "per query"]))
def test_what_is_beyond_32_bits_is_found(dim, mixed, tmp_path):
    tensors = inputs(mixed, torch.float16, 2, 3, 3, 3, 3, 3)
    near = {name: tensor.detach() for name, tensor in tensors.items()}
    near["attn_mask"] = torch.randn(2, 3, 3, 3, device=DEVICE).half()
    near["d_out"] = torch.randn(2, 3, 3, 3, device=DEVICE).half()
    dims = {name: DIMS.index(dim) for name in near}
    if mixed:
        dims["mixing"] = ["batch", "positions", "heads", "size"].index(dim)  # of [B, Nq, H, H]
    far = far_apart(near, dims, tmp_path)
    for name, tensor in far.items():
        assert tensor.stride(dims[name]) > 2**31 and torch.equal(tensor, near[name])
    results = []
    for given in (near, far):
        given = {**given, **{name: given[name].requires_grad_() for name in tensors}}
        d_out = given.pop("d_out")
        out = fused(**given, causal=True)
        results.append([out, *torch.autograd.grad(out, [given[name] for name in tensors], d_out)])
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected)


# A case compiles a dozen kernels. Where nothing else is said: 8 heads of 64, causal, in bfloat16.
FULL_SIZE = {
    **{f"1024 {name}": dict(length=1024, normalizer=name) for name in triton.NORMALIZERS},
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
    "more keys": dict(length=300, n_keys=1000, normalizer="l2"),
    "more queries": dict(length=1000, n_keys=300),
    "more keys, float32": dict(length=129, n_keys=517, head_dim=33, value_dim=65, dtype=torch.float32),
}


def full_size(mixed, length, heads=8, head_dim=64, dtype=torch.bfloat16, n_keys=None, value_dim=None, **more):
    shape = dict(heads=heads, n_queries=length, n_keys=n_keys or length, head_dim=head_dim)
    return inputs(mixed, dtype, **shape, value_dim=value_dim or head_dim, **more)


@pytest.mark.gpu
@each_once(case=FULL_SIZE, mixed=MIXINGS)
def test_full_size(monkeypatch, case, mixed):
    case = dict(FULL_SIZE[case])
    options = dict(normalizer=case.pop("normalizer", "softmax"), causal=True)
    tf32 = case.pop("tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    assert operators._allows_tf32() == tf32
    tensors = full_size(mixed, **case)
    must_be_right(tensors, **options, key_padding_mask=padding(tensors["key"].shape[2]))


def must_be_right_in(sentences, tensors, **options):
    """Check some sentences as `must_be_right` does, one at a time, because all weights in float64 take much memory.

    The other outputs get no gradient, so their inputs get 0. What is shared gets the sum over the sentences.
    """
    formulas, exacts = [], []
    for b in sentences:
        one = {name: t.detach()[b : b + 1] if t.dim() == 4 else t.detach() for name, t in tensors.items()}
        one = {name: t.requires_grad_() for name, t in one.items()}
        formulas.append(with_gradients(eager, one, **options))
        exacts.append(with_gradients(attention, in_float64(one), **options, impl="reference"))
    out = fused(**tensors, **options)
    d_out = torch.zeros_like(out)
    of_one = torch.randn(out[:1].shape, generator=torch.Generator().manual_seed(1))  # as `with_gradients` draws it
    d_out[sentences] = of_one.to(out.device, out.dtype)
    got = [out.detach(), *torch.autograd.grad(out, list(tensors.values()), d_out)]
    others = [b for b in range(len(out)) if b not in sentences]
    by_sentence = [tensor.dim() == 4 for tensor in got]
    assert not any(tensor[others].any() for tensor, is_ in zip(got[1:], by_sentence[1:]) if is_)
    together = [
        [torch.cat(parts) if is_ else sum(parts) for is_, parts in zip(by_sentence, zip(*found))]
        for found in (formulas, exacts)
    ]
    must_agree(tensors, [t[sentences] if is_ else t for is_, t in zip(by_sentence, got)], *together)


@pytest.mark.gpu
@covering(head_dim=[64, 128], normalizer=triton.NORMALIZERS, mixed=MIXINGS)
def test_a_batch_of_long_sentences(head_dim, normalizer, mixed):
    """Check the largest size that is timed; in the last sentence an address could overflow."""
    tensors = full_size(mixed, 4096, head_dim=head_dim, batch=16)
    must_be_right_in([0, 15], tensors, normalizer=normalizer, causal=True)


FULL_MASKS = {
    "causal as a tensor": lambda n: {"attn_mask": future(n, n)},
    "one bias": lambda n: {"attn_mask": holes(n, n), "key_padding_mask": padding(n)},
    "bias for each head": lambda n: {"attn_mask": holes(1, 8, n, n).bfloat16(), "causal": True},
    "a sentence of nothing": lambda n: {"key_padding_mask": nothing(n)},
}


@pytest.mark.gpu
@covering(size=[(1024, 64), (777, 128)], masks=FULL_MASKS, mixed=MIXINGS)
def test_full_size_with_masks(size, masks, mixed):
    length, head_dim = size
    must_be_right(full_size(mixed, length, head_dim=head_dim), normalizer="softmax", **FULL_MASKS[masks](length))


@pytest.mark.gpu
@covering(
    size=[(1024, 64, torch.bfloat16), (777, 128, torch.bfloat16), (500, 64, torch.float16)],
    normalizer=triton.NORMALIZERS,
    mixed=MIXINGS,
)
def test_full_size_with_dropout(size, normalizer, mixed):
    length, head_dim, dtype = size
    tensors, p = full_size(mixed, length, head_dim=head_dim, dtype=dtype), 0.1
    # Which weights are kept depends on nothing but the seed and the place; equal scores let none vanish.
    equal = torch.zeros(B, 8, length, 16, device=DEVICE)
    kept = torch.cat(
        [dropped({"query": equal, "key": equal}, p, columns) for columns in torch.arange(length).split(256)], 3
    )

    def reference(query, key, value, mixing, **options):
        return attention(query, key, value, mixing=mixing, **options, impl="reference")

    def formula(query, key, value, mixing=None, *, weigh):
        identity = torch.eye(length, dtype=query.dtype, device=DEVICE).expand(B, 8, -1, -1)
        return (weigh(query, key, identity, mixing, normalizer=normalizer) * kept / (1 - p)) @ value

    results = (
        with_gradients(formula, tensors, weigh=eager),
        with_gradients(formula, in_float64(tensors), weigh=reference),
    )
    torch.manual_seed(5)
    must_agree(tensors, with_gradients(fused, tensors, normalizer=normalizer, dropout_p=p), *results)
