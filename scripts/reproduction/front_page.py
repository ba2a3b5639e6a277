"""The README's table of what was measured: of small tables the rows that a reader asks for first."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from reproduction import gains, results
from reproduction.results import Study
from reproduction.samples import FEWEST, sample


class Quality(NamedTuple):
    """A column: the test set of a table's rows that begin with `labels`."""

    head: str
    table: str
    labels: Sequence[str]


ROWS = {"softmax": "softmax, fairseq's own", "A": "Mixhead A", "B": "Mixhead B"}
QUALITIES = (
    Quality("WikiText-2, 16 heads of 8: perplexity", "table7", ()),
    Quality("Multi30k De-En, 64 heads of 2: BLEU", "table4", ("64",)),
)
MODEL = "table7"  # whose ranks and costs are shown


def table(folder: Path) -> list[list[str]]:
    """Its heads and its rows; columns that not all rows have enough seeds for are left out."""
    studies = {study.table: study for study in results.studies(folder) if study.scale == "small"}
    columns = [column for column in QUALITIES if column.table in studies and is_whole(studies[column.table], column)]
    model = studies[MODEL]
    timed = all(model.cost((label,)) for label in ROWS)
    heads = ["attention", *(column.head for column in columns), "effective rank"]
    rows = [heads + (["seconds per update", "peak memory"] if timed else [])]
    for label, name in ROWS.items():
        cells = [quality(studies[column.table], (*column.labels, label)) for column in columns]
        cells.append(f"{sample(list(model.ranks((label,)).values())).mean:.1f}")
        if timed:
            cells += costs(model.cost((label,)))
        rows.append([name, *cells])
    return rows


def is_whole(study: Study, column: Quality) -> bool:
    return all(len(study.values((*column.labels, label), "test")) >= FEWEST for label in ROWS)


def quality(study: Study, row: Sequence[str]) -> str:
    """Mean ± deviation over the seeds, and the interval of the gain over softmax."""
    ours = sample(list(study.values(row, "test").values()))
    text = f"{ours.mean:.1f} ± {ours.deviation:.1f}"
    base = study.other(row, "softmax")
    if tuple(row) == base:
        return text
    gain = sample(list(gains.by_seed(study, row, base).values()))
    unit = gains.short_unit(study)
    interval = f"[{gain.mean - gain.margin:+.1f}, {gain.mean + gain.margin:+.1f}]"
    return f"{text}; gain {gain.mean:+.1f}{'%' if unit == '%' else ''} {interval}"


def costs(cost: Mapping[str, float]) -> list[str]:
    return [
        f"{cost['seconds_per_update']:.2f} ({cost['time_ratio']:.2f})",
        f"{cost['peak_memory_mib']:.0f} MiB ({cost['memory_ratio']:.2f})",
    ]
