"""The parts of scripts/gpu_report.sh: what each tries on a GPU, step by step.

Every part is a function from a step to its rows. It runs in processes of its own (steps.py), so
nothing of a part is left for the next one but what triton and torch.compile keep on disk.
"""

import functools
import importlib.util
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from benchmarks import core
from benchmarks.measure import Case, check, measure
from benchmarks.opponents import OPPONENTS, problem
from benchmarks.steps import Row, one_line
from mixhead_plugin import check as machine_check
from mixhead_plugin.ops import attention, triton
from mixhead_plugin.ops.accuracy import CallKind

ROOT = Path(__file__).resolve().parents[2]


class Settings(NamedTuple):
    """What the whole report is about.

    Args:
        device: "cuda", or "cpu", where triton interprets its kernels and nothing of the figures
            counts
        quick: a rehearsal: few steps, small sizes, two rounds
        compiled: a file of what the part `compile` has compiled in time, a line each
        tests: files or tests for pytest, in order; if none are given, all of FILES
    """

    device: str
    quick: bool
    compiled: Path
    tests: tuple[str, ...] = ()


class Part(NamedTuple):
    """A part of the report.

    Args:
        title: above its table
        steps: returns the names of its steps, in order of worth
        run: yields the rows of a step
        seconds: for the whole part
        limit: seconds for a step
        parallel: whether steps run beside each other; what is timed runs alone
        needs: a package without which the part is left out
        asked: whether the part runs only where it is named
    """

    title: str
    steps: Callable[[Settings], list[str]]
    run: Callable[[Settings, str], Iterable[Row]]
    seconds: float
    limit: float
    parallel: bool = False
    needs: str = ""
    asked: bool = False


# ---- the machine -------------------------------------------------------------------------------


def machine(settings: Settings, step: str) -> Iterator[Row]:
    """Yield versions, the device, and what compilers need."""
    for name, value in machine_check.machine(torch.device(settings.device)).items():
        yield {"what": name, "found": value}
    yield {"what": "CUDA of torch", "found": str(torch.version.cuda)}
    yield {"what": "CPU cores", "found": str(cores())}
    yield {"what": "C compiler", "found": os.environ.get("CC") or first_found("gcc", "clang", "cc")}
    yield {
        "what": "C++ compiler",
        "found": os.environ.get("CXX") or first_found("g++", "clang++", "c++"),
    }
    header = Path(sysconfig.get_path("include"), "Python.h")
    yield {
        "what": "Python.h",
        "found": str(header) if header.exists() else "missing, and triton needs it",
    }
    if settings.device == "cuda":
        known = torch.cuda.get_device_properties()
        for name in ("multi_processor_count", "L2_cache_size", "shared_memory_per_multiprocessor"):
            yield {"what": name, "found": str(getattr(known, name, "unknown"))}
        yield {"what": "copy, TB/s", "found": f"{copied_per_second() / 1e12:.2f}"}
        yield {
            "what": "bfloat16 product, TFLOP/s",
            "found": f"{multiplied_per_second() / 1e12:.0f}",
        }


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first_found(*names: str) -> str:
    return next((path for name in names if (path := shutil.which(name))), "missing")


def copied_per_second() -> float:
    """Return the bytes that the device's memory reads and writes in a second."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def multiplied_per_second() -> float:
    """Return the operations of a large product in a second."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_of(lambda: a @ b)


def seconds_of(function: Callable[[], Any], repeats: int = 10) -> float:
    """Return the median time of a call on the device."""
    found = []
    for i in range(-3, repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        if i >= 0:
            found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


# ---- mixhead check -----------------------------------------------------------------------------

# Head sizes and variants that are timed below: what they compile here is found on disk there.
TIMED = [
    ("8x64", "softmax", "position-wise", "causal", "bfloat16"),
    ("8x64", "softmax", "position-independent", "causal", "bfloat16"),
    ("8x64", "softmax", "none", "causal", "bfloat16"),
    ("8x64", "softmax", "position-wise", "causal", "float16"),
    ("8x64", "softmax", "position-independent", "causal", "float16"),
    ("8x64", "softmax", "position-wise", "causal", "float32"),
    ("8x64", "softmax", "position-independent", "causal", "float32"),
    ("16x64", "softmax", "position-wise", "causal", "bfloat16"),
    ("16x64", "softmax", "position-independent", "causal", "bfloat16"),
    ("32x8", "softmax", "position-wise", "causal", "bfloat16"),
    ("32x8", "softmax", "position-independent", "causal", "bfloat16"),
    ("8x64", "sigsoftmax", "none", "causal", "bfloat16"),
    ("8x64", "l2", "none", "causal", "bfloat16"),
    ("8x64", "softmax", "none", "none", "bfloat16"),
    ("16x64", "softmax", "none", "causal", "bfloat16"),
    ("32x8", "softmax", "none", "causal", "bfloat16"),
]
REHEARSED = [
    ("2x16", "softmax", "position-wise", "causal", "float32"),
    ("2x16", "l2", "none", "none", "float32"),
]


def named_variants(settings: Settings) -> dict[str, tuple[dict[str, str], CallKind]]:
    """Return the variants to try by name, in order of worth.

    First those that are timed below, then pairs of all values.

    All of `mixhead check` would take hours, because every variant of the kernels is compiled.
    """
    listed = REHEARSED if settings.quick else TIMED
    device = torch.device(settings.device)
    every = {}
    for shape in dict.fromkeys(row[0] for row in listed):
        heads, head_dim = map(int, shape.split("x"))
        for names, kind in machine_check.variants(device, heads, head_dim):
            every[shape, *names.values()] = names, kind
    chosen = list(listed)
    if not settings.quick:
        shape = listed[0][0]
        by_kernels = {
            row: row[1] in triton.NORMALIZERS and row[2] in machine_check.DIMS_OF_MIXING
            for row in every
        }
        # Kernels first, then what torch alone computes, which compiles nothing.
        for served in (True, False):
            chosen += pairs([row for row in every if row[0] == shape and by_kernels[row] == served])
    return {" / ".join(row): every[row] for row in dict.fromkeys(chosen)}


def pairs(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return some of the rows, in which every pair of values occurs that occurs in all of them."""
    found = []
    missing = {pair for row in rows for pair in pairs_of(row)}
    while missing:
        best = max(rows, key=lambda row: len(missing & pairs_of(row)))
        missing -= pairs_of(best)
        found.append(best)
    return found


def pairs_of(row: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
    return {(i, row[i], j, row[j]) for j in range(len(row)) for i in range(j)}


def check_steps(settings: Settings) -> list[str]:
    return list(named_variants(settings))


def check_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the row of `mixhead check` for a variant, with the seconds of its first use."""
    names, kind = named_variants(settings)[step]
    torch.set_num_threads(1)
    began = time.monotonic()
    row = machine_check.judge(kind)
    heads = f"{kind.heads}x{kind.head_dim}"
    yield {"heads": heads, **names, **row, "seconds": time.monotonic() - began}


# ---- the attention alone -----------------------------------------------------------------------

# batch x heads x length x head size, dtype, dropout; what is compiled for them in the order of
# worth
TIMINGS = {
    "8x8x2048x64 bfloat16 0.0": ("loop 256, compiled", "flex", "formula, compiled"),
    "32x8x512x64 bfloat16 0.0": ("loop 256, compiled", "flex"),
    "8x32x2048x8 bfloat16 0.0": ("loop 256, compiled",),
    "8x16x2048x64 bfloat16 0.0": ("flex",),
    "4x8x4096x64 bfloat16 0.0": ("flex",),
    "8x8x2048x64 float16 0.0": (),
    "8x8x2048x64 bfloat16 0.1": (),
    "2x8x2048x64 float32 0.0": (),
}
REHEARSED_TIMINGS = {"2x2x32x16 float32 0.0": (), "2x2x32x16 float32 0.1": ()}
LARGE = 40 * 2**30  # bytes of a GPU; a smaller one gets a quarter of the batch


class Timing(NamedTuple):
    """What is timed in a step."""

    size: core.Size
    dtype: str
    dropout: float
    compiled: tuple[str, ...]


def timing_of(settings: Settings, step: str) -> Timing:
    compiled = (REHEARSED_TIMINGS if settings.quick else TIMINGS)[step]
    shape, dtype, dropout = step.split()
    batch, *rest = map(int, shape.split("x"))
    if settings.device == "cuda" and torch.cuda.get_device_properties().total_memory < LARGE:
        batch = max(1, batch // 4)
    return Timing((batch, *rest), dtype, float(dropout), compiled)


def core_steps(settings: Settings) -> list[str]:
    return list(REHEARSED_TIMINGS if settings.quick else TIMINGS)


def contenders(settings: Settings, timing: Timing) -> list[core.Core]:
    """Return what is timed: torch's own attention first."""
    on_gpu = settings.device == "cuda"
    plain = ("softmax", "")
    mixed = [("softmax", "A"), ("softmax", "B")]
    in_half = on_gpu and timing.dtype != "float32"
    found = [core.Core("flash" if in_half else "is_causal")]
    found += [core.Core("triton", *kind) for kind in (plain, *mixed)]
    if timing.dropout:
        found += [core.Core("loop 256", *kind) for kind in mixed]
        return found

    # The products of FlashAttention in triton are in tf32 where the numbers are float32, so it
    # would be inexact.
    if not on_gpu or timing.dtype != "float32":
        found.append(core.Core("FlashAttention-2 in triton", causal=False))
    found.append(core.Core("triton", causal=False))

    for provider in timing.compiled:
        if problem(provider, settings.device):
            continue
        kinds = mixed if OPPONENTS[provider].mixes else [plain]
        found += [core.Core(provider, *kind) for kind in kinds]
    for provider in ("loop 256", "formula", "blockwise"):
        found += [core.Core(provider, *kind) for kind in mixed]
    found += [core.Core("triton", name) for name in ("sigsoftmax", "l2")]
    return found


def core_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the times of each contender, after a check of its numbers.

    They are those of the forward pass alone, and with the backward pass.
    """
    timing = timing_of(settings, step)
    inputs = core.Inputs(timing.size, settings.device, timing.dtype)
    compiled = settings.compiled.read_text().splitlines() if settings.compiled.exists() else []
    right = []
    # The numbers are checked here, at full size. So the kernels are not tried before.
    with mock.patch.object(triton, "fault", lambda inputs: ""):
        for contender in contenders(settings, timing):
            began = time.monotonic()
            if contender.is_compiled and f"{step} | {contender.name}" not in compiled:
                fault = "left out: not compiled in time, see the part `compile`"
            else:
                fault = fault_of(inputs, contender)
            print(
                f"{contender.name}: {time.monotonic() - began:.1f} s {fault}",
                file=sys.stderr,
                flush=True,
            )
            if fault:
                yield {"size": step, "name": contender.name, "fault": fault}
            else:
                right.append(contender)
        for passes in ("forward", "both"):
            for row in times(settings, inputs, right, timing.dropout, passes):
                yield {"size": step, "passes": passes, **row}


def fault_of(inputs: core.Inputs, contender: core.Core) -> str:
    """Return what a contender computes wrongly, or the error that it ends with; empty if none."""
    try:
        return inputs.fault(contender)
    except Exception as error:
        return one_line(error)


def times(
    settings: Settings, inputs: core.Inputs, right: list[core.Core], dropout: float, passes: str
) -> Iterator[Row]:
    """Yield a row for each contender that has such passes: "forward" alone, or "both"."""
    runs: dict[str, Callable[[], Any]] = {}
    for contender in right:
        # A forward pass alone would be compiled anew.
        if passes == "forward" and (contender.forward_only or not contender.is_compiled):
            runs[contender.name] = functools.partial(inputs.forward, contender, dropout)
        if passes == "both" and not contender.forward_only:
            runs[contender.name] = functools.partial(
                inputs.run, contender, dropout, inputs.d_output
            )
    if not runs:
        return
    own = core.Core("triton").name
    case = Case("core", "", runs, own if own in runs else next(iter(runs)))
    for row in measure(case, 2 if settings.quick else 15, settings.device):
        kept = {name: value for name, value in row.items() if name not in ("case", "size")}
        yield {**kept, "host_ms": host_milliseconds(runs[row["name"]], settings)}


def host_milliseconds(function: Callable[[], Any], settings: Settings) -> float:
    """Return the median time until a call returns, with an idle device.

    This is what Python needs to start its kernels.
    """
    found = []
    for _ in range(2 if settings.quick else 5):
        synchronize(settings)
        began = time.perf_counter()
        function()
        found.append(1e3 * (time.perf_counter() - began))
    synchronize(settings)
    return statistics.median(found)


def synchronize(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()


def compile_steps(settings: Settings) -> list[str]:
    """Return a contender of a size for each first call that compiles.

    torch.compile comes first, because it takes longest.
    """
    by_torch, by_triton = [], []
    for step in core_steps(settings):
        for contender in contenders(settings, timing_of(settings, step)):
            if contender.is_compiled:
                by_torch.append(f"{step} | {contender.name}")
            elif "triton" in contender.provider:
                by_triton.append(f"{step} | {contender.name}")
    trained = []
    if importlib.util.find_spec("fairseq") is not None:
        # fairseq's own compiles nothing
        trained = [f"{TRAINING} | {step}" for step in training_steps(settings)[1:]]
    modules = [f"{MODULE} | {step}" for step in module_steps(settings)]
    return [*trained, *modules, *by_torch, *by_triton]


# Sizes of `compile_step` that are no key of the timings.
TRAINING = "training"
MODULE = "module"


def compile_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the seconds of the first call of a contender.

    What it compiles stays on disk for the parts that follow.
    """
    size, _, name = step.partition(" | ")
    if size in (TRAINING, MODULE):
        began = time.monotonic()
        if size == MODULE:
            rows = module_step(settings, name)
        else:
            rows = training_step(settings, name, updates=1)
        for _ in rows:
            pass
        yield {"size": size, "name": name, "seconds": time.monotonic() - began}
        return
    timing = timing_of(settings, size)
    contender = next(one for one in contenders(settings, timing) if one.name == name)
    inputs = core.Inputs(timing.size, settings.device, timing.dtype)
    began = time.monotonic()
    with mock.patch.object(triton, "fault", lambda inputs: ""):
        if contender.forward_only:
            inputs.forward(contender, timing.dropout)
        else:
            inputs.run(contender, timing.dropout, inputs.d_output)
        synchronize(settings)
    yield {"size": size, "name": name, "seconds": time.monotonic() - began}
    with settings.compiled.open("a") as file:
        file.write(f"{step}\n")


# ---- the kernels -------------------------------------------------------------------------------

MEASURED_KERNELS = {
    "8x8x2048x64 bfloat16 B": ("8x8x2048x64", "bfloat16", "B"),
    "8x8x2048x64 bfloat16 A": ("8x8x2048x64", "bfloat16", "A"),
    "8x8x2048x64 bfloat16 softmax": ("8x8x2048x64", "bfloat16", ""),
    "8x16x2048x64 bfloat16 B": ("8x16x2048x64", "bfloat16", "B"),
    "8x32x2048x8 bfloat16 B": ("8x32x2048x8", "bfloat16", "B"),
    "8x8x2048x64 float16 B": ("8x8x2048x64", "float16", "B"),
    "2x8x2048x64 float32 B": ("2x8x2048x64", "float32", "B"),
}
REHEARSED_KERNELS = {"2x2x32x16 float32 B": ("2x2x32x16", "float32", "B")}


def kernel_steps(settings: Settings) -> list[str]:
    return list(REHEARSED_KERNELS if settings.quick else MEASURED_KERNELS)


class Launch(NamedTuple):
    """A kernel of a call, ready to be launched with any tile."""

    kernel: str
    tiles: list[Any]  # of tuning.py
    with_tile: Callable[[Any], Any]


def launches(settings: Settings, case: str) -> list[Launch]:
    """Return the kernels of a forward and backward pass, which were launched once."""
    from mixhead_plugin.ops.triton import operators, tuning  # imports triton

    shape, dtype, mixing = (REHEARSED_KERNELS if settings.quick else MEASURED_KERNELS)[case]
    inputs = core.Inputs(tuple(map(int, shape.split("x"))), settings.device, dtype)
    call = inputs.call(core.Core("triton", mixing=mixing), 0.0)
    call = call.with_tensors({name: tensor.detach() for name, tensor in call.given().items()})
    found: list[Launch] = []

    def run(key: Any, tiles: list[Any], launch: Callable[[Any], Any], device: torch.device) -> Any:
        found.append(Launch(key[0], tiles, launch))
        return tuning.first_fitting(tiles, launch)[1]

    # One strip: each kernel is launched for all queries.
    memory = {"MIXHEAD_STRIP_MIB": "65536"}
    with mock.patch.object(tuning, "run", run), mock.patch.dict(os.environ, memory):
        made = operators.Call(call)
        output, of_rows = made.forward()
        made.backward(inputs.d_output, of_rows, output)
    return found


def measured(settings: Settings, launch: Launch, tile: Any, timed: bool = True) -> Row:
    """Return time and resources of a kernel with a tile, or the error that it ends with."""
    from mixhead_plugin.ops.triton import operators, tuning  # imports triton

    row: Row = {"kernel": launch.kernel, "tile": "x".join(map(str, tile))}
    start = operators.start

    def recording(kernel: Any, programs: int, arguments: dict[str, Any], tile: Any) -> None:
        row.update(resources(start(kernel, programs, arguments, tile)), programs=programs)

    with mock.patch.object(operators, "start", recording):
        try:
            launch.with_tile(tile)
        except Exception as error:
            return row | {"fault": one_line(error)}
    if settings.device == "cuda" and timed:
        row["ms"] = tuning._milliseconds(functools.partial(launch.with_tile, tile))
    return row


def kernel_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield time and resources of every kernel with every tile that `tuning.py` lists for it."""
    for launch in launches(settings, step):
        for tile in launch.tiles:
            yield {"case": step, **measured(settings, launch, tile)}


# ---- more tiles --------------------------------------------------------------------------------

SLICES = 4  # processes that compile the tiles of a kernel


def more_tiles(launch: Launch) -> list[Any]:
    """Return tiles around those of tuning.py: all sizes that may fit the registers."""
    first = launch.tiles[0]
    if launch.kernel in ("mix_kernel", "mixed_bwd_ds_kernel", "mixed_bwd_dm_kernel"):
        axes = ((1, 4, 16), (64, 128), (1, 2, 4), (2, 3, 4))
    else:
        axes = ((64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4))
    found = []
    for bm, bn, warps, stages in itertools.product(*axes):
        found.append(first._replace(BM=bm, BN=bn, warps=warps, stages=stages))
    return list(dict.fromkeys([*launch.tiles, *found]))


def tile_cases(settings: Settings) -> dict[str, list[str]]:
    """Return the kernels of each case."""
    mixed = [
        "mixed_weights_kernel",
        "mix_kernel",
        "product_over_keys_kernel",
        "mixed_bwd_dw_kernel",
        "mixed_bwd_dm_kernel",
        "mixed_bwd_ds_kernel",
        "product_over_queries_kernel",
    ]
    flash = ["flash_fwd_kernel", "flash_bwd_dq_kernel", "flash_bwd_dkv_kernel"]
    if settings.quick:
        return dict.fromkeys(REHEARSED_KERNELS, mixed[:1])
    return {
        "8x8x2048x64 bfloat16 B": mixed,
        "8x8x2048x64 bfloat16 A": mixed,
        "8x8x2048x64 bfloat16 softmax": flash,
    }


def tile_steps(settings: Settings) -> list[str]:
    return [
        f"{case} | {kernel}" for case, kernels in tile_cases(settings).items() for kernel in kernels
    ]


def tile_compile_steps(settings: Settings) -> list[str]:
    return [f"{step} | {i}" for step in tile_steps(settings) for i in range(SLICES)]


def tile_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield time and resources of a kernel with many tiles."""
    case, kernel = step.split(" | ")
    launch = next(one for one in launches(settings, case) if one.kernel == kernel)
    for tile in more_tiles(launch)[: 3 if settings.quick else None]:
        yield {"case": case, **measured(settings, launch, tile)}


def tile_compile_step(settings: Settings, step: str) -> Iterator[Row]:
    """Compile a share of the tiles of `tile_step`; yield those that fail.

    `tile_step` then finds them on disk.
    """
    case, kernel, place = step.split(" | ")
    launch = next(one for one in launches(settings, case) if one.kernel == kernel)
    for tile in more_tiles(launch)[int(place) :: SLICES][: 1 if settings.quick else None]:
        row = measured(settings, launch, tile, timed=False)
        if "fault" in row:
            yield {"case": case, **row}


def resources(compiled: Any) -> Row:
    """Return what a compiled kernel takes, and how many programs fit a multiprocessor.

    triton reports it.
    """
    if not hasattr(compiled, "n_regs"):
        return {}
    metadata, known = compiled.metadata, torch.cuda.get_device_properties()
    threads = 32 * metadata.num_warps
    fitting = {
        # A warp gets registers in steps of 256.
        "registers": getattr(known, "regs_per_multiprocessor", 65536)
        // (-(-compiled.n_regs * 32 // 256) * 256 * metadata.num_warps),
        "threads": known.max_threads_per_multi_processor // threads,
        # The driver takes 1 KiB of shared memory for each program.
        "shared": getattr(known, "shared_memory_per_multiprocessor", 228 * 1024)
        // (metadata.shared + 1024),
        "most": 32,
    }
    programs = min(fitting.values())
    return {
        "registers": compiled.n_regs,
        "spills": compiled.n_spills,
        "shared_kib": metadata.shared / 1024,
        "warps": metadata.num_warps,
        "programs_per_sm": programs,
        "occupancy": programs * threads / known.max_threads_per_multi_processor,
        "bound_by": min(fitting, key=fitting.__getitem__),
    }


# ---- a step of decoding, the module ------------------------------------------------------------


def one_step(settings: Settings) -> list[str]:
    return ["all"]


def decoding(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the time of one step of decoding.

    One query, 1,024 keys, 8 heads of 64, 16 sentences.
    """
    batch, heads, keys, head_dim = (2, 2, 16, 16) if settings.quick else (16, 8, 1024, 64)
    dtype = torch.bfloat16 if settings.device == "cuda" else torch.float32
    made = functools.partial(torch.randn, device=settings.device, dtype=dtype)
    query = made(batch, heads, 1, head_dim)
    key, value = made(batch, heads, keys, head_dim), made(batch, heads, keys, head_dim)
    mixings = {
        "softmax": None,
        "Mixhead A": made(heads, heads),
        "Mixhead B": made(batch, 1, heads, heads),
    }
    runs = {"torch": lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value)}
    for name, mixing in mixings.items():
        runs[name] = functools.partial(attention, query, key, value, mixing=mixing)
    repeats = 3 if settings.quick else 200
    with torch.no_grad():
        for name, run in runs.items():
            for _ in range(3):
                run()
            synchronize(settings)
            began = time.perf_counter()
            for _ in range(repeats):
                run()
            synchronize(settings)
            yield {"name": name, "microseconds": 1e6 * (time.perf_counter() - began) / repeats}


def module_steps(settings: Settings) -> list[str]:
    steps = ["torch"]
    if importlib.util.find_spec("fairseq") is not None:
        steps.append("fairseq")
    return steps


def module_step(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the times of the attention with its projections, forward and backward pass."""
    size = (2, 2, 32, 16) if settings.quick else (8, 8, 2048, 64)
    dtype = "bfloat16" if settings.device == "cuda" else "float32"
    if step == "fairseq":
        from benchmarks import module

        case = module.case(size, True, 0.0, settings.device, dtype)
    else:
        case = yield from torch_module(size, settings.device, dtype)
    for row in measure(case, 2 if settings.quick else 15, settings.device):
        yield {"module": step, **{name: value for name, value in row.items() if name != "case"}}


def torch_module(size: core.Size, device: str, dtype: str) -> Generator[Row, None, Case]:
    """Return `nn.MultiheadAttention` and the plugin's, causal and without dropout.

    Yield what is wrong with the plugin's.

    A wrong one is timed, too: the allowed error is that of float32 inside, so it is a hint and not
    a law.
    """
    from mixhead_plugin.nn import MixedAttention

    batch, heads, length, head_dim = size
    torch.manual_seed(1)
    upstream = nn.MultiheadAttention(heads * head_dim, heads, batch_first=True)
    modules: dict[str, nn.Module] = {"torch": upstream}
    kinds = {"softmax": "none", "Mixhead A": "position-independent", "Mixhead B": "position-wise"}
    for name, mixing in kinds.items():
        modules[name] = MixedAttention(
            heads * head_dim, heads, batch_first=True, head_mixing=mixing
        )
        modules[name].load_state_dict(upstream.state_dict(), strict=False)
    own = {"device": device, "dtype": getattr(torch, dtype)}
    x = torch.randn(batch, length, heads * head_dim).to(**own).requires_grad_()
    future = torch.full((length, length), float("-inf"), **own).triu(1)

    def results(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = future.to(x.dtype)
        output = module(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]
        gradients = torch.autograd.grad(output.sum(), [x, *module.parameters()])
        return output.detach(), gradients[0]

    for name, module in modules.items():
        module.to(**own)
        if name == "torch":
            continue
        formula = MixedAttention(
            heads * head_dim, heads, batch_first=True, head_mixing=kinds[name], impl="reference"
        )
        formula.load_state_dict(module.state_dict())
        exact = formula.to(device, torch.float64)
        one = x.detach()[:1]
        right = results(exact, one.double().requires_grad_())
        rounded = results(formula.to(**own), one.clone().requires_grad_())
        try:
            check(
                name,
                ("output", "gradient of x"),
                results(module, one.clone().requires_grad_()),
                rounded,
                right,
            )
        except SystemExit as wrong:
            yield {"module": "torch", "name": name, "fault": str(wrong)}
    runs = {name: functools.partial(results, module, x) for name, module in modules.items()}
    return Case("module", core.title(size, 0.0), runs, "softmax")


# ---- the tests ---------------------------------------------------------------------------------


NEED_FAIRSEQ = ["tests/robustness/test_equality.py", "tests/scripts/test_benchmark.py"]
FILES = [*NEED_FAIRSEQ, "tests/ops/test_triton_gpu.py", "tests/ops/test_extreme_scores.py"]


def tests(settings: Settings, step: str) -> Iterator[Row]:
    """Yield the outcome of each test marked gpu, as it ends.

    Tests that need fairseq run only where it is.
    """
    files = list(settings.tests) or FILES
    if importlib.util.find_spec("fairseq") is None:
        files = [name for name in files if name not in NEED_FAIRSEQ]
    if settings.quick:
        files = [
            "tests/ops/test_triton_gpu.py::test_a_captured_graph_draws_new_zeros_at_each_replay"
        ]
    workers = (
        min(cores(), 16) if settings.device == "cuda" and importlib.util.find_spec("xdist") else 0
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu and not slow",
        "-p",
        "no:cacheprovider",
    ]
    # Tests are handed out one by one, so that they begin in the order of the files.
    command += [
        "-p",
        "benchmarks.outcomes",
        *(["-n", str(workers), "--maxschedchunk=1"] if workers else []),
        *files,
    ]
    read, write = os.pipe()
    path = os.pathsep.join([str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OUTCOMES": str(write)}
    environment.pop("TRITON_INTERPRET", None)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[write])
    os.close(write)
    with os.fdopen(read) as lines:
        for line in lines:
            yield json.loads(line)
    if process.wait() not in (0, 1):  # 1: a test has failed, which its row says
        yield {
            "test": "pytest",
            "outcome": "failed",
            "message": f"exit status {process.returncode}, see the log",
        }


# ---- a training --------------------------------------------------------------------------------


def training_steps(settings: Settings) -> list[str]:
    return ["fairseq", "softmax", "Mixhead A", "Mixhead B"]


def training_step(settings: Settings, step: str, updates: int = 100) -> Iterator[Row]:
    """Yield losses and times of 100 updates by fairseq's trainer.

    All variants get the same weights and words.
    """
    from benchmarks import model  # needs fairseq

    arch, vocabulary, batch, length = model.SMALL, 10000, 16, 512
    if settings.quick:
        arch = arch.replace("512", "16").replace("2048", "16").replace("layers 4", "layers 1")
        vocabulary, batch, length, updates = 64, 2, 16, min(updates, 3)
    dtype = "bfloat16" if settings.device == "cuda" else "float32"
    dictionary = model.dictionary_of(vocabulary)
    trainer = model.trainer_of(step, arch, dictionary, length, settings.device, dtype)
    losses, times = [], []
    for update in range(updates):
        sample = model.batch_of(dictionary, batch, length, seed=update % 20)
        synchronize(settings)
        began = time.perf_counter()
        logged = trainer.train_step([sample], raise_oom=True)
        synchronize(settings)
        times.append(1e3 * (time.perf_counter() - began))
        losses.append(float(logged["loss"]))
    row = {"name": step, "updates": len(losses), "ms": statistics.median(times[len(times) // 2 :])}
    row["tokens_per_second"] = batch * length / row["ms"] * 1e3
    for update in (1, 2, 10, 50, 100):
        if update <= updates:
            row[f"loss_{update}"] = losses[update - 1]
    yield row


# ---- the table ---------------------------------------------------------------------------------

# Together these take longer than the six minutes of a report. So they stand in order of worth, and
# the last ones may get less time, or none. `compile` stands before the parts that find on disk what
# it has compiled.
PARTS = {
    "machine": Part("The machine", one_step, machine, seconds=15, limit=15),
    "check": Part("mixhead check", check_steps, check_step, seconds=80, limit=80, parallel=True),
    "compile": Part(
        "First calls", compile_steps, compile_step, seconds=55, limit=55, parallel=True
    ),
    "core": Part("The attention alone", core_steps, core_step, seconds=100, limit=50),
    "kernels": Part("The kernels", kernel_steps, kernel_step, seconds=20, limit=15),
    "tile_compile": Part(
        "Tiles that fail",
        tile_compile_steps,
        tile_compile_step,
        seconds=50,
        limit=50,
        parallel=True,
        asked=True,
    ),
    "tiles": Part("More tiles", tile_steps, tile_step, seconds=40, limit=15, asked=True),
    "tests": Part("The tests marked gpu", one_step, tests, seconds=75, limit=75, needs="pytest"),
    "module": Part("The module", module_steps, module_step, seconds=60, limit=40),
    "decoding": Part("A step of decoding", one_step, decoding, seconds=10, limit=10),
    "training": Part(
        "100 updates", training_steps, training_step, seconds=60, limit=30, needs="fairseq"
    ),
}
