"""Check results, then measure time and memory."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixhead_plugin.parts import PARTS

# the second counts what all threads work
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
WARM_UP = {"cpu": 1, "cuda": 3}  # rounds; a GPU has to raise its clock
HEAD_START = 6_000_000  # clocks of the device, some 3 ms, in which the host starts most contenders
FLUSHED = 2**28  # bytes, several times the L2 cache of any GPU so far


@dataclass(frozen=True)
class Case:
    """Contenders for the same work; each was checked."""

    name: str
    size: str
    contenders: Mapping[str, Callable[[], Any]]  # that of torch or fairseq first
    softmax: str = ""  # the plugin's own softmax; empty if it is not among them


def end_if_wrong(fault: str) -> None:
    """End the command before it times a wrong result; `fault` is what `fault_of` returned."""
    if fault:
        sys.exit(f"{fault}; nothing is timed")


def fault_of(
    name: str,
    parts: Sequence[str],
    got: Sequence[Tensor],
    formula: Sequence[Tensor],
    exact: Sequence[Tensor],
    norm: float = math.inf,
    rounding: float = 0.0,
) -> str:
    """Return which error is too large; an empty string if none is.

    An error may be twice the formula's in the same dtype, and rounding.

    Args:
        name: of the contender
        parts: the names of the results
        got: the results
        formula: those of the formula, in the same dtype
        exact: those of the formula in float64
        norm: the order of the norm that errors are measured by
        rounding: the share of the exact norm that rounding may add; 0 for that of the dtypes
    """
    for part, value, by_formula, right in zip(parts, got, formula, exact, strict=True):
        eps = rounding or torch.finfo(value.dtype).eps + 100 * torch.finfo(right.dtype).eps
        error = torch.linalg.vector_norm(value - right, norm)
        own = torch.linalg.vector_norm(by_formula - right, norm)
        size = torch.linalg.vector_norm(right, norm)
        allowed = 2 * own + eps * size
        is_right = error <= allowed  # False for NaN on either side, too
        if not is_right:
            return f"{name}: {part} is wrong by {error:.2g}, {allowed:.2g} is allowed"
    return ""


def shake(model: torch.nn.Module) -> None:
    """Move what flags add away from its start, so that errors in it show."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if PARTS.keys() & set(name.split(".")):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def milliseconds(
    function: Callable[[], Any], clock: Callable[[], float], filler: Tensor | None
) -> float:
    if filler is None:
        began = clock()
        function()
        return 1e3 * (clock() - began)
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    filler.zero_()  # empties the L2 cache
    torch.cuda._sleep(HEAD_START)  # meanwhile Python gets ahead with starting kernels
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(case: Case, rounds: int, device: str, clock: str = "wall") -> list[dict[str, Any]]:
    """Time the contenders in turn.

    A ratio is the median over rounds of two times of the same round. There is none to a softmax
    that is not among the contenders.
    """
    filler = torch.empty(FLUSHED, dtype=torch.int8, device="cuda") if device == "cuda" else None
    times: dict[str, list[float]] = {name: [] for name in case.contenders}
    for i in range(-WARM_UP[device], rounds):
        for name, function in case.contenders.items():
            took = milliseconds(function, CLOCKS[clock], filler)
            if i >= 0:
                times[name].append(took)
    rows = []
    upstream = next(iter(case.contenders))
    for name, values in times.items():
        row = {"case": case.name, "size": case.size, "name": name, "ms": statistics.median(values)}
        row |= {"ms_min": min(values), "ms_max": max(values)}
        for column, base in (("by_upstream", upstream), ("by_softmax", case.softmax)):
            if base:
                row[column] = statistics.median(a / b for a, b in zip(values, times[base]))
        if device == "cuda":
            row["peak_mib"] = peak_on_gpu(case.contenders[name])
        rows.append(row)
    return rows


def peak_on_gpu(function: Callable[[], Any]) -> float:
    """Return the peak of torch's memory less that at the start, in MiB."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def resident(field: str) -> int:
    """Return the KiB of this process in memory, now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
