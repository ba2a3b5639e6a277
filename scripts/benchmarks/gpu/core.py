"""The part `core`: the times of the attention alone."""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks import core
from benchmarks.gpu.settings import Settings, synchronize
from benchmarks.measure import Case, measure
from benchmarks.opponents import OPPONENTS, problem
from benchmarks.steps import Row, one_line
from mixhead_plugin.ops.triton import support

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

TORCHS = ("flash", "is_causal")  # torch's own attention, in half precision and in float32
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
    with mock.patch.object(support, "trial_fault", lambda inputs: ""):
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
    """Yield a row for each contender that has such passes: "forward" alone, or "both".

    A row has no ratio to torch's attention, or to the plugin's softmax, if that is not among them.
    """
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
    case = Case("core", "", runs, own if own in runs else "")
    left_out = ["case", "size"]
    if right[0].provider not in TORCHS:
        left_out.append("by_upstream")  # to whatever comes first
    for row in measure(case, 2 if settings.quick else 15, settings.device):
        kept = {name: value for name, value in row.items() if name not in left_out}
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
