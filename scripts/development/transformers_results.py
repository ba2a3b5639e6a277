"""The table of what scripts/development/transformers_table.py found, for docs/huggingface.md.

scripts/development/readme_tables.py writes it.
"""

import json
from pathlib import Path
from typing import Any

from studies.markdown import table

RESULTS = Path(__file__).resolve().parents[2] / "results" / "transformers" / "types.json"

# Each check of the script; True where it holds, None where a model has no such thing.
CHECKS = ("start", "moved", "reads queries", "trained", "cached", "ablated", "pruned", "loaded")
REFUSES = "refuses: "  # what a check says where it is refused in one line, which is no fault
# Why a type is refused, by a part of the message.
REFUSED = {
    "has no attention": "refused: no attention that goes through the `AttentionInterface`, or "
    "other projections than queries, keys and values of one size",
    "softcap": "refused: capped scores",
    "does not give": "refused: heads that get the values of other heads",
    "one after another": "refused: queries, keys and values of each head in turn",
    "features, but": "refused: gates beside the queries",
    "must work alone": "refused: the attention cannot be tried alone",
}
ALL = "everything in the list above holds"
LEFT_OUT = "the same, but other attentions of the model stay as they are, and a warning names them"
BUT_PRUNE = "the same, but `prune` refuses, because something needs all heads"
A_PART = "the same for those attentions that were called; others need inputs that we did not make"
A_PART_BUT_PRUNE = (
    "the same for those attentions that were called, but `prune` refuses, because something needs "
    "all heads"
)
WRONG = "**wrong**"
UNTRIED = "not tried: the script could not make a small model or its inputs"
UNTRIED_NAMES = "all others: [types.json](../results/transformers/types.json) names them"
ORDER = (ALL, LEFT_OUT, BUT_PRUNE, A_PART, A_PART_BUT_PRUNE, WRONG, *REFUSED.values(), UNTRIED)

# The row of a type by those of its checks that do not hold, and are no fault.
NO_FAULT = {
    ("pruned",): BUT_PRUNE,
    ("trained",): A_PART,
    ("trained", "pruned"): A_PART_BUT_PRUNE,
}


def group_of(result: dict[str, Any]) -> str:
    """Return which row of the table has a type."""
    if "not built" in result:
        return UNTRIED
    if "refused" in result:
        return next(row for part, row in REFUSED.items() if part in result["refused"])
    failed = tuple(check for check in CHECKS if result[check] not in (True, None))
    if not failed:
        return LEFT_OUT if result["left out"] else ALL
    if all(is_no_fault(check, str(result[check])) for check in failed):
        return NO_FAULT[failed]
    return WRONG


def is_no_fault(check: str, answer: str) -> bool:
    """Return True if a check that does not hold says nothing against the mixing."""
    if check == "trained":
        return answer.endswith("attentions are not called")
    return check == "pruned" and answer.startswith(REFUSES)


def transformers_types() -> str:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results["types"]:
        groups.setdefault(group_of(result), []).append(result)

    rows = []
    for group in ORDER:
        if group not in groups:
            continue
        types = [result["type"] for result in groups[group]]
        classes = {kind for result in groups[group] for kind in result.get("attentions", [])}
        # Nobody needs to read a long list of what nobody has seen.
        names = UNTRIED_NAMES if group == UNTRIED else ", ".join(types)
        rows.append([group, str(len(types)), str(len(classes) or ""), names])
    head = ["what was seen", "types", "classes of attentions", "which types"]
    return f"transformers {results['transformers']}:\n\n{table(head, rows)}"


TABLES = {"transformers_types": transformers_types}
