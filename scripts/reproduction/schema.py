"""What a table's JSON must look like for everything that reads it."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from reproduction import tables
from reproduction.tables import NUMERIC


class Kind(NamedTuple):
    words: str
    holds: Callable[[Any], bool]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and is_number(value) and value > 0


def one_of(*values: str) -> Kind:
    return Kind(f"one of {', '.join(values)}", lambda value: value in values)


def maybe(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or null", lambda value: value is None or kind.holds(value))


def list_of(kind: Kind) -> Kind:
    holds = kind.holds
    return Kind(
        f"a list, not empty, each {kind.words}",
        lambda value: isinstance(value, list) and bool(value) and all(map(holds, value)),
    )


def by_name(kind: Kind) -> Kind:
    return Kind(
        f"an object, each value {kind.words}",
        lambda value: isinstance(value, dict) and all(map(kind.holds, value.values())),
    )


TEXT = Kind("a text", lambda value: isinstance(value, str))
NUMBER = Kind("a number", is_number)
COUNT = Kind("a whole number from 1 on", is_count)
ANY_LIST = Kind("a list", lambda value: isinstance(value, list))
TEXTS = list_of(TEXT)
WORDS = Kind("a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.holds, value)))
FLAGS = by_name(WORDS)

NUMBERS = re.compile(r"(\d+(\.\d+)?(/\d+(\.\d+)?)*)?")
CELL = Kind("numbers with / between them", lambda value: isinstance(value, str) and bool(NUMBERS.fullmatch(value)))
CONTENT = {"title": TEXT, "published": by_name(CELL), "published_metrics": WORDS}
RECIPE = {"example": TEXT, "updates": COUNT, "tokens_per_update": COUNT}
MORE_OF_RECIPE = {"parameters": maybe(NUMBER)}
PART = {
    "title": TEXT,
    "example": TEXT,
    "measure": TEXT,
    "better": one_of("higher", "lower"),
    "metrics": TEXTS,
    "axes": Kind(f"an object, not empty, each value {TEXTS.words}", lambda v: bool(v) and by_name(TEXTS).holds(v)),
    "runs": ANY_LIST,
}
MORE_OF_PART = {"grid": TEXT, "about": TEXT}
RUN = {"labels": TEXTS, "seed": COUNT, "digest": TEXT, "evaluate": by_name(FLAGS), "values": by_name(NUMBER)}
MORE_OF_RUN = {
    "train": FLAGS,
    "flags": maybe(FLAGS),
    "evaluation_flags": maybe(by_name(FLAGS)),
    "average": maybe(TEXT),
    **dict.fromkeys(("updates", "parameters", "threads"), maybe(COUNT)),
    **dict.fromkeys(("train_loss", "valid_loss", "wall_seconds", "seconds_per_update"), maybe(NUMBER)),
    **dict.fromkeys(("peak_memory_mib", "load"), maybe(NUMBER)),
    **dict.fromkeys(("data", "device", "commit", "evaluated_at", "date"), maybe(TEXT)),
    "versions": maybe(by_name(TEXT)),
}
CROSS = "cross"  # the place that is no self-attention
SPECTRUM = {
    "length": COUNT,
    "windows": COUNT,
    "places": Kind(
        "an object with a place of self-attention", lambda v: isinstance(v, dict) and bool(v.keys() - {CROSS})
    ),
}
PLACE = {"mean_effective_rank": NUMBER, "mean_cumulative": Kind("a list of numbers", list_of(NUMBER).holds)}
COST = {"rounds": COUNT, "updates": COUNT, "device": TEXT, "load_before": NUMBER, "rows": ANY_LIST}
COST_ROW = {"labels": TEXTS, "seconds_per_update": NUMBER, "peak_memory_mib": NUMBER}
RATIOS = ("time_ratios", "memory_ratios")  # to the row of softmax, where there is one
MORE_OF_COST = {"load_after": NUMBER, "threads": COUNT, "gpus": COUNT}
MORE_OF_COST_ROW = {"digest": TEXT, "flags": maybe(FLAGS), **dict.fromkeys(RATIOS, list_of(NUMBER))}


def wrong(content: Any, name: str) -> str:
    """What makes a file none of this program; empty if nothing does."""
    if not isinstance(content, dict) or content.get("table") != name or not isinstance(content.get("scales"), dict):
        return f"must hold table {name!r} and its scales"
    found = problem(content, "", {}, CONTENT)
    for scale, part in content["scales"].items():
        if scale not in tables.SCALES:
            return f"scales.{scale}: must be one of {', '.join(tables.SCALES)}"
        found = found or of_part(part, f"scales.{scale}")
    return found


def of_part(part: Any, where: str) -> str:
    found = problem(part, where, PART, MORE_OF_PART)
    if found:
        return found
    for recipe in ("recipe", "paper"):
        if part.get(recipe) is not None:
            found = found or problem(part[recipe], f"{where}.{recipe}", RECIPE, MORE_OF_RECIPE)
    found = found or of_axes(part["axes"], f"{where}.axes")
    for i, run in enumerate(part["runs"]):
        found = found or of_run(run, f"{where}.runs[{i}]", part)
    found = found or repeated(part["runs"], f"{where}.runs")
    if "cost" in part:
        found = found or problem(part["cost"], f"{where}.cost", COST, MORE_OF_COST)
        for i, row in enumerate([] if found else part["cost"]["rows"]):
            found = found or problem(row, f"{where}.cost.rows[{i}]", COST_ROW, MORE_OF_COST_ROW)
    return found


def of_axes(axes: Mapping[str, Any], where: str) -> str:
    for axis in NUMERIC & axes.keys():
        for label in axes[axis]:
            if not label.isdecimal() or int(label) < 1:
                return f"{where}.{axis}: each must be {COUNT.words}, not {shown(label)}"
    return ""


def of_run(run: Any, where: str, part: Mapping[str, Any]) -> str:
    axes = part["axes"]
    found = problem(run, where, RUN, MORE_OF_RUN)
    if not found and len(run["labels"]) != len(axes):
        found = f"{where}.labels: must be {len(axes)}, one of each axis, not {shown(run['labels'])}"
    for label, (axis, labels) in zip([] if found else run["labels"], axes.items()):
        if label not in labels:
            return f"{where}.labels: {label}: must be one of {axis}: {', '.join(labels)}"
    if not found and part["measure"] == "perplexity" and min(run["values"].values(), default=1) <= 0:
        found = f"{where}.values: a perplexity must be above 0, not {shown(run['values'])}"
    return found or (of_spectrum(run["spectrum"], f"{where}.spectrum") if "spectrum" in run else "")


def repeated(runs: Sequence[Mapping[str, Any]], where: str) -> str:
    known: set[tuple[Any, ...]] = set()
    for i, run in enumerate(runs):
        if (name := (*run["labels"], run["seed"])) in known:
            return f"{where}[{i}]: {'/'.join(run['labels'])} with seed {run['seed']} is there twice"
        known.add(name)
    return ""


def of_spectrum(spectrum: Any, where: str) -> str:
    found = problem(spectrum, where, SPECTRUM)
    for place, values in {} if found else spectrum["places"].items():
        found = found or problem(values, f"{where}.places.{place}", PLACE)
        if not found and len(values["mean_cumulative"]) != spectrum["length"]:
            found = f"{where}.places.{place}.mean_cumulative: must be {spectrum['length']} numbers, as its length says"
    return found


def problem(value: Any, where: str, needed: Mapping[str, Kind], more: Mapping[str, Kind] = {}) -> str:
    """What is wrong with the fields of an object; empty if nothing is."""
    if not isinstance(value, dict):
        return f"{where}: must be an object with {', '.join(sorted(needed))}, not {shown(value)}"
    dot = f"{where}." if where else ""
    for name, kind in {**needed, **more}.items():
        if name not in value and name in needed:
            return f"{dot}{name}: is missing"
        if name in value and not kind.holds(value[name]):
            return f"{dot}{name}: must be {kind.words}, not {shown(value[name])}"
    return ""


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
