"""The peak of memory beyond what was there."""

import ctypes
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Dict, Iterator, List

import torch
from tqdm import tqdm

from benchmarks.cases import HAS_FAIRSEQ, Contender, Row, Shape, unmeasured
from benchmarks.core import VARIANTS, Core, CoreInputs, cores, problem
from benchmarks.models import steps
from benchmarks.modules import MIXINGS, module_problem, modules

_COMMAND = Path(__file__).parents[1] / "benchmark.py"


def peak_memory(level: str, name: str, options: Namespace, shape: Shape) -> Dict[str, float]:
    """MiB that each pass needs at its peak beyond what was there before; on a CPU, run it in a fresh process."""
    dtype = getattr(torch, options.dtype)

    def build(shape: Shape) -> Contender:
        if level == "module":
            return modules(shape, options.dropout, options.device, dtype).contenders[name]
        if level == "step":
            return steps(shape, options.dropout, options.device)[name]
        (core,) = [core for core in cores(options.dropout) if core.name == name]
        with_mask = core.provider in ("eager", "compiled")
        return CoreInputs(shape, options.device, dtype, with_mask).contender(core)

    build(shape._replace(length=min(256, shape.length))).full()  # libraries load, threads start
    contender = build(shape)
    if options.device == "cuda":
        contender.full()  # tiles are chosen, for this size
        return peaks_on_gpu(contender)
    peaks = {}
    for kind, function in (("forward", contender.forward), ("full", contender.full)):
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free but kept would hide what is needed: malloc_trim(3)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts here: proc(5)
        before = _resident("VmRSS")
        result = function()
        peaks[kind] = (_resident("VmHWM") - before) / 2**10
        del result
    return peaks


def peaks_on_gpu(contender: Contender) -> Dict[str, float]:
    """MiB of each pass, by torch's own account, of a contender that has run before"""
    peaks = {}
    for kind, function in (("forward", contender.forward), ("full", contender.full)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        peaks[kind] = (torch.cuda.max_memory_allocated() - before) / 2**20
        del result
    return peaks


def _resident(field: str) -> int:
    """KiB of this process in memory, now (VmRSS) or at most (VmHWM), by Linux's account."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":")]
    return int(line.split()[1])


def memory_rows(options: Namespace, level: str, names: List[str], shape: Shape) -> List[Row]:
    """The first of the names is what the others are measured by."""
    found = {}
    for name in tqdm(names, desc=f"memory of {level}, {shape.length}", leave=False, disable=None):
        command = [sys.executable, str(_COMMAND), "--device", options.device, "--dtype", options.dtype]
        command += ["--dropout", str(options.dropout), "--memory-of", json.dumps([level, name, shape])]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"memory of {name} at {shape.length}: {result.stderr.strip().splitlines()[-1]}")
        found[name] = json.loads(result.stdout.splitlines()[-1])
    rows = []
    for name, peaks in found.items():
        for kind, mib in peaks.items():
            figures = dict(peak_mib=mib, ratio=mib / max(found[names[0]][kind], 0.001), measured_by=names[0])
            rows.append(dict(level=f"{level} memory", name=name, **shape._asdict(), passes=kind, **figures))
    return rows


def tables(options: Namespace) -> Iterator[List[Row]]:
    fused = options.device == "cuda" and options.dtype in ("float16", "bfloat16")
    chosen = [Core("flash" if fused else "torch", causal_flag=True)]
    chosen += [Core("mixhead_plugin", *variant) for variant in VARIANTS[1:]]
    chosen += [Core("mixhead_plugin", mixing="B", dropout_p=options.dropout)]
    chosen += [Core("triton", *variant) for variant in VARIANTS]
    chosen += [Core("triton", mixing="B", dropout_p=options.dropout)]
    chosen += [Core("eager", mixing=mixing) for mixing in "AB"]
    for length in options.memory_lengths:
        reasons = {core.name: problem(core, options.device, options.dtype) for core in chosen}
        if length > options.eager_up_to:
            reasons.update({c.name: f"--eager-up-to {options.eager_up_to}" for c in chosen if c.provider == "eager"})
        yield _table(options, "core", reasons, Shape(1, options.heads, length, options.head_dim))
    shape = Shape(max(1, options.tokens // 512), options.heads, 512, options.head_dim)
    ours = [f"mixhead_plugin: {label}" for label in MIXINGS]
    missing = "" if HAS_FAIRSEQ else "needs fairseq, which is not installed"
    dtype = getattr(torch, options.dtype)
    for level in ("module", "step"):
        names = ["fairseq", *ours, "mixhead_plugin: Mixhead B, reference"]
        reasons = dict.fromkeys(names, missing)
        if level == "module":
            fused_problem = missing or module_problem("triton", options.device, dtype)
            reasons.update({f"{name}, triton": fused_problem for name in ours})
        elif not missing and options.dtype != "float32":
            reasons = dict.fromkeys(names, f"--dtype {options.dtype}: step runs in float32")
        yield _table(options, level, reasons, shape)


def _table(options: Namespace, level: str, reasons: Dict[str, str], shape: Shape) -> List[Row]:
    """Of every name in `reasons` that has none"""
    rows = memory_rows(options, level, [name for name, reason in reasons.items() if not reason], shape)
    return rows + unmeasured(f"{level} memory", shape, {name: reason for name, reason in reasons.items() if reason})
