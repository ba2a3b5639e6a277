"""The attention alone at the sizes that fused kernels are for: time and memory beside FlashAttention's.

One contender that fails is not timed, but does not stop the others: the rest of an hour on a GPU is not to be lost. Its
row has the reason, and the command fails in the end. After each check what is known of a table is handed on, so that a
command that is stopped keeps it. Columns beside those of every level:

ratio                    time by that of `measured_by`, FlashAttention with is_causal and the same dropout
speedup_over_eager       the time of the formula in PyTorch for the same variant, same dropout, by this one's: 4 is four
                         times as fast
peak_mib                 memory at its peak beyond what was there, the results included
memory_ratio             the same by that of `measured_by`
memory_ratio_statistics  of Mixhead B, forward and backward pass: by FlashAttention's peak and [B, N, H, H] numbers of
                         the inputs' dtype together. So many has the gradient of a mixing by query, which FlashAttention
                         has not; that of a shared one (Mixhead A) has [H, H], so `memory_ratio` says it all
"""

from argparse import Namespace
from statistics import median
from typing import Any, Dict, Iterator, List

import torch
from tqdm import tqdm

from benchmarks.cases import FAILED, Row, Shape, Unfinished, one_line, unmeasured
from benchmarks.checks import Wrong
from benchmarks.core import VARIANTS, Core, CoreInputs, problem, refusal
from benchmarks.measuring import measure, rows_of
from benchmarks.memory import peaks_on_gpu

PROVIDERS = ["eager", "compiled", "flex", "blockwise", "triton"]  # beside torch's own
UNTIMED = "right, but the command was stopped before its time was taken"


def cores(dropout_p: float, providers: List[str]) -> List[Core]:
    found = [Core(provider, causal_flag=True, dropout_p=p) for provider in ("flash", "torch") for p in (0.0, dropout_p)]
    for provider in PROVIDERS:
        found += [Core(provider, *variant) for variant in VARIANTS]
    for provider in ("blockwise", "triton"):
        found += [Core(provider, mixing=mixing, dropout_p=dropout_p) for mixing in ("none", "A", "B")]
    return [core for core in found if core.provider in ("flash", "torch", *providers)]


def baseline(core: Core, device: str) -> Core:
    """FlashAttention; on a CPU, where torch chooses it for itself, what torch chooses"""
    return Core("flash" if device == "cuda" else "torch", causal_flag=True, dropout_p=core.dropout_p)


def tables(options: Namespace) -> Iterator[List[Row]]:
    for head_dim in options.grid_head_dims:
        for length in options.grid_lengths:
            yield from table(options, Shape(options.batch, options.heads, length, head_dim))


def table(options: Namespace, shape: Shape) -> Iterator[List[Row]]:
    """The rows of one size, and before them what is known after each check"""
    title = f"grid {shape.length} x {shape.head_dim}"
    inputs = CoreInputs(shape, options.device, getattr(torch, options.dtype))
    chosen = cores(options.dropout, options.providers)
    reasons, contenders, peaks = {}, {}, {}
    for core in tqdm(chosen, desc=f"{title}: are all right?", leave=False, disable=None):
        reason = problem(core, options.device, options.dtype) or _attempt(inputs, core)
        if reason:
            reasons[core.name] = reason
        else:
            contenders[core.name] = inputs.contender(core)
        yield Unfinished(unmeasured("grid", shape, {**dict.fromkeys(contenders, UNTIMED), **reasons}))
    times = measure(contenders, options.rounds, options.device, title)
    rows = rows_of("grid", shape, times, {core.name: baseline(core, options.device).name for core in chosen})
    add_speedups(rows, times, chosen)
    if options.device == "cuda":
        peaks = {name: peaks_on_gpu(contender) for name, contender in contenders.items()}
        add_memory(rows, peaks, inputs.tensors["B"].nbytes / 2**20)
    yield rows + unmeasured("grid", shape, reasons)


def _attempt(inputs: CoreInputs, core: Core) -> str:
    """Why it cannot be timed, now that it has run; empty if it can."""
    try:
        return refusal(inputs, core)
    except Wrong as error:
        reason = FAILED + str(error)
    except Exception as error:  # whatever a compiler may say
        reason = FAILED + f"{type(error).__name__}: {one_line(error)}"
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise SystemExit(f"{core.name}: {reason}; the device is lost with it: {one_line(error)}") from error
    return reason


def add_speedups(rows: List[Row], times: Dict[str, Dict[str, Any]], chosen: List[Core]) -> None:
    """How many times as fast as the formula, where that was timed."""
    by_eager = {core.name: core._replace(provider="eager", causal_flag=False).name for core in chosen}
    for row in rows:
        formula = times.get(by_eager[row["name"]])
        if formula:
            row["speedup_over_eager"] = median(formula[row["passes"]]) / row["p50_ms"]


def add_memory(rows: List[Row], peaks: Dict[str, Dict[str, float]], statistics_mib: float) -> None:
    """The peaks into the rows, and their ratios to those of what the time is measured by; `statistics_mib` is the size
    of [B, N, H, H] numbers in the inputs' dtype."""
    for row in rows:
        row["peak_mib"] = mib = peaks[row["name"]][row["passes"]]
        if "measured_by" not in row:
            continue
        base = peaks[row["measured_by"]][row["passes"]]
        row["memory_ratio"] = mib / base
        if "Mixhead B" in row["name"] and row["passes"] == "full":
            row["memory_ratio_statistics"] = mib / (base + statistics_mib)
