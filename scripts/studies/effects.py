"""How much Mixhead B gains over softmax: the numbers of the tables and pictures.

results/comparisons.csv lists the comparisons, results/*.json have the runs.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from studies.comparisons import (
    RESULTS,
    Comparison,
    gains,
    loss_pairs,
    read_comparisons,
    study_of,
)
from studies.faults import fail
from studies.inference import Estimate, Summary, paired, random_effects, ratio, shared
from studies.study import Row, Study


@dataclass(frozen=True)
class Effect:
    """What the runs say about one comparison."""

    comparison: Comparison
    gain: Estimate  # the difference of the losses, or of their logarithms
    percent: Estimate  # of the loss of softmax
    error: float  # standard error of `percent`; NaN for ratios
    # over the best softmax, in the unit of `gain`; None where it has the same heads
    over_best: Estimate | None


def effect_of(study: Study, comparison: Comparison) -> Effect:
    """Return the effect of a comparison; end the command if it has fewer than two seeds."""
    mixed = comparison.mixed
    metric = comparison.loss
    is_ratio = comparison.is_ratio
    by_seed = gains(study, mixed, comparison.softmax, metric, is_ratio)
    if len(by_seed) < 2:  # no spread, so no standard error
        fail(
            f"comparisons.csv: {comparison.study}.json: {'/'.join(mixed)} and "
            f"{'/'.join(comparison.softmax)} must have two seeds with {metric!r} in common, have "
            f"{len(by_seed)}"
        )

    gain = paired(by_seed)
    error = math.nan
    if is_ratio:
        percent = lower_by(gain)
    else:
        factor = 100 / mean_loss_of_base(study, mixed, comparison.softmax, metric)
        percent = gain.scaled(factor)
        error = factor * statistics.stdev(by_seed.values()) / math.sqrt(len(by_seed))
    over_best = None
    if comparison.best != comparison.softmax:
        over_best = paired(gains(study, mixed, comparison.best, metric, is_ratio))
    return Effect(comparison, gain, percent, error, over_best)


def effects(folder: Path = RESULTS) -> list[Effect]:
    """Return the effects of all comparisons whose experiment has ended."""
    ended = []
    for comparison in read_comparisons(folder / "comparisons.csv"):
        study = study_of(comparison.study, folder)
        for row in (comparison.mixed, comparison.softmax, comparison.best):
            if row not in study.rows:
                fail(f"comparisons.csv: {comparison.study}.json has no run of {'/'.join(row)}")
        if not study.waits:
            ended.append(effect_of(study, comparison))
    return ended


def percent(study: Study, row: Row, base: Row, metric: str) -> Estimate:
    """Return by how many percent of the base's loss the loss of the row is lower."""
    factor = 100 / mean_loss_of_base(study, row, base, metric)
    return paired(gains(study, row, base, metric)).scaled(factor)


def mean_loss_of_base(study: Study, row: Row, base: Row, metric: str) -> float:
    """Return the mean loss of the base over the seeds that both rows have."""
    return statistics.fmean(theirs for _, theirs in loss_pairs(study, row, base, metric).values())


def lower_by(log_ratio: Estimate) -> Estimate:
    """Return by how many percent a number is lower, from the gain in its logarithm.

    A gain of loss in nats is one in the logarithm of the perplexity.
    """
    ends = [100 * -math.expm1(-end) for end in (log_ratio.mean, log_ratio.low, log_ratio.high)]
    return Estimate(*ends, log_ratio.p, log_ratio.count)


# ---- over the rows of text -----------------------------------------------------------------------


def of_text(all_effects: Sequence[Effect]) -> dict[str, list[Effect]]:
    """Return the effects on text by corpus."""
    by_corpus: dict[str, list[Effect]] = {}
    for effect in all_effects:
        if effect.comparison.corpus:
            by_corpus.setdefault(effect.comparison.corpus, []).append(effect)
    return by_corpus


def summarised(all_effects: Sequence[Effect], method: str = "iterated") -> Summary:
    means = [effect.percent.mean for effect in all_effects]
    errors = [effect.error for effect in all_effects]
    return random_effects(means, errors, method)


# ---- along the training ------------------------------------------------------------------------


def along(study: Study, row: Row) -> dict[int, dict[int, float]]:
    """Return the gain in validation loss over the row's baseline, in nats, by update and seed."""
    base = study.baseline(row)
    if base is None:
        return {}
    pairs = shared(validations(study, row), validations(study, base))
    by_update: dict[int, dict[int, float]] = {}
    for (update, seed), (ours, theirs) in pairs.items():
        by_update.setdefault(update, {})[seed] = theirs - ours
    return by_update


def validations(study: Study, row: Row) -> dict[tuple[int, int], float]:
    """Return the validation loss in nats by update and seed. fairseq logs bits."""
    losses = {}
    for run in study.runs_of(row):
        for point in run["points"]:
            if "valid_loss" in point:
                losses[int(point["update"]), run["seed"]] = point["valid_loss"] * math.log(2)
    return losses


# ---- time, BLEU, and what gains are worth -------------------------------------------------------

# In the version of these runs softmax was slower than B and than `average`, which computes more.
SLOW_SOFTMAX = {"words"}


def time_ratios(study: Study, row: Row, base: Row) -> list[float]:
    """Return the CPU time of a row divided by that of softmax, where they can be compared."""
    return [] if study.name in SLOW_SOFTMAX else study.time_ratios(row, base)


def bleu_metric(study: Study) -> str | None:
    """Return the metric that is the BLEU of the test set; None without any.

    Older files also have that of the validation set.
    """
    names = [name for name in study.metrics if study.measure(name) == "BLEU"]
    return "test" if "test" in names else next(iter(names), None)


def bleu_gain(study: Study, row: Row, base: Row, metric: str) -> Estimate:
    return paired(study.differences(row, base, metric))


# Of the rows 'softmax' and 'softmax in the time of B' of translation.toml: the first trains for so
# many updates, the second for so many more.
UPDATES = 1600
MORE_UPDATES = 75


def worth_in_updates(folder: Path = RESULTS) -> Estimate:
    """Return how many percent more updates would give softmax, 4 heads, the gain of B.

    This is a straight line through one point: what MORE_UPDATES gain.
    """
    study = study_of("translation", folder)
    base = ("4", "softmax", "1600")
    of_b = gains(study, ("4", "B", "1600"), base, "test")
    of_more = gains(study, ("4", "softmax in the time of B", "1600"), base, "test")
    return ratio(of_b, of_more).scaled(100 * MORE_UPDATES / UPDATES)
