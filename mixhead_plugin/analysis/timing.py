"""Median times, fair on a machine that others use too."""

import statistics
import time
from typing import Callable, Dict, List

import torch


def medians(functions: Dict[str, Callable[[], object]], repetitions: int = 7) -> Dict[str, float]:
    """Median seconds of each function; one call of each warms up, then they take turns.

    Args:
        functions: by name
        repetitions: of each
    """
    seconds: Dict[str, List[float]] = {name: [] for name in functions}
    for repetition in range(repetitions + 1):
        for name, function in functions.items():
            _wait()
            start = time.perf_counter()
            function()
            _wait()
            if repetition > 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _wait() -> None:
    """What was given to the GPU is to be done before the clock is read."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
