"""The table of examples/README.md, from results/examples."""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from studies.inference import Estimate, paired
from studies.markdown import shown, table

FOLDER = Path(__file__).resolve().parents[2] / "results" / "examples"


class Shown(NamedTuple):
    """How a file of results is shown.

    Args:
        model: what was trained
        heads: number and size
        decimals: of its numbers
    """

    model: str
    heads: str
    decimals: int


FILES = {
    "minilm": Shown("[MiniLM](minilm/README.md), pretrained", "12 of 32", 1),
    "nanogpt_8_heads": Shown("[nanoGPT](nanogpt/README.md)", "8 of 16", 4),
    "nanogpt_32_heads": Shown("the same with more heads", "32 of 4", 4),
    "vit": Shown("[timm's ViT](vit/README.md)", "8 of 8", 1),
}


def trained() -> str:
    """Return a row for each file: means over the seeds, and the difference with its interval."""
    rows = []
    for name, look in FILES.items():
        results = read(name)
        plain, mixed = both(results)
        means = [f"{statistics.fmean(side):.{look.decimals}f}" for side in (plain, mixed)]
        seeds = str(len(plain))
        shown_difference = shown(difference(results), look.decimals)
        rows.append([look.model, look.heads, results["metric"], seeds, *means, shown_difference])
    head = ["model", "heads", "number", "seeds", "without mixing", "B", "difference"]
    return table(head, rows)


def read(name: str) -> dict[str, Any]:
    """Return a file of the results."""
    results: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return results


def both(results: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the numbers of all seeds without mixing and with it."""
    return numbers(results, "none"), numbers(results, results["settings"]["mixing"])


def difference(results: dict[str, Any]) -> Estimate:
    """Return how much higher the number is with mixing, over pairs of equal seeds."""
    plain, mixed = both(results)
    return paired([b - a for a, b in zip(plain, mixed, strict=True)])


def numbers(results: dict[str, Any], mixing: str) -> list[float]:
    return [row[mixing]["number"] for row in results["rows"]]


TABLES = {"trained": trained}
