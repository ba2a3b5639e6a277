"""Tables in Markdown."""

from collections.abc import Sequence


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Return a table as one text, without a line feed at its end.

    Args:
        titles: the titles of the columns
        rows: the cells of each row
        left: how many of the first columns are aligned on the left; the others are on the right
    """
    ruler = ["---"] * left + ["---:"] * (len(titles) - left)
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(ruler)}|"]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)
