"""Train the same model without mixing and with it, and print the two numbers side by side.

Each seed gives both trainings the same first weights and the same batches. The first number of a
row is that of the plain model, and the last line has the means over the seeds.
"""

import json
import math
import platform
import statistics
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
from common.files import written_whole
from common.fingerprint import fingerprint
from common.seeds import HELP, seeds
from torch import Tensor

from mixhead_plugin.parts import PartError, Variant

Fail = Callable[[str], NoReturn]  # of `common.errors.failing`

MIXING_CHOICES = ("position-wise", "position-independent", "low-rank", "differential")


def parser(description: str, steps: int, rate: float) -> ArgumentParser:
    """Return a parser with the flags that all these examples have.

    Args:
        description: what the example does, for --help
        steps: the default of --steps
        rate: the default of --lr
    """
    default = "(default: %(default)s)"
    flags = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    flags.add_argument("--mixing", choices=MIXING_CHOICES, default=MIXING_CHOICES[0], help=default)
    flags.add_argument("--seeds", type=seeds, default=range(1, 2), metavar="N", help=HELP)
    flags.add_argument("--save", type=Path, metavar="FILE", help="write the numbers as JSON")
    flags.add_argument("--steps", type=int, default=steps, help=default)
    flags.add_argument("--lr", type=float, default=rate, help=default)
    return flags


def check(args: Namespace, fail: Fail) -> None:
    """End the program where a flag of `parser` cannot be meant."""
    if args.steps < 1:
        fail(f"--steps {args.steps}: must be at least 1")
    check_rate("--lr", args.lr, fail)
    if args.save is not None:
        check_file("--save", args.save, fail)


def check_rate(flag: str, rate: float, fail: Fail) -> None:
    """End the program where a learning rate, the value of a flag, cannot be meant."""
    if not 0 <= rate <= 1000:  # NaN too
        fail(f"{flag} {rate}: must be from 0 to 1000")


def check_file(flag: str, file: Path, fail: Fail) -> None:
    """End the program where a file, the value of a flag, could not be written after a training."""
    if file.is_dir():
        fail(f"{flag} {file}: is a folder; must be the name of a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        fail(f"{flag} {file}: cannot be written to ({error.strerror})")


def check_heads(mixing: str, heads: int, width: int, fail: Fail) -> None:
    """End the program where heads of a model of this width cannot be mixed in this way."""
    try:
        Variant(head_mixing=mixing).sizes(heads, width)
    except PartError as error:
        fail(f"--mixing {mixing}: {error}")


def check_finite(what: str, numbers: Tensor, fail: Fail) -> None:
    """End the program where something of a model is NaN or infinite: its metric would lie."""
    if not bool(numbers.isfinite().all()):
        fail(f"{what} is no finite number; try a lower --lr")


def share_of_rate(step: int, steps: int) -> float:
    """Return the factor on the rate: it rises over a tenth of the steps, then falls as a cosine."""
    rise = 10 * (step + 1) / steps
    fall = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(rise, fall)


def compare(
    metric: str,
    train: Callable[[str, int, Namespace], float],
    args: Namespace,
    fail: Fail,
    libraries: tuple[str, ...] = (),
    inputs: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Train both models for each seed; print, save and return what came out.

    Args:
        metric: what the number is, with its unit
        train: a function of the kind of mixing (`none` or that of `args`), a seed and `args`, which
            trains one model and returns its number
        args: the flags of `parser`, and whatever `train` reads
        fail: ends the program with an error
        libraries: packages whose versions go into the file beside that of torch
        inputs: the flags that name files and folders on which the numbers depend; the names and
            sums of these go into the file
    """
    torch.set_num_threads(1)
    fingerprints = {name: fingerprint(getattr(args, name)) for name in inputs}
    rows = []
    for seed in args.seeds:
        row: dict[str, Any] = {"seed": seed}
        for mixing in ("none", args.mixing):
            began = time.process_time()  # other work on the machine does not count
            number = train(mixing, seed, args)
            took = time.process_time() - began
            check_finite(f"the {metric}", torch.tensor(number), fail)
            row[mixing] = {"number": number, "cpu_seconds": round(took, 1)}
            print(f"seed {seed}, {mixing}: {number:.4f}, {took:.0f} s of CPU time", flush=True)
        rows.append(row)
        if args.save is not None:
            save(args.save, metric, rows, args, libraries, fingerprints)

    plain = statistics.fmean(row["none"]["number"] for row in rows)
    mixed = statistics.fmean(row[args.mixing]["number"] for row in rows)
    print(f"{metric} = {mixed:.4f} with {args.mixing}, {plain:.4f} without mixing")
    return rows


def save(
    file: Path,
    metric: str,
    rows: list[dict[str, Any]],
    args: Namespace,
    libraries: tuple[str, ...],
    fingerprints: dict[str, dict[str, Any]],
) -> None:
    """Write what came out so far, and how."""
    # the rows have the seeds, and paths are of this machine alone: `fingerprints` tells the inputs
    settings = {
        name: value
        for name, value in vars(args).items()
        if name != "seeds" and isinstance(value, (str, int, float))
    }
    content = {
        "metric": metric,
        "settings": settings,
        "inputs": fingerprints,
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("torch", *libraries)},
        "rows": rows,
    }
    # a stop, or a full disk, while it is written must not cost the seeds before
    with written_whole(file) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
