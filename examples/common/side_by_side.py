"""Train the same model without mixing and with it, and print the two numbers side by side.

Each seed gives both trainings the same first weights and the same batches. The first number of a
row is that of the plain model, and the last line has the means over the seeds.
"""

import json
import math
import platform
import statistics
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

MIXINGS = ("position-wise", "position-independent", "low-rank", "differential")


def seeds(words: str) -> range:
    """Return the seeds of `5` or `1-8`."""
    first, _, last = words.partition("-")
    if not (first + (last or first)).isdecimal():
        raise ArgumentTypeError(f"{words}: must be a number or a range, such as 1-8")
    found = range(int(first), int(last or first) + 1)
    if not found:
        raise ArgumentTypeError(f"{words}: must be a range that begins with its smaller number")
    return found


def parser(description: str) -> ArgumentParser:
    """Return a parser with the flags that all these examples have."""
    found = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    found.add_argument(
        "--mixing", choices=MIXINGS, default=MIXINGS[0], help="(default: %(default)s)"
    )
    found.add_argument(
        "--seeds", type=seeds, default=range(1, 2), metavar="N", help="N or FIRST-LAST (default: 1)"
    )
    found.add_argument("--save", type=Path, metavar="FILE", help="write the numbers as JSON")
    return found


def share_of_rate(step: int, steps: int) -> float:
    """Return the factor on the rate: it rises over a tenth of the steps, then falls as a cosine."""
    rise = 10 * (step + 1) / steps
    fall = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(rise, fall)


def compare(
    metric: str,
    train: Callable[[str, int, Namespace], float],
    args: Namespace,
    libraries: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Train both models for each seed; print, save and return what came out.

    Args:
        metric: what the number is, with its unit
        train: takes the kind of mixing, `none` or that of `args`, a seed and `args`; trains one
            model and returns its number
        args: of `parser`, and whatever `train` reads
        libraries: whose versions go into the file beside that of torch
    """
    torch.set_num_threads(1)
    rows = []
    for seed in args.seeds:
        row: dict[str, Any] = {"seed": seed}
        for mixing in ("none", args.mixing):
            began = time.process_time()  # other work on the machine does not count
            number = train(mixing, seed, args)
            took = time.process_time() - began
            row[mixing] = {"number": number, "cpu_seconds": round(took, 1)}
            print(f"seed {seed}, {mixing}: {number:.4f}, {took:.0f} s of CPU time", flush=True)
        rows.append(row)
        if args.save is not None:
            save(args.save, metric, rows, args, libraries)

    plain, mixed = (
        statistics.fmean(row[mixing]["number"] for row in rows) for mixing in ("none", args.mixing)
    )
    print(f"{metric} = {mixed:.4f} with {args.mixing}, {plain:.4f} without mixing")
    return rows


def save(
    file: Path, metric: str, rows: list[dict[str, Any]], args: Namespace, libraries: tuple[str, ...]
) -> None:
    """Write what came out so far, and how."""
    # the rows have the seeds, and paths are of this machine alone
    settings = {
        name: value
        for name, value in vars(args).items()
        if name != "seeds" and isinstance(value, (str, int, float))
    }
    content = {
        "metric": metric,
        "settings": settings,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", *libraries)},
        "rows": rows,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")
