"""Refusals, operators of torch, spans of masks, addresses and tiles around the fused kernels."""

from types import SimpleNamespace

import pytest
import torch

from mixhead_plugin.ops import attention
from mixhead_plugin.ops.triton import support
from tests.covering import each_once, first_of
from tests.ops.triton_cases import (
    DEVICE,
    DV,
    INF,
    MIXED,
    NK,
    NQ,
    ON_GPU,
    TABLES,
    B,
    H,
    Tile,
    by_kernels,
    calls,
    detached,
    future,
    holes,
    inputs,
    masks,
    must_be_right,
    must_be_right_with_dropout,
    padding,
    passes,
    record,
    tuning,
    use_few_large_tiles,
    use_tiles,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("kernels")

REFUSED = {
    "has no kernel for torch.float64": dict(dtype=torch.float64),
    "has no kernel for head size 257, only up to 256": dict(head_dim=257),
    "has no kernel for head size 300, only up to 256": dict(value_dim=300),
    "mixes at most 64 heads, not 65": dict(heads=65, mixed="shared"),
    "mixes 3 heads into as many, not into 2": dict(mixed="shared", rectangular=True),
    "has no kernel for score_mixing": dict(score_mixing=torch.eye(H, device=DEVICE)),
    "has no kernel for gain": dict(gain=torch.ones(H, NQ + NK - 1, device=DEVICE)),
    "has no kernel for normalizer 'relu2', only for softmax, sigsoftmax, l2, sigmoid": dict(
        normalizer="relu2"
    ),
    "gives a learned attn_mask no gradient": dict(
        attn_mask=torch.zeros(NQ, NK, device=DEVICE, requires_grad=True)
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_do_is_refused_with_the_reason(reason):
    changes = dict(REFUSED[reason])
    given = changes.keys() & {"normalizer", "attn_mask", "gain", "score_mixing"}
    options = {name: changes.pop(name) for name in given}
    rectangular = changes.pop("rectangular", False)
    tensors = inputs(**changes)
    if rectangular:
        tensors.update(value=tensors["value"][:, :2], mixing=tensors["mixing"][:, :2])
    with pytest.raises(
        RuntimeError, match=f"impl 'triton': {reason}; usable here: auto, reference, blockwise"
    ):
        by_kernels(**tensors, **options)


def test_more_heads_than_can_be_mixed_are_served_apart():
    tensors = inputs(heads=65, n_queries=2, n_keys=2, head_dim=1, value_dim=1)
    call = record(tensors, normalizer="l2", dropout_p=0.1)
    assert support.call_problem(call) == ""
    relative = call._replace(relative_query=object())
    assert support.call_problem(relative) == "has no kernel for relative"


@pytest.mark.skipif(ON_GPU, reason="needs the interpreter")
def test_bfloat16_is_refused_where_it_would_be_interpreted(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tensors = inputs(dtype=torch.bfloat16)
    with pytest.raises(
        RuntimeError,
        match=r"impl 'triton': computes torch.bfloat16 wrongly under TRITON_INTERPRET=1",
    ):
        by_kernels(**tensors)
    assert attention(**tensors).isfinite().all()  # `auto` takes another


@pytest.mark.parametrize(
    "version, old", [("3.4.0", True), ("2.10.0", True), ("3.5.1", False), ("3.10.0+git1", False)]
)
def test_an_old_triton_is_refused_in_words_whatever_its_package_is_called(
    monkeypatch, version, old, tmp_path
):
    """For ROCm it is pytorch-triton-rocm or triton-rocm, on Windows triton-windows."""
    file = tmp_path / "__init__.py"
    file.write_text(f'"""isort:skip_file"""\n__version__ = {version!r}\n')
    spec = SimpleNamespace(origin=str(file))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert support._package_problem() == (
        f"needs triton 3.5 or newer, {version} is installed" if old else ""
    )


def test_a_triton_without_a_version_may_be_used(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=None))
    assert support._package_problem() == ""


@pytest.mark.parametrize(
    "capability, hip, problem",
    [
        ((7, 5), None, "needs a GPU of compute capability 8.0, the current one has 7.5"),
        ((9, 4, "gfx942:sramecc+:xnack-"), "6.4", ""),
        (
            (9, 0, "gfx906"),
            "6.4",
            "needs one of AMD's gfx90a, gfx942, gfx1100, the current one is gfx906",
        ),
        ((12, 0), None, ""),
        (None, None, "needs a GPU of NVIDIA or AMD and none is visible"),
    ],
)
def test_another_gpu_or_none_is_refused_before_there_are_tensors(
    monkeypatch, capability, hip, problem
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.version, "hip", hip)
    device = SimpleNamespace(**dict(zip(("major", "minor", "gcnArchName"), capability or ())))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    assert support.machine_problem() == problem
    if capability == (7, 5):
        assert support._device_problem("cuda", 1) == problem.replace("the current one", "cuda:1")


def test_a_second_derivative_and_a_forward_mode_one_are_refused():
    tensors = inputs("shared", n_queries=4, n_keys=5)
    (gradient,) = torch.autograd.grad(
        by_kernels(**tensors).square().sum(), tensors["query"], create_graph=True
    )
    with pytest.raises(NotImplementedError, match="no second derivative; impl 'reference' has"):
        gradient.square().sum().backward()
    tensors = detached(tensors)
    query = tensors.pop("query")
    with pytest.raises(
        NotImplementedError, match="no forward-mode derivative; impl 'reference' has"
    ):
        torch.func.jvp(lambda q: by_kernels(query=q, **tensors), (query,), (query,))


@first_of(mixed=["per query", "shared", None], backend=["aot_eager", "inductor"])
def test_it_compiles_without_a_break(mixed, backend):
    tensors = inputs(mixed, batch=1, heads=2, n_queries=5, n_keys=6)
    names = list(tensors)
    mask = padding(6, 1)

    def run(*values):
        out = by_kernels(**dict(zip(names, values)), causal=True, key_padding_mask=mask)
        return (out.transpose(1, 2).flatten(2) * 2).sin()

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    torch.testing.assert_close(
        *[with_gradients(lambda f=f, **t: f(*t.values()), tensors) for f in (compiled, run)]
    )


@first_of(mixed=[None, "per query", "shared"])
def test_torch_finds_no_fault_in_the_operators(mixed):
    tensors = inputs(mixed, batch=1, heads=2, n_queries=4, n_keys=5)
    masks = dict(attn_mask=holes(4, 5), key_padding_mask=padding(5, 1), causal=True)
    options = dict(
        masks, seed=torch.tensor(5, device=DEVICE), normalizer="sigsoftmax", dropout_p=0.2
    )
    torch.library.opcheck(torch.ops.mixhead_plugin.triton, record(tensors, **options))
    call = record(detached(tensors), **options)
    out, rows = torch.ops.mixhead_plugin.triton(*call)
    given = (torch.randn_like(out), rows, out if mixed is None else None, *call)
    torch.library.opcheck(torch.ops.mixhead_plugin.triton_backward, given)


def test_the_host_reads_no_tensor(monkeypatch):
    """The host would wait for the device, and a captured CUDA graph would keep what it read."""

    def refuse(tensor):
        raise AssertionError("the host read a number")

    tensors = detached(inputs("shared", n_queries=5, n_keys=6))
    seed = torch.tensor(7, device=DEVICE)
    bias = holes(5, 6)
    d_out = torch.randn(B, H, 5, DV, device=DEVICE)
    options = dict(attn_mask=bias, key_padding_mask=padding(6), seed=seed, dropout_p=0.3)
    for name in ("__int__", "__index__", "__float__", "__bool__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    call = calls.Call(record(tensors, **options))
    out, rows = passes.forward(call)
    passes.backward(call, d_out, rows, out)


@pytest.mark.parametrize("name", ["causal", "holes", "window"])
def test_the_spans_of_a_mask_are_those_of_its_numbers(name):
    n_queries = 18
    n_keys = 260  # more than a tile of 16 x 256
    causal = future(n_queries, n_keys)
    mask = {
        "causal": causal,
        "holes": holes(n_queries, n_keys),
        "window": causal + causal.flip(0, 1),
    }[name]
    for turned in (mask, mask.t()):
        expected = []
        for row in turned:
            for chosen in (row != -INF, row != 0):
                where = chosen.nonzero().flatten().tolist()
                expected += [where[0], where[-1] + 1] if where else [len(row), 0]
        assert masks.spans_of(turned[None, None]).flatten().tolist() == expected


def test_a_causal_mask_of_floats_is_read_only_at_the_diagonal(monkeypatch):
    """The mask has NaN where it must not be read, and the spans of the mask without NaN."""
    use_tiles(monkeypatch, Tile(32, 32, 4, 1), None)
    n = 64
    spans_of = masks.spans_of
    spoilt = future(n, n)
    at = torch.arange(n, device=DEVICE) // 32
    spoilt[at[:, None] != at] = float("nan")
    by_query = spans_of(future(n, n)[None, None])
    by_key = spans_of(future(n, n).t()[None, None])
    monkeypatch.setattr(calls, "spans_of", lambda mask: by_query if mask.stride(3) == 1 else by_key)
    for tensor in with_gradients(
        by_kernels, inputs(batch=1, n_queries=n, n_keys=n), attn_mask=spoilt
    ):
        assert not tensor.isnan().any()


def test_an_expanded_mask_is_taken_for_what_it_was():
    call = calls.Call(record(inputs("shared"), attn_mask=future().expand(B, H, NQ, NK)))
    assert call.attn_mask.shape == (1, 1, NQ, NK)
    assert torch.equal(call.key_spans, masks.spans_of(future()[None, None]))


FAR = 2**31 + 2**12  # numbers, from one position (head, ...) to the next


def far_apart(tensors, dims, folder):
    """Copy each tensor to shared memory, with neighbours far apart in one dimension.

    More than 2^31 numbers lie between them.
    """
    far = {}
    at = 0
    for name, tensor in tensors.items():
        shape = tensor.shape
        strides = [0] * tensor.dim()
        size = 1
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
        storage = torch.from_file(
            str(folder / "memory"), shared=True, size=numbers, dtype=torch.float16
        )
    elif torch.cuda.mem_get_info()[0] < 2 * numbers + 2**30:
        pytest.skip(f"needs {2 * numbers / 1e9:.0f} GB of free memory")
    else:
        storage = torch.full((numbers,), float("nan"), dtype=torch.float16, device=DEVICE)
    return {name: storage.as_strided(*place).copy_(tensors[name]) for name, place in far.items()}


DIMS = ["batch", "heads", "positions", "size"]


@each_once(dim=DIMS, mixed=[None, "per query"])
def test_what_is_beyond_32_bits_is_found(dim, mixed, tmp_path):
    tensors = inputs(mixed, torch.float16, 2, 3, 3, 3, 3, 3)
    near = detached(tensors)
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
        out = by_kernels(**given, causal=True)
        results.append([out, *torch.autograd.grad(out, [given[name] for name in tensors], d_out)])
    for got, expected in zip(*results):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_there_is_a_tile_for_every_shape(itemsize):
    for head_dim in (16, 32, 64, 128, 256):
        for name in tuning._TILES:
            for heads in range(1, 65):
                assert TABLES(name, heads, head_dim, itemsize)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_kernel_that_writes_over_what_it_reads_has_one_tile(itemsize):
    """To choose among several it would be launched again, on its own results."""
    flash = {name for name in tuning._TILES if name.startswith("flash")}
    for name in tuning._TILES.keys() - flash:
        for tiles in tuning._TILES[name][itemsize].values():
            assert len(tiles) == 1


def test_a_tile_that_reaches_into_the_next_query_is_refused(monkeypatch):
    """The memory of a strip has a multiple of 128 keys a query."""
    use_tiles(monkeypatch, Tile(32, 32, 4, 1), Tile(16, 256, 4, 1))
    with pytest.raises(Exception, match="a tile reaches into the next query"):
        by_kernels(**detached(inputs("shared", batch=1, n_queries=2, n_keys=3)))


@each_once(
    mixed=MIXED,
    normalizer=["softmax, sink", "sigsoftmax", "l2", "sigmoid"],
    dtype=[torch.float32, torch.float16],
    mask=["none", "causal", "floats", "padding"],
)
def test_several_strips_give_the_same(mixed, normalizer, dtype, mask, monkeypatch):
    monkeypatch.setenv("MIXHEAD_STRIP_MIB", "0.01")
    use_few_large_tiles(monkeypatch)
    tensors = inputs(mixed, dtype, heads=2, n_queries=66, n_keys=18, sink="sink" in normalizer)
    options = {"causal": mask == "causal"}
    if mask == "floats":
        options["attn_mask"] = torch.full((66, 18), -INF, device=DEVICE).triu(-47)
    if mask == "padding":
        options["key_padding_mask"] = padding(18)
    must_be_right(tensors, normalizer=normalizer.removesuffix(", sink"), **options)


@first_of(mixed=MIXED)
def test_several_strips_drop_the_same_weights(mixed, monkeypatch):
    monkeypatch.setenv("MIXHEAD_STRIP_MIB", "0.01")
    use_few_large_tiles(monkeypatch)
    tensors = inputs(mixed, batch=1, heads=2, n_queries=70, n_keys=20)
    must_be_right_with_dropout(tensors, "softmax", 0.4)


@pytest.mark.parametrize("given", ["much", "-1", "inf", "nan"])
def test_the_memory_of_strips_must_be_a_number(given, monkeypatch):
    monkeypatch.setenv("MIXHEAD_STRIP_MIB", given)
    message = f"^MIXHEAD_STRIP_MIB={given}: must be a number of MiB, at least 0$"
    with pytest.raises(ValueError, match=message):
        tuning.strip_bytes()


def test_many_heads_that_do_not_mix_are_tried(monkeypatch):
    monkeypatch.setattr(tuning, "tiles_for", TABLES)
    assert tuning.most_candidates(100, 64, 2) == 2


def test_on_a_small_device_a_tile_shrinks_until_it_fits():
    def launch(tile):
        if tile.BM * tile.BN * tile.stages > most:
            raise tuning.OutOfResources(2, 1, "shared memory")

    tiles = TABLES("flash_bwd_dkv_kernel", 8, 64, 2)
    most = 32 * 32
    assert tuning._fastest(tiles, launch) == Tile(32, 32, 4, 1)
    most = 16 * 16 - 1
    with pytest.raises(tuning.OutOfResources):
        tuning._fastest([Tile(16, 16, 8, 1)], launch)


class TriedKernel:
    """A kernel with three tiles, of 64, 32 and 16 queries. The second is the fastest."""

    def __init__(self):
        self.tiles = [Tile(queries, 16, 8, 1) for queries in (64, 32, 16)]
        self.room = 64  # a tile of more queries does not fit the device
        self.timed = []

    def launch(self, tile):
        if self.room < tile.BM:
            raise tuning.OutOfResources(tile.BM, self.room, "shared memory")
        return tile

    def milliseconds(self, function):
        tile = function()
        self.timed.append(tile.BM)
        return abs(tile.BM - 32)

    def chosen(self):
        return tuning.run("key", self.tiles, self.launch, torch.device("cuda", 0)).BM

    def must_shrink_with_the_room(self):
        """A later call may find less room than the one that chose the tile."""
        self.room = 16
        assert self.chosen() == 16
        assert self.chosen() == 16
        self.room = 8
        with pytest.raises(tuning.OutOfResources):
            self.chosen()


@pytest.fixture
def tried(monkeypatch):
    kernel = TriedKernel()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(tuning, "_milliseconds", kernel.milliseconds)
    return kernel


def test_tiles_are_timed_once_and_the_fastest_is_kept(tried):
    assert tried.chosen() == 32
    assert tried.chosen() == 32
    assert tried.timed == [64, 32, 16]
    tried.must_shrink_with_the_room()


def test_while_a_graph_is_captured_the_first_tile_that_fits_is_taken_untimed(tried, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tried.chosen() == 64
    assert tried.chosen() == 64
    tried.must_shrink_with_the_room()
    assert tried.timed == []


def test_under_deterministic_algorithms_the_first_tile_that_fits_is_taken_untimed(
    tried, monkeypatch
):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert tried.chosen() == 64
    assert tried.chosen() == 64
    tried.must_shrink_with_the_room()
    assert tried.timed == []
