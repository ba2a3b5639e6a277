"""The command `mixhead check`: try all calls, and print the report."""

import json
import sys
from typing import Any

import torch

from mixhead_plugin.check.judging import judge
from mixhead_plugin.check.machine import machine_facts
from mixhead_plugin.check.speed import speed
from mixhead_plugin.check.text import as_text
from mixhead_plugin.check.variants import NOT_TRIED, kinds_to_try

# One trial then takes about 4 GiB. The matrices of a position-wise mixing have the square of the
# heads.
MOST_HEADS = 256
MOST_HEAD_DIM = 1024


def main(device: str | None, heads: int, head_dim: int, as_json: bool) -> int:
    """Print the report; return the exit status: 1 if a result is wrong."""
    chosen = _device(device)
    _check_size("--heads", heads, MOST_HEADS)
    _check_size("--head-dim", head_dim, MOST_HEAD_DIM)
    report = check(chosen, heads, head_dim)
    print(json.dumps(report, indent=1, allow_nan=False) if as_json else as_text(report))
    return int(any(row["fault"] for row in report["variants"]))


def _device(name: str | None) -> torch.device:
    """Return the device of --device; None stands for a GPU if there is one.

    The process ends if the device does not work.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            # The device of a tensor has a number, which "cuda" lacks; and making one shows early
            # that the device works.
            torch.cuda.set_device(torch.empty(1, device=device).device)
        elif device.type != "cpu":
            raise RuntimeError("must be cpu, cuda or cuda:1")
    except (RuntimeError, AssertionError) as error:
        sys.exit(f"mixhead check: --device {name}: {str(error).splitlines()[0]}")
    return device


def _check_size(flag: str, value: int, most: int) -> None:
    """End the process if a size is too small or too large."""
    if value < 1:
        sys.exit(f"mixhead check: {flag} {value}: must be at least 1")
    if value > most:
        sys.exit(
            f"mixhead check: {flag} {value}: must be at most {most}, because each trial holds "
            "all weights"
        )


def check(device: torch.device, heads: int, head_dim: int) -> dict[str, Any]:
    """Return the whole report; a row of `variants` whose `fault` is not empty is wrong."""
    rows: list[dict[str, Any]] = []
    todo = list(kinds_to_try(device, heads, head_dim))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small calls wait for more threads longer than these save
    try:
        for names, kind in todo:
            if len(rows) % 20 == 0:
                progress = f"{len(rows)} of {len(todo)} variants"
                print(f"mixhead check: {progress}", file=sys.stderr, flush=True)
            rows.append({**names, **judge(kind)._asdict()})
    finally:  # also after Ctrl-C, for a program that goes on
        torch.set_num_threads(threads)
    return {
        "machine": machine_facts(device),
        "variants": rows,
        "not_tried": NOT_TRIED,
        "milliseconds": speed(device),
    }
