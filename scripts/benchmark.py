#!/usr/bin/env python3
"""Measure how fast attention is, and how much memory it takes.

    scripts/benchmark.py core module         two cases; docs/speed.md has more commands

Cases:
  core      the attention alone, from queries, keys and values, with a causal mask, beside what
            people write instead
  shares    the share of the machine's own product of matrices that `core` reaches, on a CPU
  factors   a low-rank mixing by its factors, beside the same mixing by its matrix, on a CPU
  step      a step of decoding: one query against 1,024 keys, on a CPU
  module    the multi-head attention with its projections: short padded sentences, and long rows
            with a causal mask
  variants  the same with every normalizer, and with everything that the flags add, one at a time
  training  one update of a language model by fairseq's trainer
  decoding  a beam search of a translation model by fairseq's generator, forward alone
  memory    the peak memory of `core` beyond its inputs, each contender in a process of its own
            (`core` shows its peak, too, and on a GPU every case does)
  layers    the peak memory of a training step of twelve layers, with and without kept weights
  nanogpt   time and peak memory of a training step of nanoGPT's models on a CPU: as they are, mixed
            by nn.mix, and mixed by hand in a loop over blocks of queries

Otherwise forward and backward pass are timed together. First the results of each contender are
checked; if one is wrong, the command ends without times. Then the contenders take turns, round by
round. `by upstream` is the time divided by that of torch or fairseq, `by softmax` by that of the
plugin's own softmax; both are medians over the rounds.

Some contenders of `core` need a C++ compiler, which takes minutes. Without one they are left out.
`compile s` is what their first call takes longer; torch keeps on disk what it has compiled, so a
second command shows less.
"""

import argparse
import functools
import logging
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this checkout, whichever one is installed

from benchmarks import core, factors, nanogpt, shares, small
from benchmarks.measure import CLOCKS, measure

CASES = (
    "core",
    "shares",
    "factors",
    "step",
    "module",
    "variants",
    "training",
    "decoding",
    "memory",
    "layers",
    "nanogpt",
)
WITHOUT_FAIRSEQ = {"core", "shares", "factors", "step", "memory", "layers", "nanogpt"}
COLUMNS = (
    "ms",
    "gflop",
    "share_of_mm",
    "ms_min",
    "ms_max",
    "by_upstream",
    "by_softmax",
    "peak_mib",
    "compile_s",
)
COLUMNS += ("ms_checkpointed", "peak_checkpointed_mib")  # of a loop, with checkpointing


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", default=CASES, metavar="CASE", help=f"{', '.join(CASES)} (default: all)"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="(default: float32; on a GPU bfloat16)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=11,
        help="how often each contender runs (default: %(default)s)",
    )
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="on the attention weights (default: %(default)s)"
    )
    clock = "time on a CPU: wall, or cpu, which other work disturbs less (default: %(default)s)"
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help=clock)
    sizes = "batch, heads, length, head size of `core` and `memory`"
    parser.add_argument("--sizes", nargs="+", metavar="BxHxNxD", help=sizes)
    without = "leave out contenders of `core` and `memory` whose name holds one of the words"
    parser.add_argument("--without", nargs="+", default=[], metavar="WORD", help=without)
    parser.add_argument(
        "--tokens", type=int, default=2560, help="batch x length of `module` (default: %(default)s)"
    )
    args = parser.parse_args(words)
    if unknown := sorted(set(args.cases) - set(CASES)):
        parser.error(f"{', '.join(unknown)}: cases are {', '.join(CASES)}")
    if args.rounds < 1 or args.tokens < 64:
        parser.error(f"--rounds {args.rounds}, --tokens {args.tokens}: must be at least 1 and 64")
    on_gpu = args.device == "cuda"
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    default = (
        ["16x8x1024x64", "16x8x4096x64", "16x8x1024x128"]
        if on_gpu
        else ["4x8x512x64", "1x8x2048x64"]
    )
    args.sizes = [
        tuple(map(int, size.split("x"))) for size in args.sizes or default if size.count("x") == 3
    ]
    if not args.sizes or min(map(min, args.sizes)) < 1:
        parser.error("--sizes: must be four numbers each, such as 4x8x512x64")
    return args


def memory(args: argparse.Namespace, size: core.Size) -> list[dict[str, Any]]:
    """Return a row for each contender of `core`; each runs in a fresh process."""
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for chosen in core.cores("cpu", args.dtype, args.dropout, args.without):
            if chosen.is_compiled or "checkpointed" in chosen.provider:
                continue  # `core` shows their memory
            peak = pool.submit(core.peak, size, chosen, args.dtype, args.dropout).result()
            row = {
                "case": "memory",
                "size": core.title(size, args.dropout),
                "name": chosen.name,
                "peak_mib": peak,
            }
            rows.append(row)
            row["by_upstream"] = peak / rows[0]["peak_mib"]
    return rows


def layers(size: core.Size) -> list[dict[str, Any]]:
    """Return a row for each way to train twelve layers; each runs in a fresh process."""
    rows = []
    for name, setting in small.SETTINGS.items():
        environment = mock.patch.dict(os.environ, {"MIXHEAD_KEPT_MIB": setting.budget})
        with environment, ProcessPoolExecutor(1, get_context("spawn")) as pool:
            peak = pool.submit(small.layers_peak, size, name).result()
        shape = core.title(size, 0.0)
        rows.append({"case": "layers", "size": shape, "name": name, "peak_mib": peak})
    return rows


def tables(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each case, measured before the next case is built."""
    if {*args.cases} - WITHOUT_FAIRSEQ:
        from benchmarks import model, module  # need fairseq
    own = (args.device, args.dtype)
    timed = functools.partial(measure, rounds=args.rounds, device=args.device, clock=args.clock)
    if "core" in args.cases:
        for size in args.sizes:
            yield from core.tables(size, *own, args.dropout, args.rounds, args.clock, args.without)
    if "shares" in args.cases and args.device == "cpu":
        for size in args.sizes:
            yield shares.table(size, args.rounds, args.clock)
    if "factors" in args.cases and args.device == "cpu":
        for size in args.sizes:
            for rank in (2, 4):
                yield timed(factors.case(size, rank))
    if "step" in args.cases and args.device == "cpu":
        yield timed(small.step((16, 8, 1, 64), args.dtype))
    if "module" in args.cases:
        short = [
            (heads, length, 256 // heads, False) for heads in (8, 32) for length in (10, 16, 25, 64)
        ]
        for heads, length, head_dim, causal in (*short, (8, 512, 64, True), (16, 128, 8, True)):
            size = (max(2, args.tokens // length), heads, length, head_dim)
            yield timed(module.case(size, causal, args.dropout, *own))
    if "variants" in args.cases:
        for heads, head_dim in ((8, 64), (32, 8)):
            size = (max(1, args.tokens // 512), heads, min(512, args.tokens), head_dim)
            yield timed(module.case(size, True, args.dropout, *own, module.every_variant()))
    if "training" in args.cases:
        large = (model.LARGE, 267744, 8)  # WikiText-103
        yield timed(
            model.case(*(large if args.device == "cuda" else (model.SMALL, 4000, 2)), 512, *own)
        )
    if "decoding" in args.cases:
        yield timed(model.search(*own))
    if "memory" in args.cases and args.device == "cpu":
        for size in args.sizes:
            yield memory(args, size)
    if "layers" in args.cases and args.device == "cpu":
        for size in args.sizes:
            yield layers(size)
    if "nanogpt" in args.cases and args.device == "cpu":
        for title in nanogpt.SIZES:
            yield nanogpt.table(title, args.rounds, args.clock)


def show(rows: Sequence[dict[str, Any]]) -> None:
    known = set().union(*rows)
    columns = [column for column in COLUMNS if column in known]
    headings = [column.replace("_", " ") for column in columns]
    widths = [max(13, len(heading) + 2) for heading in headings]
    named = max(30, *(len(row["name"]) for row in rows))

    print(f"\n{rows[0]['case']}: {rows[0]['size']}")
    print(" " * (2 + named) + "".join(map(str.rjust, headings, widths)))
    for row in rows:
        cells = [number(row[column]) if column in row else "" for column in columns]
        print(f"  {row['name']:{named}}" + "".join(map(str.rjust, cells, widths)), flush=True)


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def main(words: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Print and return the rows."""
    args = parse(words)
    logging.disable(logging.INFO)  # fairseq turns on everyone's debugging messages
    device = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    print(f"device {device}, dtype {args.dtype}, {versions}, load {os.getloadavg()[0]:.1f}")
    rows = []
    for found in tables(args):
        show(found)
        rows += found
    return rows


if __name__ == "__main__":
    main()
