"""Markdown of tables."""

import html
import re
from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table without its last line's end."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escaped(text: str) -> str:
    """Return text of somebody else for a page, without HTML and links."""
    plain = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\[\]|`\\])", r"\\\1", plain)
