"""The table of a study, and the comparison of two of its rows."""

import math
import statistics
from collections.abc import Collection, Sequence

from studies import planned
from studies.faults import fail
from studies.inference import Estimate
from studies.markdown import escaped, shown_p, table
from studies.study import LOSS, LOWER_IS_BETTER, Row, Study, gain, row_of


def markdown(study: Study) -> str:
    """Return the heading, the facts and the table of a study."""
    parts = [f"## {study.grid.title}", facts(study)]
    if study.waits:
        parts += [rows_table(study), planned.not_ended(study)]
    elif planned.has_own_table(study):
        parts += [rows_table(planned.with_whole_seeds(study)), planned.own_table(study)]
    else:
        parts.append(rows_table(study))
    return "\n\n".join(parts) + "\n"


# ---- facts -------------------------------------------------------------------------------------


def facts(study: Study) -> str:
    """Return a list of facts about the runs, with all values that occur."""
    seconds = [run["seconds"] for run in study.runs]
    seeds = [run["seed"] for run in study.runs]
    lines = [
        f"Grid: `{study.source}`; {len(study.rows)} of {len(study.grid.points)} rows.",
        f"Runs: {len(study.runs)}, {min(seconds) / 60:.0f} to {max(seconds) / 60:.0f} minutes "
        f"each; {all_of(study, 'device')}.",
        f"Seeds: {min(seeds)} to {max(seeds)}.",
    ]
    data = all_of(study, "data")
    if data:  # a task may draw its own
        lines.append(f"Text: SHA-256 {data}.")
    lines.append(f"Commits: {all_of(study, 'commit')}.")
    lines.append(f"Versions: {', '.join(versions(study))}.")
    return "\n".join(f"- {line}" for line in lines)


def all_of(study: Study, name: str) -> str:
    """Return the values of a field of the runs, each once."""
    values = [escaped(run[name]) for run in study.runs if run.get(name)]
    return "; ".join(dict.fromkeys(values))


def versions(study: Study) -> list[str]:
    packages = set()
    for run in study.runs:
        for package, version in run["versions"].items():
            packages.add(escaped(f"{package} {version}"))
    return sorted(packages)


# ---- the table ---------------------------------------------------------------------------------


def rows_table(study: Study) -> str:
    """Return the table of all rows; columns that no row has are left out."""
    metrics = shown_metrics(study)
    gained = compared_metrics(study)

    head = [*study.grid.axes, "paper"]
    for metric in metrics:
        head.append(f"{metric}, {escaped(study.measure(metric))}")
    for metric in gained:
        head += [f"gain in {metric}, {study.unit(metric)}", "p"]
    head.append("training time, ratio")  # divided by the baseline's of the same round

    times = {row_of(cost): cost.get("time_ratios", []) for cost in study.cost.get("rows", [])}
    lines = []
    for row in study.rows:
        line = [*row, study.published(row)]
        line += [value_cell(study, row, metric) for metric in metrics]
        for metric in gained:
            line += gain_cells(study, gain(study, row, metric=metric), metric)
        line.append(median(times.get(row, [])))
        lines.append(line)

    # Columns, each with its title, become lines again.
    columns = [column for column in zip(head, *lines) if any(column[1:])]
    used, *rest = zip(*columns)
    return table(used, rest)


def shown_metrics(study: Study) -> list[str]:
    """Return the metrics that have a column."""
    return [*study.metrics, LOSS] if has_loss_beside(study) else study.metrics


def compared_metrics(study: Study) -> list[str]:
    """Return the metrics that rows are compared by.

    There are none where nobody may look at results yet, where the study's own table compares, and
    where no row has a baseline.
    """
    if study.waits or planned.has_own_table(study):
        return []
    if not any(study.baseline(row) for row in study.rows):
        return []
    if has_loss_beside(study):
        return [study.metric, LOSS]
    # a planned experiment has all its metrics compared
    return study.metrics if study.grid.seeds else [study.metric]


def has_loss_beside(study: Study) -> bool:
    """Return True if the validation loss stands beside a metric like BLEU, which is none."""
    if study.measure(study.metric).startswith(LOWER_IS_BETTER):
        return False
    return any(study.values(row, LOSS) for row in study.rows)


# ---- its cells ---------------------------------------------------------------------------------


def value_cell(study: Study, row: Row, metric: str) -> str:
    if not study.grid.measures(row, metric):
        return ""
    values = study.values(row, metric).values()
    if study.waits:
        return f"{len(values)} runs"
    return spread(values, study.decimals(metric))


def spread(values: Collection[float], decimals: int) -> str:
    """Return '104.67 ± 5.03 (3)': mean, standard deviation and number.

    The loss of a training that diverged is NaN, so the mean is, too: 'nan (3)'.
    """
    if not values:
        return "not run"
    mean = statistics.fmean(values)
    text = f"{mean:.{decimals}f}"
    # statistics.stdev fails with an AttributeError on NaN
    if len(values) > 1 and math.isfinite(mean):
        text += f" ± {statistics.stdev(values):.{decimals}f}"
    return f"{text} ({len(values)})"


def gain_cells(study: Study, estimate: Estimate | None, metric: str) -> list[str]:
    """Return the mean with its interval, and p."""
    if estimate is None:
        return ["", ""]
    if math.isnan(estimate.mean):  # a training diverged
        return ["nan", ""]
    decimals = study.decimals(metric)
    mean = f"{estimate.mean:+.{decimals}f}"
    if math.isnan(estimate.p):
        return [mean, ""]
    interval = f"[{estimate.low:+.{decimals}f}, {estimate.high:+.{decimals}f}]"
    return [f"{mean} {interval}", shown_p(estimate.p)]


def median(ratios: Sequence[float]) -> str:
    """Return '1.40 [1.30, 1.50]', with the smallest and the largest; empty without any."""
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


# ---- two rows ----------------------------------------------------------------------------------


def comparison(study: Study, words: Sequence[str]) -> str:
    """Return a line about two rows, each named by its labels with commas between them."""
    if study.waits:
        fail(
            f"--compare: {study.source} shows no result before {study.grid.seeds} seeds have every "
            "point"
        )
    named = {",".join(row): row for row in study.rows}
    for name in words:
        if name not in named:
            fail(f"--compare {name}: has no run; must be among {'; '.join(named)}")
    one, other = words
    if one == other:
        fail(f"--compare {one} {other}: must be two different rows")
    row = named[one]
    base = named[other]
    estimate = gain(study, row, base)
    if estimate is None:
        fail(f"--compare {one} {other}: have no seed in common")

    mean, p = gain_cells(study, estimate, study.metric)
    parts = [f"{one} over {other}: {mean} {study.unit(study.metric)}, {study.metric}"]
    count = estimate.count
    parts.append(f"{count} seeds, p {p}" if p else f"{count} seeds, no interval")
    ratio = median(study.time_ratios(row, base))
    if ratio:
        parts.append(f"CPU time of the updates, ratio {ratio}")
    return "; ".join(parts)
