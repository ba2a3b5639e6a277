"""Markdown of tables, and the words of their cells."""

import html
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # gpu_report.sh makes tables where scipy and statsmodels may be missing
    from studies.inference import Estimate


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as one text, without a line feed at its end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """Return text of somebody else for a page, without HTML and links."""
    plain = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\[\]|`\\])", r"\\\1", plain)


NO_PAIR = "no seed in common"  # what stands for a gain where no seed has both rows


def shown(estimate: "Estimate", decimals: int) -> str:
    """Return '0.0284 (0.0182 to 0.0385)', without an interval if it has none."""
    if estimate.count == 0:
        return NO_PAIR
    mean = signed(estimate.mean, decimals)
    if math.isnan(estimate.low):
        return mean
    return f"{mean} ({signed(estimate.low, decimals)} to {signed(estimate.high, decimals)})"


def signed(value: float, decimals: int) -> str:
    """Return a number without the sign of a rounded 0."""
    text = f"{value:.{decimals}f}"
    zero = f"{0:.{decimals}f}"
    return zero if text == f"-{zero}" else text


def times_smaller(log_ratio: "Estimate") -> str:
    """Return how many times smaller a loss is: '277 times (233 to 330)'; as `shown`."""
    if log_ratio.count == 0:
        return NO_PAIR
    mean = f"{math.exp(log_ratio.mean):.3g} times"
    if math.isnan(log_ratio.low):
        return mean
    return f"{mean} ({math.exp(log_ratio.low):.3g} to {math.exp(log_ratio.high):.3g})"


def shown_p(p: float) -> str:
    """Return '0.0063'; nothing where there is no p."""
    return "" if math.isnan(p) else f"{p:.2g}"
