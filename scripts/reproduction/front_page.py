"""The README's table of what was measured, and its caption: of small tables the rows that a reader asks for first."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Optional

from reproduction import gains, results
from reproduction.claims import UNMIXED_COSTS, Evidence, evidence_of
from reproduction.report import ratios, span
from reproduction.results import Study
from reproduction.samples import FEWEST, LEVEL, sample
from reproduction.schema import RATIOS


class Quality(NamedTuple):
    """A column: the test set of a table's rows that begin with `labels`."""

    head: str
    table: str
    labels: Sequence[str]


MODEL = "table7"  # whose ranks and costs are shown, and all of whose rows
TEXT = "WikiText-2"
ROWS = {
    "softmax": "softmax, no mixing",
    "A": "Mixhead A",
    "B": "Mixhead B",
    "random": "random mixing, not learnt",
    "average": "average of the heads",
}
QUALITIES = (
    Quality(f"{TEXT}, 16 heads of 8, 128 tokens: perplexity", MODEL, ()),
    Quality(f"{TEXT}, the same with 512 tokens, half as long trained: perplexity", "table9", ("512",)),
    Quality("Multi30k De-En, 64 heads of 2: BLEU", "table4", ("64",)),
)


class Page(NamedTuple):
    """What there are enough seeds of."""

    columns: Sequence[tuple[Quality, Study]]
    ranked: Optional[Study]
    timed: Optional[Study]
    unmixed: Sequence[Evidence]  # what decoding without mixing costs
    longer: Sequence[Sequence[gains.Trained]]  # rows of the model, after fewer updates before


def page(folder: Path) -> Page:
    studies = {study.table: study for study in results.studies(folder) if study.scale == "small"}
    columns = [(column, studies[column.table]) for column in QUALITIES if column.table in studies]
    model = studies.get(MODEL)
    ranked = model is not None and all(len(model.ranks((label,))) >= FEWEST for label in ROWS)
    timed = model is not None and all(model.cost((label,)).keys() >= set(RATIOS) for label in ROWS)
    whole = [(column, study) for column, study in columns if is_whole(study, column)]
    unmixed = [e for e in evidence_of(UNMIXED_COSTS, list(studies.values())) if len(e.values) >= FEWEST]
    in_order = sorted(studies.values(), key=lambda study: study is not model)  # others may have its runs
    trained = [rows for rows in gains.by_updates(in_order) if all(len(one.by_seed) >= FEWEST for one in rows)]
    longer = [rows for rows in trained if rows[-1].study is model]
    return Page(whole, model if ranked else None, model if timed else None, unmixed, longer)


def table(folder: Path) -> list[list[str]]:
    """Its heads and its rows."""
    columns, ranked, timed, *_ = page(folder)
    heads = ["attention", *(column.head for column, _ in columns)]
    heads += [f"{TEXT}, 128 tokens: effective rank"] if ranked else []
    heads += [f"{TEXT}, 128 tokens: {what}" for what in ("seconds per update", "peak MiB")] if timed else []
    rows = [heads]
    for label, name in ROWS.items():
        cells = [quality(study, (*column.labels, label)) for column, study in columns]
        cells += [spread(ranked.ranks((label,)))] if ranked else []
        cells += costs(timed.cost((label,))) if timed else []
        rows.append([name, *cells])
    return rows


def caption(folder: Path) -> str:
    """What the table's numbers are of."""
    columns, ranked, timed, unmixed, longer = page(folder)
    runs = [run for _, study in columns for run in study.part["runs"]]
    if not runs:
        return ""
    millions = span((run["parameters"] / 1e6 for run in runs if run.get("parameters")), ".1f")
    updates = span((run["updates"] for run in runs if run.get("updates")), ",d")
    devices = ", ".join(sorted({run["device"] for run in runs if run.get("device")}))
    seeds = span((len({run["seed"] for run in study.part["runs"]}) for _, study in columns), "d")
    text = (
        f"Small models: {millions} million parameters after {updates} updates ({devices}), {seeds} seeds. Quality is "
        "of the test set: mean ± standard deviation over the seeds, and the mean gain over softmax with the same seed, "
        f"with its {1 - LEVEL:.0%} interval. "
    )
    if longer:
        gained = [
            f"{ROWS[rows[-1].row[0]]} "
            + " and ".join(f"{fmean(one.by_seed.values()):+.1f} % after {one.updates:,}" for one in rows)
            for rows in longer
        ]
        text += f"At 128 tokens the gains are: {', '.join(gained)} updates. "
    if ranked:
        text += "The effective rank is of the mixed attention matrices, on the validation set. "
    if timed:
        text += (
            "Seconds and memory are of training by the plugin's attention, the process as a whole; in brackets the "
            "ratio to the plugin's own softmax in the same round, the median of the rounds and their range. [Speed and "
            "memory](#speed-and-memory) compares with fairseq's attention. "
        )
    for evidence in unmixed:
        text += (
            "Decoded unmixed, as the published code does, Mixhead A and B lose "
            f"{sample(evidence.values).interval('.1f')} BLEU, the mean over the numbers of heads. "
        )
    return "\n".join(textwrap.wrap(text, 120))


def is_whole(study: Study, column: Quality) -> bool:
    """Whether all of the rows that the table has have enough seeds."""
    found = [study.values(row, "test") for row in study.rows if row[: len(column.labels)] == tuple(column.labels)]
    return bool(found) and all(len(values) >= FEWEST for values in found)


def spread(by_seed: Mapping[int, float]) -> str:
    found = sample(list(by_seed.values()))
    return f"{found.mean:.1f} ± {found.deviation:.1f}"


def quality(study: Study, row: Sequence[str]) -> str:
    """Mean ± deviation over the seeds, and the interval of the gain over softmax; empty for a row it has not."""
    values = study.values(row, "test")
    if not values:
        return ""
    text = spread(values)
    base = study.other(row, "softmax")
    if tuple(row) == base:
        return text
    gain = sample(list(gains.by_seed(study, row, base).values()))
    return f"{text}; gain {gain.interval('+.1f')}{' %' if gains.short_unit(study) == '%' else ''}"


def costs(cost: Mapping[str, Any]) -> list[str]:
    time, memory = f"{cost['seconds_per_update']:.2f}", f"{cost['peak_memory_mib']:.0f}"
    return [time + ratios(cost["time_ratios"]), memory + ratios(cost["memory_ratios"])]
