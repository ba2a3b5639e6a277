"""The kernels compile for a Hopper GPU, and fit it; no GPU is needed for that.

In a process of its own, because this one may have the kernels to interpret. By hand, for any other shape:

    python -m tests.ops.test_triton_compile '[{"heads": 12, "head_dim": 80, "mixed": "shared"}]' "every tile"
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CAPABILITY = 90
MOST_SHARED = 227 * 1024  # bytes that one program may have on an H100 or H200
COMPILED = {}  # the report of each kernel by what it was compiled for
WITHOUT_PRODUCTS = ("delta_kernel", "spans_kernel")

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)


def compile_kernel(kernel, arguments, tile):
    """As triton.jit would at the first call, but for another machine than this; its line of the report."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {
        torch.float32: "*fp32",
        torch.float16: "*fp16",
        torch.bfloat16: "*bf16",
        torch.uint8: "*u8",
        torch.int32: "*i32",
        torch.int64: "*i64",
    }
    options = tile.options(kernel)
    given = {**arguments, **options}
    signature, constants, attributes = {}, {}, {}
    for parameter in kernel.params:
        name, value = parameter.name, given[parameter.name]
        aligned = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            signature[name], attributes[(parameter.num,)] = pointers[value.dtype], aligned
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(parameter.num,)] = aligned
    made = (kernel, str(signature), str(constants), str(attributes), tile)
    if made in COMPILED:
        return COMPILED[made]
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", CAPABILITY, 32),
        options={name: options[name] for name in ("num_warps", "num_stages")},
    )
    # Where a product is not one of tensor cores its layout is another than an mma's.
    layouts = re.findall(r"(?:tt\.dot|warp_group_dot) .*-> tensor<[^#]*#(\w+)", compiled.asm["ttgir"])
    ptx = compiled.asm["ptx"]
    COMPILED[made] = dict(
        number=len(COMPILED),
        kernel=f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}",
        tile=list(tile),
        shared=compiled.metadata.shared,
        tensor_cores=ptx.count("wgmma.mma_async") + ptx.count("mma.sync"),
        products=len(layouts),
        plain_products=sum(not layout.startswith("mma") for layout in layouts),
    )
    return COMPILED[made]


def compile_all(calls, every_tile):
    """The report of every kernel that these calls would start, with every tile or the first"""
    from mixhead_plugin.ops.triton import operators, tuning

    report = []

    def start(kernel, programs, arguments, tile):
        report.append(compile_kernel(kernel, arguments, tile))

    def run(key, tiles, launch, device):
        return [launch(tile) for tile in (tiles if every_tile else tiles[:1])][-1]

    operators.start, tuning.run = start, run
    for call in calls:
        dtype = getattr(torch, call.get("dtype", "bfloat16"))
        torch.backends.cuda.matmul.allow_tf32 = call.get("tf32", False)
        b, h, n, d, mixed = 1, call["heads"], call.get("length", 1024), call["head_dim"], call.get("mixed")
        q, k, v = (torch.empty(b, h, n, d, dtype=dtype) for _ in range(3))
        shape = {None: None, "shared": (h, h), "per query": (b, n, h, h)}[mixed]
        mixing = None if shape is None else torch.empty(shape, dtype=dtype)
        mask = torch.empty(*call["mask"], n, n) if "mask" in call else None
        padding = torch.zeros(b, n, dtype=torch.bool) if call.get("padding") else None
        how = (call.get("normalizer", "softmax"), call.get("causal", True), call.get("dropout", 0.0), d**-0.5)
        made = operators._Call(q, k, v, mixing, mask, padding, torch.tensor(2**40), *how)
        out, rows = made.forward()
        made.backward(torch.empty_like(out), rows, out)
    return report


def report_of(calls, every_tile=True):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [
        sys.executable,
        "-m",
        "tests.ops.test_triton_compile",
        json.dumps(calls),
        *(["every tile"] if every_tile else []),
    ]
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def must_fit(report, dtype="bfloat16"):
    for entry in report:
        assert entry["shared"] <= MOST_SHARED, entry
        if not entry["kernel"].endswith(WITHOUT_PRODUCTS) and dtype != "float32":
            assert entry["tensor_cores"] > 0 and entry["products"] > 0, entry
            assert entry["plain_products"] == 0, entry
    return {entry["kernel"] for entry in report}


def test_the_kernels_compile_for_a_gpu_and_fit_it():
    calls = [dict(heads=4, head_dim=32, mixed="per query"), dict(heads=8, head_dim=64, normalizer="l2", dropout=0.1)]
    found = must_fit(report_of(calls, every_tile=False))
    apart = {f"flash.{name}_kernel" for name in ("forward", "delta", "query_grad", "key_grad")}
    mixed = {f"heads_mixed.{name}_kernel" for name in ("forward", "mixing_grad", "query_grad", "key_grad")}
    assert found == apart | mixed


@pytest.mark.slow
def test_tf32_is_multiplied_on_tensor_cores():
    shape = dict(heads=8, head_dim=64, dtype="float32", tf32=True)
    must_fit(report_of([{**shape, "mixed": "shared"}], every_tile=False), "tf32")


@pytest.mark.slow
def test_lengths_share_what_was_compiled():
    """Also where there is one tile or sixteen; only multiples of 16 have kernels of their own."""
    lengths = (100, 333, 1921)
    calls = [dict(heads=8, head_dim=64, mixed=mixed, length=n) for mixed in (None, "per query") for n in lengths]
    report = report_of(calls, every_tile=False)
    assert len({entry["number"] for entry in report}) == len(report) / len(lengths)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("heads, head_dim", [(1, 64), (3, 12), (8, 128), (16, 64), (64, 8), (32, 80), (8, 256)])
def test_every_kind_of_shape_compiles_and_fits(heads, head_dim, dtype):
    shape = dict(heads=heads, head_dim=head_dim, dtype=dtype)
    must_fit(report_of([{**shape, "mixed": mixed} for mixed in (None, "shared", "per query")]), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", ["softmax", "sigsoftmax", "l2"])
@pytest.mark.parametrize("mixed", [None, "shared", "per query"])
def test_every_variant_compiles_and_fits(mixed, normalizer):
    variants = [dict(causal=False), dict(mask=[1, 1], padding=True), dict(mask=[1, 8]), dict(dropout=0.1)]
    variants.append(dict(mask=[1, 8], dropout=0.1))
    shape = dict(heads=8, head_dim=64, mixed=mixed, normalizer=normalizer, length=777)
    must_fit(report_of([{**shape, **variant} for variant in variants]))


if __name__ == "__main__":
    print(json.dumps(compile_all(json.loads(sys.argv[1]), every_tile=len(sys.argv) > 2)))
