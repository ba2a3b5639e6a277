"""The report of `mixhead check` as it is printed."""

from typing import Any

from mixhead_plugin.check.speed import SPEED_SHAPE


def as_text(report: dict[str, Any]) -> str:
    """Return the report of `command.check` as it is printed."""
    rows = report["variants"]
    sections = (
        _lines_of_machine(report["machine"]),
        _lines_of_variants(rows),
        _lines_of_speed(report["milliseconds"]),
        _lines_of_refusals(rows),
        [f"Not tried: {'; '.join(report['not_tried'])}", _verdict(rows)],
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _lines_of_machine(facts: dict[str, str]) -> list[str]:
    return [f"{name:16}{value}" for name, value in facts.items()]


def _lines_of_variants(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of variants, with what its columns mean."""
    lines = [
        "auto takes: what impl 'auto' stands for; 'fused' is torch's own attention",
        "error: the largest of output and gradients against float64, as a share of what is allowed",
        _line_of_variant("normalizer", "mixing", "mask", "dtype", "auto takes", "error"),
    ]
    for row in rows:
        error = "-" if row["error"] is None else f"{row['error']:.2f}"
        line = _line_of_variant(
            row["normalizer"], row["mixing"], row["mask"], row["dtype"], row["auto"], error
        )
        if row["skipped"]:
            line += f"  skipped: {row['skipped']}"
        if row["fault"]:
            line += f"  WRONG: {row['fault']}"
        lines.append(line)
    return lines


def _line_of_variant(
    normalizer: str, mixing: str, mask: str, dtype: str, auto: str, error: str
) -> str:
    """Return a line of the table of variants; the columns of all lines have the same widths."""
    return f"{normalizer:14}{mixing:32}{mask:18}{dtype:10}{auto:11}{error:>6}"


def _lines_of_speed(times: dict[str, float]) -> list[str]:
    batch, heads, length, head_dim = SPEED_SHAPE
    shape = f"B {batch}, {heads} heads of {head_dim}, {length} positions, causal"
    lines = [f"milliseconds, forward and backward ({shape})"]
    for name, milliseconds in times.items():
        lines.append(f"{name:32}{milliseconds:8.2f}")
    return lines


def _lines_of_refusals(rows: list[dict[str, Any]]) -> list[str]:
    """Return why the kernels are not used, each reason once; nothing if they always are."""
    reasons = sorted({row["kernels"] for row in rows} - {""})
    if not reasons:
        return []
    lines = ["The kernels of impl 'triton' are not used where:"]
    for reason in reasons:
        lines.append(f"- {reason}")
    return lines


def _verdict(rows: list[dict[str, Any]]) -> str:
    wrong = sum(bool(row["fault"]) for row in rows)
    skipped = sum(bool(row["skipped"]) for row in rows)
    verdict = f"{wrong} of {len(rows)} variants are wrong"
    if skipped:
        verdict += f", {skipped} were skipped"
    return verdict
