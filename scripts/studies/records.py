"""The records of runs: run.json of each, and the files of results that report.py --save writes.

Records stay plain dicts, so that a file that is written again keeps what a later version adds.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict

from studies.faults import fault_of

# A later version may write more fields.
OPEN = ConfigDict(strict=True, extra="allow")

# JSON has numbers of any size; fairseq's seeds are of 64 bits.
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Flags = dict[str, list[str]]  # flag or variable -> values, as runs.canonical returns them


def _has_update(point: dict[str, float]) -> dict[str, float]:
    if "update" not in point:
        raise ValueError("must have an update")
    return point


# A point of a training's log: update, tokens, cpu_seconds, train_loss or valid_loss, ... A loss is
# NaN where the training diverged, which is a result, too.
LogPoint = Annotated[dict[str, float], AfterValidator(_has_update)]


@with_config(OPEN)
class RunRecord(TypedDict):
    """What sweep.py knows of a run."""

    labels: dict[str, str]  # axis -> label
    seed: Seed
    digest: str  # of the flags of the training
    example: NotRequired[str]
    device: NotRequired[str | None]
    versions: dict[str, str]  # package -> version
    commit: NotRequired[str | None]
    data: NotRequired[str | None]  # SHA-256 of the text; None where the task draws its own
    date: NotRequired[str]
    threads: NotRequired[int | None]
    train: NotRequired[Flags]  # the grid's words
    flags: NotRequired[Flags | None]  # those of fairseq-train, with the recipe's
    trained: NotRequired[bool]
    points: NotRequired[list[LogPoint]]
    valid_loss: NotRequired[float]  # of the last validation
    seconds: Number
    cpu_seconds: NotRequired[Number]
    peak_memory_mib: NotRequired[Number]
    evaluate: NotRequired[dict[str, Flags]]  # metric -> the words that it was evaluated with
    metrics: dict[str, Number]
    measures: NotRequired[dict[str, str]]  # metric -> what evaluate.sh calls it
    measure: NotRequired[str]  # in older files: the measure of all metrics


def measure_of(run: Mapping[str, Any], metric: str) -> str:
    """Return what evaluate.sh calls a metric of a run, such as 'BLEU'; empty if it is not known.

    Older files have one name for all metrics.
    """
    return run.get("measures", {}).get(metric) or run.get("measure", "")


def is_perplexity(measure: str) -> bool:
    """Return True for every perplexity, such as LM1B's 'perplexity per word'.

    Gains of perplexities are differences of their logarithms.
    """
    return measure.startswith("perplexity")


def _has_measures(run: RunRecord) -> RunRecord:
    """Check that every metric has a measure, and a perplexity a logarithm.

    The measure says whether less is better.
    """
    for metric, value in run["metrics"].items():
        measure = measure_of(run, metric)
        if not measure:
            raise ValueError(f"the metric {metric!r} must be among its measures")
        if is_perplexity(measure) and value <= 0:
            raise ValueError(f"the perplexity {metric!r} must be above 0, not {value:g}")
    return run


CheckedRun = Annotated[RunRecord, AfterValidator(_has_measures)]


@with_config(OPEN)
class CostRow(TypedDict):
    labels: dict[str, str]
    time_ratios: NotRequired[list[Number]]  # the baseline's of the same round has 1


@with_config(OPEN)
class Cost(TypedDict):
    """Speed and memory of small trainings, measured in turn."""

    rows: NotRequired[list[CostRow]]


@with_config(OPEN)
class Results(TypedDict):
    """A file that report.py --save wrote."""

    grid: str  # the grid's file
    runs: Annotated[list[CheckedRun], Field(min_length=1)]
    cost: NotRequired[Cost]


_RUN = TypeAdapter(CheckedRun)
_RESULTS = TypeAdapter(Results)


def read_run(path: Path) -> dict[str, Any]:
    """Read a run.json. Raises OSError, and ValueError that names the bad field."""
    return _read(path, _RUN)


def read_results(path: Path) -> dict[str, Any]:
    """Read a file of results. Raises OSError, and ValueError that names the bad field."""
    return _read(path, _RESULTS)


def _read(path: Path, schema: TypeAdapter) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    try:
        schema.validate_python(content)
    except ValidationError as error:
        raise ValueError(fault_of(error)) from error
    # not what the schema returns: the file's own order of fields
    return content


def write_results(
    path: Path, grid: str, runs: Sequence[Mapping[str, Any]], cost: Mapping[str, Any]
) -> None:
    """Write a file of results, a line for each run; whole or not at all.

    The file may be the only copy of the runs that it replaces.
    """
    lines = [f'{{"grid": {json.dumps(grid)},']
    if cost:
        lines.append(f' "cost": {json.dumps(cost)},')
    lines.append(' "runs": [')
    lines.append(",\n".join(f"  {json.dumps(run)}" for run in runs))
    lines.append(" ]}")
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
    unfinished.replace(path)
