#!/usr/bin/env python
"""Measure how fast attention is, and how much memory it takes.

    scripts/benchmark.py                     all cases, on a CPU
    scripts/benchmark.py core module         two of them
    scripts/benchmark.py --device cuda       all cases on a GPU, in bfloat16

Cases:
  core      the attention alone, from queries, keys and values, with a causal mask
  module    the multi-head attention with its projections: short padded sentences, and long rows with a causal mask
  training  one update of a language model by fairseq's trainer
  memory    the peak memory of `core` beyond its inputs (on a GPU every case shows its peak)

Forward and backward pass are timed together. First the values and gradients of each contender are checked; if one is
wrong, the command ends without times. Then the contenders take turns, round by round. `by upstream` is the time
divided by that of torch or fairseq, `by softmax` by that of the plugin's own softmax; both are medians over the rounds.
The rows go to the terminal and to benchmark.csv in --out.
"""

import argparse
import csv
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import core  # noqa: E402
from benchmarks.measure import Case, measure, peak_of_process  # noqa: E402

CASES = ("core", "module", "training", "memory")
COLUMNS = ("case", "size", "name", "ms", "ms_min", "ms_max", "by_upstream", "by_softmax", "peak_mib")
SHORT = [(heads, length) for heads in (8, 32) for length in (10, 16, 25, 64)]  # of 256 dimensions


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmark.py", description=__doc__, formatter_class=raw)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="(default: float32; on a GPU bfloat16)")
    parser.add_argument("--rounds", type=int, default=11, help="how often each contender runs (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="on the attention weights (default: %(default)s)")
    size = "sizes of `core` and `memory`: BATCHxHEADSxLENGTHxHEAD_SIZE"
    parser.add_argument("--sizes", nargs="+", metavar="SIZE", help=size)
    parser.add_argument("--tokens", type=int, default=2560, help="batch x length of `module` (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"), help="(default: %(default)s)")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)  # one contender, in a process of its own
    args = parser.parse_args(words)
    if unknown := sorted(set(args.cases) - set(CASES)):
        parser.error(f"{', '.join(unknown)}: cases are {', '.join(CASES)}")
    if args.rounds < 1 or args.tokens < 64 or not 0 <= args.dropout < 1:
        parser.error("--rounds must be at least 1, --tokens at least 64, --dropout at least 0 and below 1")
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device is visible")
    args.cases = args.cases or CASES
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    default = ["16x8x1024x64", "16x8x4096x64", "16x8x1024x128"] if on_gpu else ["4x8x512x64", "1x8x2048x64"]
    args.sizes = [tuple(map(int, size.split("x"))) for size in args.sizes or default if size.count("x") == 3]
    if not args.sizes or min(map(min, args.sizes)) < 1:
        parser.error("--sizes: must be four numbers each, such as 4x8x512x64")
    return args


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases lazily, so that each is measured before the next is built."""
    own = (args.device, args.dtype)
    if "core" in args.cases:
        for size in args.sizes:
            yield from core.cases(size, *own, args.dropout)
    if "module" in args.cases:
        from benchmarks import module  # needs fairseq

        for heads, length in SHORT:
            yield module.case((max(2, args.tokens // length), heads, length, 256 // heads), False, args.dropout, *own)
        for heads, length, head_dim in ((8, 512, 64), (16, 128, 8)):
            yield module.case((max(1, args.tokens // length), heads, length, head_dim), True, args.dropout, *own)
    if "training" in args.cases:
        from benchmarks import model

        large = (model.LARGE, 267744, 8)  # WikiText-103
        yield model.case(*(large if args.device == "cuda" else (model.SMALL, 4000, 2)), 512, *own)


def memory(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each contender of `core`; each runs in a fresh process."""
    for size in args.sizes:
        peaks: list[float] = []
        for chosen in core.cores("cpu", args.dtype, args.dropout):
            own = ["--dtype", args.dtype, "--dropout", str(args.dropout)]
            command = [sys.executable, __file__, *own, "--memory-of", json.dumps(size), json.dumps(chosen)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"memory of {chosen.name}: {done.stderr.strip().splitlines()[-1]}")
            peaks.append(float(done.stdout.splitlines()[-1]))
            row = {"case": "memory", "size": core.title(size, args.dropout), "name": chosen.name}
            yield {**row, "peak_mib": peaks[-1], "by_upstream": peaks[-1] / peaks[0]}


def memory_of(args: argparse.Namespace) -> float:
    (b, h, n, d), chosen = json.loads(args.memory_of[0]), core.Core(*json.loads(args.memory_of[1]))
    for size in ((1, h, min(256, n), d), (b, h, n, d)):  # in the first, libraries load and threads start
        inputs = core.Inputs(size, "cpu", args.dtype, args.dropout)
        peak = peak_of_process(lambda inputs=inputs: inputs.with_gradients(chosen))
    return peak


def tables(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    for case in cases(args):
        yield measure(case, args.rounds, args.device)
    if "memory" in args.cases and args.device == "cpu":
        yield list(memory(args))


def machine(args: argparse.Namespace) -> dict[str, str]:
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    own = {"dtype": args.dtype, "python": platform.python_version(), "torch": torch.__version__}
    return {"device": device, **own, "load": f"{os.getloadavg()[0]:.1f}"}


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = [column for column in COLUMNS[3:] if any(column in row for row in rows)]
    print(f"\n{rows[0]['case']}: {rows[0]['size']}\n{'':32}" + "".join(f"{c.replace('_', ' '):>13}" for c in columns))
    for row in rows:
        cells = [f"{row[column]:13.3g}" if column in row else " " * 13 for column in columns]
        print(f"  {row['name']:30}" + "".join(cells), flush=True)


def main(words: Sequence[str] | None = None) -> None:
    args = parse(words)
    if args.memory_of:
        print(memory_of(args))
        return
    logging.disable(logging.INFO)  # fairseq turns on everyone's debugging messages
    about = machine(args)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for found in tables(args):
        show(found)
        rows += found
        with (args.out / "benchmark.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*COLUMNS, *about])
            writer.writeheader()
            writer.writerows({**about, **row} for row in rows)
    print(f"\n{args.out}/benchmark.csv")


if __name__ == "__main__":
    main()
