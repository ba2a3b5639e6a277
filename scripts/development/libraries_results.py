"""The table of what scripts/development/libraries_table.py found, for docs/python.md.

scripts/development/readme_tables.py writes it.
"""

import json
import math
from pathlib import Path
from typing import Any

from studies.markdown import table

RESULTS = Path(__file__).resolve().parents[2] / "results" / "libraries" / "models.json"

# Each check of the script, and the largest difference with which it holds.
CHECKS = {
    "start": 1e-5,
    "moved": 1e-5,
    "masks": 1e-5,
    "trained": 1e-5,
    "dropout": 1e-5,
    "cached": 1e-5,
    "loaded": 0.0,
    "saved whole": 0.0,
    "deepcopy": 0.0,
    "autocast": 0.05,  # bfloat16 has three digits
    "checkpoints": 1e-5,
    "compiled": 1e-5,
    "exported": 1e-5,
}
# Whose numbers the page shows.
NUMBERS = ("start", "moved", "masks", "trained", "cached")
# Why a model cannot pass a check without mixing either, by a part of the error.
REASONS = {
    "_SDPBackend": "x-transformers keeps objects of torch that cannot be pickled, so its models "
    "cannot be saved whole without mixing either",
}
UNMIXED = "without mixing, too: "  # how such an error begins

HOLDS = "yes"
LACKS = ""  # the model has no such thing
WRONG = "**wrong**"


def outcome(check: str, found: float | str | None) -> str:
    """Return `HOLDS`, `LACKS`, `WRONG` or one of `REASONS`."""
    if found is None:
        return LACKS
    if isinstance(found, str):
        if not found.startswith(UNMIXED):
            return WRONG
        return next((reason for part, reason in REASONS.items() if part in found), WRONG)
    is_close = not math.isnan(found) and found <= CHECKS[check]
    return HOLDS if is_close else WRONG


def libraries() -> str:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    reasons: list[str] = []
    rows = []
    for found in results["models"]:
        cells = [f"{found['library']} {found['version']}".strip(), found["model"]]
        cells.append(str(found["attentions"]))
        cells += [_cell(check, found[check], reasons) for check in CHECKS]
        rows.append(cells)
    lines = [f"torch {results['torch']}:"]
    lines.append(table(["library", "model", "attentions", *CHECKS], rows))
    lines += [f"({number}) {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n\n".join(lines)


def _cell(check: str, found: Any, reasons: list[str]) -> str:
    """Return what a table shows; `reasons` gets what the lines below it have to say."""
    result = outcome(check, found)
    if result == HOLDS and check in NUMBERS:
        return f"{found:.0e}" if found else "0"
    if result in (HOLDS, LACKS, WRONG):
        return result
    if result not in reasons:
        reasons.append(result)
    return f"no ({reasons.index(result) + 1})"


TABLES = {"libraries": libraries}
