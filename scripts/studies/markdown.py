"""Markdown of tables, and the words of their cells."""

import html
import math
import re
from collections.abc import Sequence

from studies.inference import Estimate


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without its last line's end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """Return text of somebody else for a page, without HTML and links."""
    plain = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\[\]|`\\])", r"\\\1", plain)


def shown(found: Estimate, decimals: int) -> str:
    """Return '0.0284 (0.0182 to 0.0385)'."""
    mean = signed(found.mean, decimals)
    if math.isnan(found.low):
        return mean
    return f"{mean} ({signed(found.low, decimals)} to {signed(found.high, decimals)})"


def signed(value: float, decimals: int) -> str:
    """Return a number without the sign of a rounded 0."""
    text = f"{value:.{decimals}f}"
    zero = f"{0:.{decimals}f}"
    return zero if text == f"-{zero}" else text


def fold(found: Estimate) -> str:
    """Return how many times smaller a loss is, from a log ratio: '277 times (233 to 330)'."""
    mean = math.exp(found.mean)
    low = math.exp(found.low)
    high = math.exp(found.high)
    return f"{mean:.3g} times ({low:.3g} to {high:.3g})"
