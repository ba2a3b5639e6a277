"""What the log of fairseq-train says: sizes, speed, losses, memory of a GPU."""

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

START = "num. shared model params: "
PARAMETERS = re.compile(rf"{re.escape(START)}([\d,]+)")
GPU = re.compile(r"rank +\d+: .*total memory = ([\d.]+) GB ; name = (.*\S)")
LINE = re.compile(r"\| INFO \| (\S+) \| (.*)")
PAIR = re.compile(r"(\w+)[= ](-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)(?=,|\s*\||\s*$)")


class Log(NamedTuple):
    """None is what the log does not say."""

    updates: Optional[int]
    parameters: Optional[int]
    seconds_per_update: Optional[float]  # median over the intervals of --log-interval
    train_loss: Optional[float]  # bits, mean of the last epoch, with dropout
    valid_loss: Optional[float]  # bits, of the last validation
    gpu: Optional[str]
    gpu_peak_mib: Optional[float]  # of what torch had allocated; fairseq rounds it to 0.1 GiB


def entries(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """The kind and the values of every line of the progress, of --log-format simple or json.

    The kinds are train_inner, train and valid; a line of a validation has the name of its set.
    """
    for name, rest in LINE.findall(text):
        kind = name if name in ("train_inner", "train") else "valid"
        if kind == "valid" and f"| valid on '{name}' subset |" not in rest and f'"{name}_' not in rest:
            continue
        if rest.startswith("{"):
            try:
                found = json.loads(rest)
            except ValueError:  # cut off
                continue
            yield kind, {key.removeprefix(f"{name}_"): number(value) for key, value in found.items()}
        else:
            yield kind, {key: float(value) for key, value in PAIR.findall(rest)}


def number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def seconds(values: dict[str, float], updates: float) -> Optional[float]:
    """Of one update, from a line of train_inner for `updates` of them.

    Words of a batch / words per second, which fairseq rounds to 0.1 each; where a log lacks them, what is more exact of
    updates per second, rounded to 0.01, and the seconds of the interval, rounded to 1.
    """
    if values.get("wps", 0) > 0 and values.get("wpb", 0) > 0:
        return values["wpb"] / values["wps"]
    if values.get("ups", 0) >= 1:
        return 1 / values["ups"]
    if values.get("train_wall") and updates > 0:
        return values["train_wall"] / updates
    return None


def read(path: Path) -> Log:
    """Of a log that may be of several starts; an empty one of a file that is not there."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    times: list[float] = []
    train: dict[str, float] = {}
    valid: dict[str, float] = {}
    updates = 0.0
    free: list[float] = []
    for start in text.split(START):
        before = 0.0  # the first interval of a start has the warming up in it
        for kind, values in entries(start):
            updates = values.get("num_updates", updates)
            if kind == "valid":  # of the first set, which checkpoint_best is chosen by
                valid = valid if valid.get("num_updates", -1) == updates else values
            elif kind == "train":
                train = values
            else:
                passed = updates - before
                if before and passed > 0 and (found := seconds(values, passed)) is not None:
                    times.append(found)
                before = updates
            if "gb_free" in values:
                free.append(values["gb_free"])
    parameters = PARAMETERS.findall(text)
    gpus = GPU.findall(text)
    return Log(
        int(updates) or None,
        int(parameters[-1].replace(",", "")) if parameters else None,
        statistics.median(times) if times else None,
        loss(train),
        loss(valid),
        gpus[-1][1] if gpus else None,
        round((float(gpus[-1][0]) - min(free)) * 1024, 1) if gpus and free else None,
    )


def loss(values: dict[str, float]) -> Optional[float]:
    """The likelihood alone where label smoothing is in `loss`."""
    return values.get("nll_loss", values.get("loss"))
