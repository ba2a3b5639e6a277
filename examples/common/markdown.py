"""Tables in Markdown."""

from collections.abc import Sequence


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Return a table without its last line's end.

    Args:
        titles: of the columns
        rows: the cells of each row
        left: so many columns, the first ones, are aligned on the left; the others on the right
    """
    ruler = ["---"] * left + ["---:"] * (len(titles) - left)
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(ruler)}|"]
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)
