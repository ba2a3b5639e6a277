"""Compare the whole, the masked and the smaller model: their sizes, scores and times."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.benchmark import Timer

from mixhead_plugin.fairseq.analysis import scores
from mixhead_plugin.fairseq.analysis.adapter import prunable
from mixhead_plugin.fairseq.analysis.loading import Loaded
from mixhead_plugin.heads.choosing import all_heads

TIMED_BATCHES = 4
TITLES = {
    **scores.METRICS,
    "forward_s": f"scoring of {TIMED_BATCHES} batches at most (s)",
    "decoding_ms": "decoding of a batch (ms a token)",
}


def sizes_scores_times(
    loaded: Loaded, batches: scores.Batches, metrics: Sequence[str]
) -> dict[str, Any]:
    """Return the sizes, the scores and the times of a model.

    Args:
        loaded: the model
        batches: the data; the times are those of the first ones
        metrics: keys of `scores.METRICS`
    """
    report: dict[str, Any] = {**sizes(loaded), **scores.score(loaded, batches, metrics)}
    some = batches[:TIMED_BATCHES]
    report["forward_s"] = seconds(partial(scores.criterion_averages, loaded, some))
    if scores.translates(loaded):
        translate = partial(scores.translate, loaded, some[:1])
        # A token, because two models write translations of different lengths.
        tokens = sum(len(translation) for translation in translate()[0])
        report["decoding_ms"] = 1000 * seconds(translate) / tokens
    return report


def sizes(loaded: Loaded) -> dict[str, int]:
    """Return the numbers of parameters and of heads of a model."""
    stages = [head.stage for head in all_heads(prunable(loaded))]
    report = {
        "parameters": sum(p.numel() for p in loaded.model.parameters()),
        "heads": stages.count("mixed"),
    }
    if "source" in stages:
        report["source heads"] = stages.count("source")
    return report


def seconds(function: Callable[[], object]) -> float:
    """Return the median time of a call."""
    threads = torch.get_num_threads()
    timer = Timer("function()", globals={"function": function}, num_threads=threads)
    return timer.blocked_autorange().median


def table_of(report: dict[str, dict[str, Any]]) -> str:
    """Return a table with a column for each model; `report` has its numbers, by model and row."""
    models = ("whole", "masked", "pruned")
    lines = [" " * 36 + "".join(f"{name:>12s}" for name in models)]
    for row in report["whole"]:
        cells = "".join(f"{_cell(report[name].get(row)):>12s}" for name in models)
        lines.append(f"{TITLES.get(row, row):36s}{cells}")
    return "\n".join(lines)


def _cell(value: float | int | None) -> str:
    if value is None:  # a masked model is as large and as fast as the whole one
        return ""
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
