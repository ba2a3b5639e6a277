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
# Those that compare with the formula or with the plain model. The page shows the largest of them.
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


def outcome(check: str, value: float | str | None) -> str:
    """Return `HOLDS`, `LACKS`, `WRONG` or one of `REASONS`."""
    if value is None:
        return LACKS
    if isinstance(value, str):
        if not value.startswith(UNMIXED):
            return WRONG
        return next((reason for part, reason in REASONS.items() if part in value), WRONG)
    is_close = not math.isnan(value) and value <= CHECKS[check]
    return HOLDS if is_close else WRONG


def libraries() -> str:
    """Return a row for each library: its models, and whether all checks hold."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    by_library: dict[str, list[dict[str, Any]]] = {}
    for model in results["models"]:
        library = f"{model['library']} {model['version']}".strip()
        by_library.setdefault(library, []).append(model)

    reasons: list[str] = []
    rows = []
    for library, models in by_library.items():
        names = "; ".join(model["model"] for model in models)
        rows.append([library, names, _holding(models, reasons), _largest(models)])
    lines = [f"torch {results['torch']}:"]
    lines.append(table(["library", "models", "does it work?", "largest difference"], rows))
    lines += [f"({number}) {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n\n".join(lines)


def _holding(models: list[dict[str, Any]], reasons: list[str]) -> str:
    """Return which checks hold for all models; `reasons` gets what the lines below have to say."""
    lacking = []
    failing = []
    for check in CHECKS:
        outcomes = [outcome(check, model[check]) for model in models]
        if all(result == LACKS for result in outcomes):
            lacking.append(f"`{check}`")
        for result in dict.fromkeys(outcomes):
            if result == WRONG:
                failing.append(f"`{check}` {WRONG}")
            elif result not in (HOLDS, LACKS):
                if result not in reasons:
                    reasons.append(result)
                failing.append(f"`{check}` ({reasons.index(result) + 1})")

    text = "yes"
    if failing:
        text += f", but not {', '.join(failing)}"
    if lacking:
        text += f"; has no {', '.join(lacking)}"
    return text


def _largest(models: list[dict[str, Any]]) -> str:
    """Return the largest difference of the checks whose numbers the page shows."""
    numbers = []
    for model in models:
        numbers += [model[check] for check in NUMBERS if isinstance(model[check], float)]
    return f"{max(numbers):.0e}"


TABLES = {"libraries": libraries}
