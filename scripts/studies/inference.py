"""The statistics of the results: numbers in, numbers out. scipy and statsmodels do the work.

A gain is how much better one run is than another with the same seed; above 0 is better.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from scipy import stats
from statsmodels.stats.meta_analysis import combine_effects
from statsmodels.stats.multitest import multipletests

Key = TypeVar("Key")  # a seed, or an update and a seed
Pair = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval. Interval and p are NaN where there are too few values for them.

    Without any value, the mean is NaN, too.
    """

    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    count: int = 1

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate in another unit; `factor` is above 0."""
        ends = (self.mean * factor, self.low * factor, self.high * factor)
        return Estimate(*ends, self.p, self.count)


def bars_of(estimates: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of the intervals below and above the means, as matplotlib takes them."""
    below = [estimate.mean - estimate.low for estimate in estimates]
    above = [estimate.high - estimate.mean for estimate in estimates]
    return [below, above]


def shared(ours: Mapping[Key, float], theirs: Mapping[Key, float]) -> dict[Key, Pair]:
    """Return both values of each seed, or other key, that both have, in the order of the keys."""
    return {key: (ours[key], theirs[key]) for key in sorted(ours.keys() & theirs.keys())}


def paired(gains: Mapping[int, float] | Sequence[float], level: float = 0.95) -> Estimate:
    """Return the mean gain over the seeds, with the interval and the p of the paired t-test.

    Fewer than three seeds, or seeds with the same gain, give no interval.

    Args:
        gains: the gain of each seed, by seed or as a list
        level: the level of the interval
    """
    values = list(gains.values()) if isinstance(gains, Mapping) else list(gains)
    if not values:
        return Estimate(math.nan, count=0)
    mean = statistics.fmean(values)
    if len(values) < 3 or len(set(values)) == 1:
        return Estimate(mean, count=len(values))

    # a paired t-test is a t-test of the differences against 0
    test = stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval(level)
    low, high = float(interval.low), float(interval.high)
    return Estimate(mean, low, high, float(test.pvalue), len(values))


def growth(before: Mapping[int, float], after: Mapping[int, float]) -> Estimate:
    """Return by how much the second values are larger than the first ones, paired by seed."""
    pairs = shared(before, after)
    return paired({seed: later - earlier for seed, (earlier, later) in pairs.items()})


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p of each test of a family; those below 0.05 hold together at 5 %.

    A test without a p, which is NaN, stays so. It counts in the family, as a test that shows
    nothing, so that the others are adjusted as planned.
    """
    known = [1.0 if math.isnan(p) else p for p in p_values]
    adjusted = multipletests(known, method="holm")[1]
    return [math.nan if math.isnan(p) else float(a) for p, a in zip(p_values, adjusted)]


@dataclass(frozen=True)
class Summary:
    """What settings have in common, if each has a true gain of its own around a common mean."""

    mean: float
    low: float
    high: float
    tau: float  # standard deviation of the true gains
    new_low: float  # interval for the true gain of one more setting
    new_high: float
    count: int


def random_effects(
    gains: Sequence[float],
    errors: Sequence[float],
    method: str = "iterated",
) -> Summary:
    """Return the random-effects summary of gains with their standard errors, intervals at 95 %.

    `method` estimates tau: "iterated" is Paule and Mandel's, "chi2" DerSimonian and Laird's. The
    interval of the mean is Hartung and Knapp's. That of a new setting has their variance of the
    mean, too, and t with k - 2 degrees of freedom (Partlett and Riley 2017); Higgins, Thompson and
    Spiegelhalter (2009) took 1 / (sum of the weights) in its place. Needs three settings or more.
    """
    count = len(gains)
    variances = np.array(errors) ** 2  # [count]

    # statsmodels lets DerSimonian and Laird's tau^2 fall below 0 where the settings differ less
    # than by chance, and takes the weights of its mean with that, and square roots. So only tau^2
    # is taken from it, and its warnings do not matter here.
    with np.errstate(invalid="ignore"):
        tau2 = float(combine_effects(np.array(gains), variances, method_re=method).tau2)
    tau2 = max(tau2, 0.0)
    weights = 1 / (variances + tau2)
    mean = float(np.average(gains, weights=weights))

    # Hartung and Knapp
    variance = np.average((np.array(gains) - mean) ** 2, weights=weights) / (count - 1)
    half = float(stats.t.ppf(0.975, count - 1) * math.sqrt(variance))
    half_of_new = float(stats.t.ppf(0.975, count - 2) * math.sqrt(tau2 + variance))
    return Summary(
        mean=mean,
        low=mean - half,
        high=mean + half,
        tau=math.sqrt(tau2),
        new_low=mean - half_of_new,
        new_high=mean + half_of_new,
        count=count,
    )


def ratio(gains: Mapping[int, float], others: Mapping[int, float], level: float = 0.95) -> Estimate:
    """Return mean(gains) / mean(others) over the seeds that both have, with Fieller's interval.

    The interval has every r for which the paired t-test does not reject that gains - r * others
    is 0 in the mean. It needs others that differ from 0 by that test, because the interval has
    no end otherwise: ValueError.

    Args:
        gains: the gain of each seed
        others: the gain of each seed in the divisor
        level: the level of the interval
    """
    pairs = list(shared(gains, others).values())
    count = len(pairs)
    if count < 2:
        raise ValueError("needs two seeds that both have")
    mean = statistics.fmean(one for one, _ in pairs)
    other = statistics.fmean(two for _, two in pairs)
    square = float(stats.t.ppf((1 + level) / 2, count - 1)) ** 2 / count
    cov = np.cov(pairs, rowvar=False).tolist()  # [2, 2]

    # (mean - r other)^2 = square * variance(gains - r others) is a quadratic equation in r
    a = other**2 - square * cov[1][1]
    b = -2 * (mean * other - square * cov[0][1])
    c = mean**2 - square * cov[0][0]
    if a <= 0:
        raise ValueError("the divisor is not distinguished from 0")
    root = math.sqrt(b * b - 4 * a * c)
    return Estimate(mean / other, (-b - root) / (2 * a), (-b + root) / (2 * a), count=count)
