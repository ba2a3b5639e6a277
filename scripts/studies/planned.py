"""The tables of the experiments that docs/protocol.md registered. A grid names its own.

- steps: of recall, in 'Able, or only faster?'
- errors: of nearest neighbour, in the same experiment
- lasting: 'Does it last?'
- units: 'Where l2 helps'
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy import stats

from studies.comparisons import gains
from studies.effects import along
from studies.inference import Estimate, growth, holm, paired, shared
from studies.markdown import shown, shown_p, table, times_smaller
from studies.study import Row, Study

NEVER = math.inf  # the steps of a training that has not learned


# ---- recall: the share that learned, and the steps that it took --------------------------------


# Trainings of this grid end when they have learned: at the first validation loss of at most
# --stop-at, or at their last step.


def steps_taken(run: Mapping[str, Any]) -> float:
    """Return the step of the first validation loss that is small enough; NEVER without one."""
    enough = float(run["train"]["--stop-at"][0])
    for point in run["points"]:
        if point.get("valid_loss", math.inf) <= enough:
            return int(point["update"])
    return NEVER


def steps(study: Study, row: Row) -> dict[int, float]:
    """Return the steps by seed."""
    return {run["seed"]: steps_taken(run) for run in study.runs_of(row)}


@dataclass(frozen=True)
class Sign:
    """How many seeds learned in fewer steps than with the other attention, and the sign test."""

    faster: int
    slower: int
    ties: int
    p: float  # two-sided; 1 if all seeds are ties


def sign_test(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Sign:
    """Compare the steps of the seeds that both have.

    A seed that learned is faster than one that never did. Two that never did are a tie, and ties
    say nothing about which is faster, so the test leaves them out.
    """
    pairs = shared(ours, theirs).values()
    faster = sum(one < other for one, other in pairs)
    slower = sum(one > other for one, other in pairs)
    if faster + slower == 0:
        return Sign(0, 0, len(pairs), 1.0)
    p = stats.binomtest(faster, faster + slower).pvalue
    return Sign(faster, slower, len(pairs) - faster - slower, float(p))


def share(learned: int, count: int) -> str:
    """Return '3 of 12 (5 to 57 %)', with Clopper and Pearson's interval at 95 %."""
    interval = stats.binomtest(learned, count).proportion_ci(0.95, "exact")
    return f"{learned} of {count} ({100 * interval.low:.0f} to {100 * interval.high:.0f} %)"


def steps_table(study: Study) -> str:
    """Return how many seeds learned and how long it took.

    Each row stands beside softmax with heads of the same size. Holm's family is all comparisons of
    the table.
    """
    tests = sign_tests(study)
    adjusted = dict(zip(tests, holm([test.p for test in tests.values()])))
    lines = []
    for row in study.rows:
        taken = list(steps(study, row).values())
        learned = sum(step != NEVER for step in taken)
        line = [*row, share(learned, len(taken)), median_of(taken, latest_update(study))]
        if row in tests:
            test = tests[row]
            line.append(f"{test.faster}, {test.slower}, {test.ties}")
            line += [f"{test.p:.2g}", f"{adjusted[row]:.2g}"]
        else:
            line += ["", "", ""]
        lines.append(line)
    head = [*study.grid.axes, "learned", "steps, median"]
    head += [f"faster than {study.grid.baseline}, slower, tie", "p, sign test", "p, Holm"]
    return table(head, lines)


def sign_tests(study: Study) -> dict[Row, Sign]:
    """Return the comparison of each row with its baseline, if it has one."""
    tests = {}
    for row in study.rows:
        base = study.baseline(row)
        if base is not None and base != row:
            tests[row] = sign_test(steps(study, row), steps(study, base))
    return tests


def latest_update(study: Study) -> int:
    """Return the last update that any run has logged."""
    return max(int(point["update"]) for run in study.runs for point in run["points"])


def median_of(taken: Sequence[float], last: int) -> str:
    """Return the median of the steps; all that is known of NEVER is that it is above the last one.

    With fewer than half learned, the median is above the last step. With exactly half, it is
    between the slowest that learned and one that did not, so it is above the mean of the former
    and the last step.
    """
    median = statistics.median(min(step, last) for step in taken)
    is_bound = statistics.median(taken) == NEVER
    return f"above {median:,g}" if is_bound else f"{median:,g}"


# ---- nearest neighbour: ratios of the errors ---------------------------------------------------


def errors_table(study: Study) -> str:
    """Return how many times smaller the test error is than that of softmax with heads of that size.

    The last column is the ratio after the most steps divided by that after the fewest: above 1 the
    gain has grown. Holm's family is all ratios of the table but those of the last column.
    """
    ratios = {}
    for row in study.rows:
        base = study.baseline(row)
        if base is not None and base != row:
            ratios[row] = gains(study, row, base, study.metric, is_ratio=True)
    estimates = {row: paired(by_seed) for row, by_seed in ratios.items()}
    adjusted = dict(zip(estimates, holm([ratio.p for ratio in estimates.values()])))

    fewest, *_, most = study.grid.axes["steps"]
    lines = []
    for row, ratio in estimates.items():
        change = ""
        if row[0] == most:
            change = times_smaller(growth(ratios[(fewest, *row[1:])], ratios[row]))
        lines.append([*row, times_smaller(ratio), shown_p(ratio.p), shown_p(adjusted[row]), change])
    head = [
        *study.grid.axes,
        f"error of {study.grid.baseline}, divided by this one's",
        "p",
        "p, Holm",
    ]
    return table([*head, f"change from {fewest} steps"], lines)


# ---- translation: what becomes of the gain -----------------------------------------------------


def gains_by_seed(study: Study, row: Row, metric: str) -> dict[int, float]:
    """Return the gain over the baseline of the row by seed; above 0 the row is better."""
    base = study.baseline(row)
    return study.differences(row, base, metric) if base else {}


WIDTH = 128  # of the models of translation
# The lengths of 'Does it last?' in updates, as translation_long.toml labels them.
SHORT = "1600"
LONG = "6400"


def lasting_table(study: Study) -> str:
    """Return the gain of B after fewer and after more updates, and its change.

    The change is the primary endpoint, and Holm's family is the changes, one for each number of
    heads.
    """
    heads = list(study.grid.axes["heads"])
    changes = {number: change_of(study, number) for number in heads}
    adjusted = dict(zip(heads, holm([change.p for change in changes.values()])))

    def gain_cells(number: str, metric: str, decimals: int) -> list[str]:
        """Return the gain of B after fewer updates, and after more."""
        rows = [(number, "B", length) for length in (SHORT, LONG)]
        return [shown(paired(gains_by_seed(study, row, metric)), decimals) for row in rows]

    lines = []
    for number, change in changes.items():
        named = f"{number} of {WIDTH // int(number)}"
        line = [named, str(change.count), *gain_cells(number, "test", 4)]
        line += [shown(change, 4), shown_p(change.p), shown_p(adjusted[number])]
        line += gain_cells(number, "BLEU", 2)
        lines.append(line)
    early = f"{int(SHORT):,}"
    late = f"{int(LONG):,}"
    head = ["heads", "seeds", f"gain of B at {early}, nats", f"at {late}"]
    head += ["change", "p", "p, Holm", f"gain in BLEU at {early}", f"at {late}"]
    return table(head, lines)


def change_of(study: Study, heads: str) -> Estimate:
    """Return by how much the gain of B in test loss grows, over the seeds that have both."""
    before = gains_by_seed(study, (heads, "B", SHORT), "test")
    after = gains_by_seed(study, (heads, "B", LONG), "test")
    return growth(before, after)


# ---- gated attention units: l2 against softmax -------------------------------------------------

# The rows whose gain over softmax in the same model is tested; the others are shown beside them.
PRIMARY_UNITS = (
    ("words-block", "l2 half"),
    ("words-units", "l2"),
    ("masked-block", "l2 half"),
    ("masked-units", "l2"),
)
EARLY_UPDATE = 400  # where 'learns faster' is read


def units_table(study: Study) -> str:
    """Return the gain of each attention over softmax in the same model, in percent of perplexity.

    Holm's family is PRIMARY_UNITS.
    """
    estimates = {}
    for row in study.rows:
        if study.baseline(row) != row:
            estimates[row] = paired(gains_by_seed(study, row, "test"))
    tests = [estimates[row].p for row in PRIMARY_UNITS]
    adjusted = dict(zip(PRIMARY_UNITS, holm(tests)))

    lines = []
    for row, gain in estimates.items():
        holms = shown_p(adjusted[row]) if row in adjusted else ""
        # a nat of loss is 100 % of perplexity, as `Study.difference` counts
        early = paired(along(study, row).get(EARLY_UPDATE, {})).scaled(100)
        cells = [*row, str(gain.count), shown(gain, 2), shown_p(gain.p), holms, shown(early, 2)]
        lines.append(cells)
    head = [*study.grid.axes, "seeds", f"gain over {study.grid.baseline}, % of test perplexity"]
    return table([*head, "p", "p, Holm", f"gain after {EARLY_UPDATE} updates, validation"], lines)


# ---- what report.py calls ----------------------------------------------------------------------

# by the `table` of the grid
TABLES = {
    "steps": steps_table,
    "errors": errors_table,
    "lasting": lasting_table,
    "units": units_table,
}


def with_whole_seeds(study: Study) -> Study:
    """Return the study without the seeds that some row lacks.

    A row lacks a seed whose run failed, or that had not ended when the experiment did.
    """
    whole = study.whole_seeds
    return replace(study, runs=[run for run in study.runs if run["seed"] in whole])


def left_out(study: Study) -> str:
    """Return which seeds are left out, and which rows lack them; empty text without any."""
    lines = []
    seeds = {run["seed"] for run in study.runs}
    partial = seeds - study.whole_seeds
    for seed in sorted(partial):
        lacking = [row for row in study.rows if seed not in study.values(row, study.metric)]
        rows = "; ".join(" / ".join(row) for row in lacking)
        lines.append(f"Seed {seed} is left out of all rows, because these lack it: {rows}.")
    return "\n".join(lines)


def has_own_table(study: Study) -> bool:
    """Return True if a table was registered for a study."""
    return study.grid.table in TABLES


def own_table(study: Study) -> str:
    """Return the table that was registered for a study, once every planned seed has ended."""
    if study.waits:
        return not_ended(study)
    text = TABLES[study.grid.table](with_whole_seeds(study))
    without = left_out(study)
    return f"{text}\n\n{without}" if without else text


def not_ended(study: Study) -> str:
    return f"Not ended: {len(study.whole_seeds)} of {study.grid.seeds} seeds have every point."
