"""Time, on a CPU by its clock and on a GPU by CUDA events."""

import statistics
import time
from typing import Any, Callable, Dict, List

import torch
from tqdm import tqdm

from benchmarks.cases import Contender, Row, Shape

_WARM_UP = {"cpu": 1, "cuda": 3}  # rounds; a GPU also has to raise its clock
_FLUSHED = 2**28  # bytes, several times the L2 cache of any GPU so far


def measure(
    contenders: Dict[str, Contender], rounds: int, device: str, title: str
) -> Dict[str, Dict[str, List[float]]]:
    """Milliseconds of each pass of each contender, round by round; the first rounds only warm up."""
    times = {name: {kind: [] for kind, f in c._asdict().items() if f is not None} for name, c in contenders.items()}
    milliseconds = _OnGPU() if device == "cuda" else _on_cpu
    bar = tqdm(total=(rounds + _WARM_UP[device]) * len(contenders), desc=title, leave=False, disable=None)
    for round_ in range(-_WARM_UP[device], rounds):
        for name, contender in contenders.items():
            for kind in times[name]:
                took = milliseconds(getattr(contender, kind))
                if round_ >= 0:
                    times[name][kind].append(took)
            bar.update()
    bar.close()
    return times


def _on_cpu(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started)


class _OnGPU:
    """Between two events, with nothing of the inputs left in the L2 cache: what ran before shall not matter.

    The flush has a second use: while the device is at it, Python gets ahead with starting kernels. What of that still
    makes the device wait is part of what one pays, and counts.
    """

    def __init__(self) -> None:
        self.filler = torch.empty(_FLUSHED, dtype=torch.int8, device="cuda")

    def __call__(self, function: Callable[[], Any]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.filler.zero_()
        begin.record()
        function()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def rows_of(level: str, shape: Shape, times: Dict[str, Any], baselines: Dict[str, str]) -> List[Row]:
    """A row for each pass; without a ratio where the baseline has no such pass or was not measured."""
    rows = []
    for name, passes in times.items():
        for kind, values in passes.items():
            p20, p50, p80 = (statistics.quantiles(values, n=10, method="inclusive")[i] for i in (1, 4, 7))
            row = dict(level=level, name=name, **shape._asdict(), passes=kind, p20_ms=p20, p50_ms=p50, p80_ms=p80)
            base = times.get(baselines[name], {}).get(kind)
            if base:
                row.update(ratio=p50 / statistics.median(base), measured_by=baselines[name])
            rows.append(row)
    return rows
