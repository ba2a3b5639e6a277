"""The part `machine`: versions, compilers, and how fast the device copies and multiplies."""

import os
import shutil
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.settings import Settings
from benchmarks.steps import Row
from mixhead_plugin.check.machine import machine_facts


def machine(settings: Settings, step: str) -> Iterator[Row]:
    """Yield versions, the device, and what compilers need."""
    for name, value in machine_facts(torch.device(settings.device)).items():
        yield {"what": name, "found": value}
    yield {"what": "CUDA of torch", "found": str(torch.version.cuda)}
    yield {"what": "cuDNN of torch", "found": str(torch.backends.cudnn.version())}
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
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        if i >= 0:
            found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)
