"""Test that the kernels compile for GPUs and fit them, without a GPU.

They compile in a process of their own, because this one may have them interpreted. By hand, for any
other shape:

    python -m tests.ops.test_triton_compile 90 every \
        '[{"heads": 12, "head_dim": 80, "mixed": "shared"}]'
"""

import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from mixhead_plugin.ops.inputs import AttentionInputs
from tests.covering import covering

# not imported here, where other tests have it interpreted
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)

# KiB that one program may have, by compute capability or AMD's name
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
AMD = {"gfx90a": 64, "gfx942": 64, "gfx1100": 32}  # threads of a warp; each has 64 KiB
SHARED_BY_MACHINE = {**SHARED, **dict.fromkeys(AMD, 64)}
# beside mma.sync, which all of NVIDIA's have
TENSOR_CORES = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
STAGES = ("ttir", "llir", "cubin")  # of triton's compiler, before which it can stop
WITHOUT_PRODUCTS = ("flash_bwd_delta_kernel", "spans_kernel")
MIXED = [None, "shared", "per query"]


def skipping(ttgir):
    """Return the products that skip some of their numbers.

    Four threads multiply kWidth neighbours each there, or more.
    """
    products = re.findall(
        r"(tt\.dot .*tensor<[\dx]*x(\d+)x\w+, #ttg.dot_op<{opIdx = 0.*kWidth = (\d+)}>>.*)", ttgir
    )
    return [product for product, inner, width in products if 4 * int(width) > int(inner)]


def read_in_two_ways(ptx):
    """Return the addresses of shared memory for which `wgmma` gets several descriptors.

    They differ in the upper half.

    The upper half says how rows are swizzled. The one operand of a descriptor is its address, the
    other one the rest.
    """
    made = re.findall(r"(?:or\.b64|add\.s64)\s+(%rd\d+), (%rd\d+), (-?\d+);", ptx)
    parts = {descriptor: (address, int(rest) >> 32) for descriptor, address, rest in made}
    upper = defaultdict(set)
    for operands in re.findall(r"wgmma\.mma_async[^{]*\{[^}]*\},([^;]*);", ptx):
        for descriptor in re.findall(r"%rd\d+", operands):
            if descriptor in parts:
                address, half = parts[descriptor]
                upper[address].add(half)
    return [address for address, halves in upper.items() if len(halves) > 1]


class Stopped(Exception):
    """Carry what a stage of the compiler gets."""


def stop_at(stage, *compiler):
    """Let triton's compiler stop before a stage.

    It is the compiler's hook, for which it gives the stages, or asks a key.
    """

    def stop(module, metadata):
        raise Stopped(str(module))

    if compiler:
        compiler[1][stage] = stop
    return stage, stage


def compile_kernel(kernel, arguments, tile, machine, stage=None):
    """Compile as the first launch would, but for another machine and before a stage.

    Return a line of the report.
    """
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from tests.ptx import launch

    target = (
        GPUTarget("hip", machine, AMD[machine])
        if machine in AMD
        else GPUTarget("cuda", machine, 32)
    )
    source, options, _ = launch.prepare(kernel, arguments, tile.warps, tile.stages, target)
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    knobs.runtime.add_stages_inspection_hook = None
    if stage is not None:
        knobs.runtime.add_stages_inspection_hook = functools.partial(stop_at, stage)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as log:
            compiled = triton.compile(source, target=target, options=options.__dict__)
    except Stopped as stopped:
        text = str(stopped)
        return dict(
            kernel=kernel.fn.__name__,
            shared=0,
            skipping=skipping(text),
            in_two_ways=read_in_two_ways(text),
            descriptors=text.count("wgmma.mma_async"),
        )
    # A product that tensor cores do not compute has another layout than an mma's.
    layouts = re.findall(
        r"(?:tt\.dot|warp_group_dot) .*-> tensor<[^#]*#(\w+)", compiled.asm["ttgir"]
    )
    layouts += ["mma"] * compiled.asm["ttgir"].count("ttng.tc_gen5_mma ")
    assembly = compiled.asm["amdgcn" if machine in AMD else "ptx"]
    spilled = re.findall(
        r"_spill_count: +(\d+)" if machine in AMD else r"(\d+) bytes spill",
        assembly + log.getvalue(),
    )
    return dict(
        kernel=kernel.fn.__name__,
        hash=compiled.hash,
        tile=list(tile),
        skipping=skipping(compiled.asm["ttgir"]),
        in_two_ways=read_in_two_ways(assembly),
        shared=compiled.metadata.shared,
        spilled=sum(map(int, spilled)),  # stores and loads, bytes a thread; registers for AMD
        tensor_cores=len(
            re.findall(rf"mma.sync|v_w?mf?ma_|{TENSOR_CORES.get(machine, 'mma.sync')}", assembly)
        ),
        products=len(layouts),
        plain_products=sum(not layout.startswith("mma") for layout in layouts),
    )


def compile_all(machine, tiles, calls):
    """Return the report of every kernel that the calls launch.

    They are compiled with every tile or the first, or up to a stage.

    As at run time, a tile that does not fit is made smaller until one does.
    """
    from triton.runtime.errors import OutOfResources

    from mixhead_plugin.ops.triton import calls as triton_calls
    from mixhead_plugin.ops.triton import passes, programs, tuning

    report = []
    most = SHARED_BY_MACHINE[machine] * 1024
    likeliest = None

    def start(kernel, n_programs, arguments, tile):
        records = [argument for argument in arguments.values() if isinstance(argument, tuple)]
        # triton 3.6 loses the constants of an inner record where a loop begins.
        assert not any(isinstance(field, tuple) for record in records for field in record), (
            "a record holds another one"
        )
        line = compile_kernel(kernel, arguments, tile, machine, tiles if tiles in STAGES else None)
        report.append({**line, "fits": line["shared"] <= most, "likeliest": tile == likeliest})
        if line["shared"] > most:
            raise OutOfResources(line["shared"], most, "shared memory")

    def run(key, candidates, launch, device):
        nonlocal likeliest
        likeliest = candidates[0]
        tried = candidates if tiles == "every" else candidates[:1]
        last = None
        for _, made in tuning._fitting(tried, launch):
            last = made
        return last

    programs.start = start
    tuning.run = run
    for call in calls:
        dtype = getattr(torch, call.get("dtype", "bfloat16"))
        torch.backends.cuda.matmul.allow_tf32 = call.get("tf32", False)
        b = 1
        h = call["heads"]
        n = call.get("length", 1024)
        d = call["head_dim"]
        mixed = call.get("mixed")
        # Rows of odd strides are never whole words, so nothing is loaded ahead, and places are used
        # again.
        sizes = (d, d, call.get("value_dim", d))
        strides = [2 * size + 1 if call.get("odd") else size for size in sizes]
        q, k, v = (
            torch.empty(b, h, n, stride, dtype=dtype)[..., :size]
            for size, stride in zip(sizes, strides)
        )
        shape = {None: None, "shared": (h, h), "per query": (b, n, h, h)}[mixed]
        mixing = None if shape is None else torch.empty(shape, dtype=dtype)
        mask = torch.empty(*call["mask"], n, n) if "mask" in call else None
        padding = torch.zeros(b, n, dtype=torch.bool) if call.get("padding") else None
        inputs = AttentionInputs(
            query=q,
            key=k,
            value=v,
            mixing=mixing,
            attn_mask=mask,
            key_padding_mask=padding,
            sink=torch.zeros(h) if call.get("sink") else None,
            seed=torch.tensor(2**40),
            scale=d**-0.5,
            normalizer=call.get("normalizer", "softmax"),
            causal=call.get("causal", True),
            dropout_p=call.get("dropout", 0.0),
        )
        made = triton_calls.Call(inputs)
        out, statistics = passes.forward(made)
        passes.backward(made, torch.empty_like(out), statistics, out)
    return report


def report_of(calls, tiles="first", machine=90):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "tests.ops.test_triton_compile",
        str(machine),
        tiles,
        json.dumps(calls),
    ]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def must_fit(report, dtype="bfloat16", shrink=False):
    for line in report:
        assert line["fits"] or shrink or not line["likeliest"], line
        assert line["skipping"] == [] and line["in_two_ways"] == [], line
        if line["kernel"] not in WITHOUT_PRODUCTS and dtype != "float32":
            assert (
                line["tensor_cores"] > 0 and line["products"] > 0 and line["plain_products"] == 0
            ), line
    assert {line["kernel"] for line in report} == {
        line["kernel"] for line in report if line["fits"]
    }


def test_the_kernels_are_valid_triton():
    from mixhead_plugin.ops.triton import tuning

    masks = dict(mask=[1, 8], padding=True, dropout=0.1, normalizer="sigsoftmax")
    calls = [
        dict(heads=8, head_dim=64, mixed="per query", **masks),
        dict(heads=8, head_dim=16, mask=[1, 1], sink=True),
    ]
    calls += [
        # a single key, which triton takes for a constant
        dict(heads=8, head_dim=16, mixed=mixed, normalizer="sigmoid", padding=True, length=1)
        for mixed in (None, "shared")
    ]
    calls += [dict(heads=8, head_dim=16, mask=[1, 1], padding=True, causal=False)]
    found = {line["kernel"] for line in report_of(calls, "ttir")}
    assert found == {*tuning._TILES, "flash_bwd_delta_kernel", "spans_kernel"}


@pytest.mark.slow
def test_every_product_multiplies_all_its_numbers():
    """triton 3.5 to 3.8 skip half of 16 numbers that depend on bytes and on `join`.

    The draws of dropout do.
    """
    calls = [
        dict(heads=8, head_dim=64, mixed="per query"),
        dict(heads=1, head_dim=256, dropout=0.1),
    ]
    calls = [dict(call, dtype="float16", padding=True) for call in calls]
    assert not [line for line in report_of(calls, "llir", 80) if line["skipping"]]


def must_be_read_in_one_way(report, least):
    assert sum(line["descriptors"] for line in report) >= least
    assert not [line for line in report if line["in_two_ways"]]


# With these sizes one product reads rows of 32 or 64 bytes, and another one rows of 128, where each
# has its own width.
UNEQUAL = [(64, 9), (64, 32), (16, 64), (32, 128), (32, 16)]
UNALIGNED = dict(heads=2, length=777, odd=True, dropout=0.1, causal=False)


@pytest.mark.slow
def test_no_place_of_shared_memory_is_read_in_two_ways():
    """ptxas 12.8 takes a wrong address then.

    An H200 stopped the program with values of 9 and keys of 64.
    """
    must_be_read_in_one_way(report_of([dict(UNALIGNED, head_dim=64, value_dim=9)], "cubin"), 20)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("head_dim, value_dim", UNEQUAL)
def test_no_tile_of_unequal_heads_reads_a_place_in_two_ways(head_dim, value_dim, dtype):
    call = dict(UNALIGNED, head_dim=head_dim, value_dim=value_dim, dtype=dtype, tf32=True)
    # Tiles of float32 with more than 64 numbers are too small for `wgmma`.
    least = 0 if dtype == "float32" and max(head_dim, value_dim) > 64 else 10
    must_be_read_in_one_way(report_of([call], "cubin"), least)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED)
def test_the_first_tiles_compile_for_every_gpu(capability):
    calls = [dict(heads=8, head_dim=64, mixed=mixed, normalizer="l2") for mixed in MIXED]
    must_fit(report_of(calls, machine=capability), shrink=SHARED[capability] < SHARED[90])


@pytest.mark.slow
@pytest.mark.parametrize("machine", AMD)
def test_the_kernels_compile_for_amd_within_64_kib(machine):
    report = report_of(
        [dict(heads=8, head_dim=64, mixed=mixed) for mixed in MIXED], machine=machine
    )
    assert {line["kernel"] for line in report} == {
        line["kernel"] for line in report if line["fits"]
    }
    assert all(line["tensor_cores"] for line in report if line["kernel"] not in WITHOUT_PRODUCTS)


@pytest.mark.slow
def test_tf32_is_multiplied_on_tensor_cores():
    must_fit(
        report_of([dict(heads=8, head_dim=64, dtype="float32", tf32=True, mixed="shared")]), "tf32"
    )


@pytest.mark.slow
def test_lengths_share_what_was_compiled():
    """Only the multiples of 16 have kernels of their own, however many tiles there are."""
    found = []
    for length in (100, 333, 1921):
        calls = [
            dict(heads=8, head_dim=64, mixed=mixed, length=length) for mixed in (None, "per query")
        ]
        found.append({line["hash"] for line in report_of(calls)})
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "heads, head_dim", [(1, 64), (3, 12), (8, 128), (16, 64), (64, 8), (32, 80), (8, 256)]
)
def test_every_kind_of_shape_compiles_and_fits(heads, head_dim, dtype):
    calls = [dict(heads=heads, head_dim=head_dim, dtype=dtype, mixed=mixed) for mixed in MIXED]
    must_fit(report_of(calls, "every"), dtype)


VARIANTS = [
    dict(causal=False),
    dict(mask=[1, 1], padding=True),
    dict(mask=[1, 8]),
    dict(mask=[1, 8], dropout=0.1),
    dict(sink=True),
]


@pytest.mark.slow
@covering(mixed=MIXED, normalizer=["softmax", "sigsoftmax", "l2", "sigmoid"], variant=VARIANTS)
def test_every_variant_compiles_and_fits(mixed, normalizer, variant):
    if normalizer == "sigmoid":
        variant = {name: value for name, value in variant.items() if name != "sink"}
    shape = dict(heads=8, head_dim=64, mixed=mixed, normalizer=normalizer, length=777)
    report = report_of([{**shape, **variant}], "every")
    if mixed and normalizer == "sigmoid":  # its statistic, the number of keys, needs no product
        report = [line for line in report if line["kernel"] != "flash_fwd_kernel"]
    must_fit(report)


if __name__ == "__main__":
    name = sys.argv[1]
    print(
        json.dumps(
            compile_all(int(name) if name.isdigit() else name, sys.argv[2], json.loads(sys.argv[3]))
        )
    )
