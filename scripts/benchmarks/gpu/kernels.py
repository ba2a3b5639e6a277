"""The part `kernels`: time and resources of every kernel with the tiles of tuning.py."""

import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks import core
from benchmarks.gpu.settings import Settings
from benchmarks.steps import Row, one_line

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
    from mixhead_plugin.ops.triton import calls, passes, tuning  # imports triton

    shape, dtype, mixing = (REHEARSED_KERNELS if settings.quick else MEASURED_KERNELS)[case]
    inputs = core.Inputs(tuple(map(int, shape.split("x"))), settings.device, dtype)
    call = inputs.call(core.Core("triton", mixing=mixing), 0.0)
    call = call.with_tensors({name: tensor.detach() for name, tensor in call.operands().items()})
    found: list[Launch] = []

    def run(key: Any, tiles: list[Any], launch: Callable[[Any], Any], device: torch.device) -> Any:
        found.append(Launch(key[0], tiles, launch))
        return tuning.first_fitting(tiles, launch)[1]

    # One strip: each kernel is launched for all queries.
    memory = {"MIXHEAD_STRIP_MIB": "65536"}
    with mock.patch.object(tuning, "run", run), mock.patch.dict(os.environ, memory):
        made = calls.Call(call)
        output, statistics = passes.forward(made)
        passes.backward(made, inputs.d_output, statistics, output)
    return found


def measured(settings: Settings, launch: Launch, tile: Any, timed: bool = True) -> Row:
    """Return time and resources of a kernel with a tile, or the error that it ends with."""
    from mixhead_plugin.ops.triton import programs, tuning  # imports triton

    row: Row = {"kernel": launch.kernel, "tile": "x".join(map(str, tile))}
    start = programs.start

    def recording(kernel: Any, n_programs: int, arguments: dict[str, Any], tile: Any) -> None:
        row.update(resources(start(kernel, n_programs, arguments, tile)), programs=n_programs)

    with mock.patch.object(programs, "start", recording):
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


def resources(compiled: Any) -> Row:
    """Return what a compiled kernel takes, and how many programs fit a multiprocessor.

    triton reports it.
    """
    if not hasattr(compiled, "n_regs"):
        return {}
    metadata = compiled.metadata
    known = torch.cuda.get_device_properties()
    threads = 32 * metadata.num_warps
    # A warp gets registers in steps of 256.
    registers_of_warp = 256 * math.ceil(32 * compiled.n_regs / 256)
    registers = registers_of_warp * metadata.num_warps
    all_registers = getattr(known, "regs_per_multiprocessor", 65536)
    # The driver takes 1 KiB of shared memory for each program.
    shared = metadata.shared + 1024
    all_shared = getattr(known, "shared_memory_per_multiprocessor", 228 * 1024)
    fitting = {
        "registers": all_registers // registers,
        "threads": known.max_threads_per_multi_processor // threads,
        "shared": all_shared // shared,
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
