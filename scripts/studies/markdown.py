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
    mean, low, high = (signed(value, decimals) for value in (found.mean, found.low, found.high))
    return mean if math.isnan(found.low) else f"{mean} ({low} to {high})"


def signed(value: float, decimals: int) -> str:
    """Return a number without the sign of a rounded 0."""
    return f"{value:.{decimals}f}".replace(f"-{0:.{decimals}f}", f"{0:.{decimals}f}")


def fold(found: Estimate) -> str:
    """Return how many times smaller a loss is, from a log ratio: '277 times (233 to 330)'."""
    mean, low, high = (f"{math.exp(value):.3g}" for value in (found.mean, found.low, found.high))
    return f"{mean} times ({low} to {high})"
