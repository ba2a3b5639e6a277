"""The statistics of the results: numbers in, numbers out. scipy and statsmodels do the work.

A gain is how much better one run is than another with the same seed; above 0 is better.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats
from statsmodels.stats.meta_analysis import combine_effects
from statsmodels.stats.multitest import multipletests


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval. Interval and p are NaN where there are too few values for them."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    count: int = 1

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate in another unit; `factor` is above 0."""
        ends = (self.mean * factor, self.low * factor, self.high * factor)
        return Estimate(*ends, self.p, self.count)


def paired(gains: Sequence[float], level: float = 0.95) -> Estimate:
    """Return the mean gain over the seeds, with the interval and the p of the paired t-test.

    Fewer than three seeds, or seeds with the same gain, give no interval.
    """
    mean = statistics.fmean(gains)
    if len(gains) < 3 or len(set(gains)) == 1:
        return Estimate(mean, count=len(gains))

    # a paired t-test is a t-test of the differences against 0
    test = stats.ttest_1samp(gains, 0.0)
    interval = test.confidence_interval(level)
    return Estimate(mean, float(interval.low), float(interval.high), float(test.pvalue), len(gains))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p of each test of a family; those below 0.05 hold together at 5 %."""
    return [float(p) for p in multipletests(p_values, method="holm")[1]]


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
    interval of the mean is Hartung and Knapp's; that of a new setting is Higgins, Thompson and
    Spiegelhalter's (2009), with k - 2 degrees of freedom. Needs three settings or more.
    """
    found = combine_effects(np.array(gains), np.array(errors) ** 2, method_re=method)

    # statsmodels lets DerSimonian and Laird's tau^2 fall below 0, where the settings differ less
    # than by chance
    tau = math.sqrt(max(found.tau2, 0.0))
    error = found.sd_eff_w_re_hksj
    half = stats.t.ppf(0.975, len(gains) - 1) * error
    half_of_new = stats.t.ppf(0.975, len(gains) - 2) * math.hypot(tau, error)
    mean = found.mean_effect_re
    return Summary(
        float(mean),
        float(mean - half),
        float(mean + half),
        tau,
        float(mean - half_of_new),
        float(mean + half_of_new),
        len(gains),
    )


def ratio(gains: Sequence[float], others: Sequence[float], level: float = 0.95) -> Estimate:
    """Return mean(gains) / mean(others) over the same seeds, with Fieller's interval.

    The interval has every r for which the paired t-test does not reject that gains - r * others
    is 0 in the mean. It needs others that differ from 0 by that test, because the interval has
    no end otherwise: ValueError.
    """
    count = len(gains)
    mean, other = statistics.fmean(gains), statistics.fmean(others)
    square = stats.t.ppf((1 + level) / 2, count - 1) ** 2 / count
    cov = np.cov(gains, others)  # [2, 2]

    # (mean - r other)^2 = square * variance(gains - r others) is a quadratic equation in r
    a = other**2 - square * cov[1, 1]
    b = -2 * (mean * other - square * cov[0, 1])
    c = mean**2 - square * cov[0, 0]
    if a <= 0:
        raise ValueError("the divisor is not distinguished from 0")
    root = math.sqrt(b * b - 4 * a * c)
    return Estimate(mean / other, (-b - root) / (2 * a), (-b + root) / (2 * a), count=count)
