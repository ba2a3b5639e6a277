"""Means, spreads and the paired t-test of a few seeds."""

import math
import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

LEVEL = 0.05  # of the two-sided test
POWER = 0.8  # of the seeds that a gain would take
FEWEST = 3  # seeds that a verdict takes
MOST = 100  # that anyone would train


class Sample(NamedTuple):
    """Of values, one for each seed."""

    n: int
    mean: float
    deviation: float  # with n - 1; nan of a single value

    @property
    def error(self) -> float:
        """Standard error of the mean"""
        return self.deviation / math.sqrt(self.n)

    @property
    def p(self) -> float:
        """Two-sided, of the mean being 0; nan with fewer than two values."""
        if self.n < 2:
            return math.nan
        if self.error == 0:
            return 0.0 if self.mean else 1.0
        return two_sided(self.mean / self.error, self.n - 1)

    @property
    def margin(self) -> float:
        """Half the width of the interval of the mean that has 1 - LEVEL of the probability; nan as p."""
        return math.nan if self.n < 2 else self.error * quantile(self.n - 1)

    def interval(self, form: str = "+.2f") -> str:
        """The mean with that interval in brackets, as text."""
        mean, low, high = (format(v, form) for v in (self.mean, self.mean - self.margin, self.mean + self.margin))
        return f"{mean} [{low}, {high}]"


def sample(values: Sequence[float]) -> Sample:
    """ValueError: there are no values."""
    if not values:
        raise ValueError("a sample of no values")
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Sample(len(values), statistics.fmean(values), deviation)


def seeds_wanted(found: Sample) -> int:
    """How many values a mean and a deviation like these take to be told from 0 with probability POWER; 0: over MOST.

    By the usual approximation: the mean has to be t(LEVEL) + t(POWER) standard errors from 0.
    """
    for n in range(2, MOST + 1):
        beyond = quantile(n - 1) + quantile(n - 1, 2 * (1 - POWER))
        if found.mean and abs(found.mean) >= beyond * found.deviation / math.sqrt(n):
            return n
    return 0


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y)."""
    xs, ys = zip(*points)
    return statistics.linear_regression(xs, ys).slope


def two_sided(t: float, degrees: int) -> float:
    """P(|T| >= |t|) of Student's distribution, by its finite series (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    angle = math.atan2(abs(t), math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    first = degrees % 2  # the powers of the cosine are odd where the degrees are
    term = cosine if first else 1.0
    total = 0.0
    for power in range(first, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    within = 2 / math.pi * (angle + sine * total) if first else sine * total
    return min(1.0, max(0.0, 1 - within))


@cache
def quantile(degrees: int, level: float = LEVEL) -> float:
    """The t that |T| exceeds with probability `level`, by bisection."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, degrees) > level else (low, middle)
    return high
