#!/usr/bin/env python3
"""Measure how fast attention is, and how much memory it takes.

    scripts/benchmark.py core module         two of the cases; docs/speed.md has more commands

Most cases time forward and backward pass together. First the results of each contender are checked;
if one is wrong, the command ends without times. `decoding` is checked in float32 alone, because by
the rounding of bfloat16 a search may find other words. `memory` and `layers` print no times, and
check nothing. Then the contenders take turns, round by round.
`by upstream` is the time divided by that of torch or fairseq, `by softmax` by that of the plugin's
own softmax; both are medians over the rounds.

Some contenders of `core` need a C++ compiler, which takes minutes. Without one they are left out.
`compile s` is what their first call takes longer; torch keeps on disk what it has compiled, so a
second command shows less.
"""

import argparse
import logging
import os
import platform
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # this checkout, whichever one is installed

from benchmarks import core, factors, nanogpt, shares, small
from benchmarks.measure import CLOCKS, Case, measure

Rows = list[dict[str, Any]]

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
    # of a loop, with checkpointing
    "ms_checkpointed",
    "peak_checkpointed_mib",
)
DROPOUT = 0.1  # where --dropout is not given
SIZES = {
    "cpu": ["4x8x512x64", "1x8x2048x64"],
    "cuda": ["16x8x1024x64", "16x8x4096x64", "16x8x1024x128"],
}


def timed(args: argparse.Namespace, case: Case) -> Rows:
    return measure(case, rounds=args.rounds, device=args.device, clock=args.clock)


# ---- the cases ---------------------------------------------------------------------------------
# Each yields its tables. Those of fairseq import it themselves, so that the others do without it.


def attention_alone(args: argparse.Namespace) -> Iterator[Rows]:
    for size in args.sizes:
        yield from core.tables(
            size,
            args.device,
            args.dtype,
            args.dropout,
            args.rounds,
            args.clock,
            args.without,
        )


def shares_of_products(args: argparse.Namespace) -> Iterator[Rows]:
    for size in args.sizes:
        yield shares.table(size, args.rounds, args.clock)


def by_factors(args: argparse.Namespace) -> Iterator[Rows]:
    for size in args.sizes:
        for rank in (2, 4):
            yield timed(args, factors.case(size, rank))


def decoding_step(args: argparse.Namespace) -> Iterator[Rows]:
    yield timed(args, small.step((16, 8, 1, 64), args.dtype))


def multi_head(args: argparse.Namespace) -> Iterator[Rows]:
    from benchmarks import module

    def table(heads: int, length: int, head_dim: int, causal: bool) -> Rows:
        size = (max(2, args.tokens // length), heads, length, head_dim)
        return timed(args, module.case(size, causal, args.dropout, args.device, args.dtype))

    # short padded sentences of a model of width 256
    for heads in (8, 32):
        for length in (10, 16, 25, 64):
            yield table(heads, length, 256 // heads, causal=False)
    # long rows
    yield table(8, 512, 64, causal=True)
    yield table(16, 128, 8, causal=True)


def every_variant(args: argparse.Namespace) -> Iterator[Rows]:
    from benchmarks import module

    for heads, head_dim in ((8, 64), (32, 8)):
        size = (max(1, args.tokens // 512), heads, min(512, args.tokens), head_dim)
        case = module.case(
            size,
            causal=True,
            dropout=args.dropout,
            device=args.device,
            dtype=args.dtype,
            variants=module.every_variant(),
        )
        yield timed(args, case)


def updates(args: argparse.Namespace) -> Iterator[Rows]:
    from benchmarks import model

    if args.device == "cuda":
        arch = model.LARGE
        vocabulary = 267744  # that of WikiText-103
        batch = 8
    else:
        arch = model.SMALL
        vocabulary = 4000
        batch = 2
    case = model.case(
        arch, vocabulary, batch=batch, length=512, device=args.device, dtype=args.dtype
    )
    yield timed(args, case)


def beam_search(args: argparse.Namespace) -> Iterator[Rows]:
    from benchmarks import model

    yield timed(args, model.search(args.device, args.dtype))


def memory(args: argparse.Namespace) -> Iterator[Rows]:
    """Yield for each size a row for each contender of `core`; each runs in a fresh process."""
    for size in args.sizes:
        rows: Rows = []
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
        yield rows


def twelve_layers(args: argparse.Namespace) -> Iterator[Rows]:
    """Yield for each size a row for each way to train them; each runs in a fresh process."""
    for size in args.sizes:
        rows: Rows = []
        for name, setting in small.SETTINGS.items():
            environment = mock.patch.dict(os.environ, {"MIXHEAD_KEPT_MIB": setting.budget})
            with environment, ProcessPoolExecutor(1, get_context("spawn")) as pool:
                peak = pool.submit(small.layers_peak, size, name).result()
            shape = core.title(size, 0.0)
            rows.append({"case": "layers", "size": shape, "name": name, "peak_mib": peak})
        yield rows


def nanogpt_step(args: argparse.Namespace) -> Iterator[Rows]:
    for title in nanogpt.SIZES:
        yield nanogpt.table(title, args.rounds, args.clock)


class Bench(NamedTuple):
    """A case of the command line.

    Args:
        tables: yields its tables, each measured before the next is built
        about: what it measures, for --help
        on_gpu: whether it runs with --device cuda, too
        in_bfloat16: whether it runs with --dtype bfloat16, too
        drops: whether it takes --dropout
    """

    tables: Callable[[argparse.Namespace], Iterator[Rows]]
    about: str
    on_gpu: bool = False
    in_bfloat16: bool = False
    drops: bool = False

    def refusal(self, args: argparse.Namespace) -> str:
        """Return which flag it does not take; empty if it takes all that were given."""
        if args.device == "cuda" and not self.on_gpu:
            return "runs on a CPU only, so leave out --device cuda"
        if args.dtype == "bfloat16" and not self.in_bfloat16:
            return "runs in float32 only, so leave out --dtype bfloat16"
        if args.dropout is not None and not self.drops:
            return f"has no such dropout, so leave out --dropout {args.dropout:g}"
        return ""


BENCHES = {
    "core": Bench(
        attention_alone,
        "the attention alone, from queries, keys and values, with a causal mask, beside what "
        "people write instead",
        on_gpu=True,
        in_bfloat16=True,
        drops=True,
    ),
    "shares": Bench(
        shares_of_products, "the share of the machine's own product of matrices that `core` reaches"
    ),
    "factors": Bench(
        by_factors, "a low-rank mixing by its factors, beside the same mixing by its matrix"
    ),
    "step": Bench(
        decoding_step, "a step of decoding: one query against 1,024 keys", in_bfloat16=True
    ),
    "module": Bench(
        multi_head,
        "the multi-head attention with its projections: short padded sentences, and long rows with "
        "a causal mask",
        on_gpu=True,
        in_bfloat16=True,
        drops=True,
    ),
    "variants": Bench(
        every_variant,
        "the same with every normalizer, and with everything that the flags add, one at a time",
        on_gpu=True,
        in_bfloat16=True,
        drops=True,
    ),
    "training": Bench(
        updates,
        "one update of a language model by fairseq's trainer",
        on_gpu=True,
        in_bfloat16=True,
    ),
    "decoding": Bench(
        beam_search,
        "a beam search of a translation model by fairseq's generator, forward alone",
        on_gpu=True,
        in_bfloat16=True,
    ),
    "memory": Bench(
        memory,
        "the peak memory of `core` beyond its inputs, each contender in a process of its own "
        "(`core` shows its peak, too, and on a GPU every case does)",
        in_bfloat16=True,
        drops=True,
    ),
    "layers": Bench(
        twelve_layers,
        "the peak memory of a training step of twelve layers, with and without kept weights",
    ),
    "nanogpt": Bench(
        nanogpt_step,
        "time and peak memory of a training step of nanoGPT's models: as they are, mixed by "
        "nn.mix, and mixed by hand in a loop over blocks of queries",
    ),
}


# ---- the command line --------------------------------------------------------------------------


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=described_cases(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "cases",
        nargs="*",
        metavar="CASE",
        help="one of those below (default: all that take the given --device, --dtype and "
        "--dropout)",
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
    with_dropout = ", ".join(f"`{name}`" for name, bench in BENCHES.items() if bench.drops)
    parser.add_argument(
        "--dropout",
        type=float,
        help=f"on the attention weights of {with_dropout} (default: {DROPOUT})",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="time on a CPU: wall, or cpu, which other work disturbs less (default: %(default)s)",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=size_of,
        metavar="BxHxNxD",
        help="batch, heads, length, head size of `core`, `shares`, `factors`, `memory` and "
        "`layers`",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        metavar="WORD",
        help="leave out contenders of `core` and `memory` whose name holds one of the words",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=2560,
        help="batch x length of `module` and `variants` (default: %(default)s)",
    )
    args = parser.parse_args(words)

    for name in args.cases:
        if name not in BENCHES:
            parser.error(f"{name}: cases are {', '.join(BENCHES)}")
        refusal = BENCHES[name].refusal(args)
        if refusal:
            parser.error(f"{name}: {refusal}")
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: must be at least 1")
    if args.tokens < 64:
        parser.error(f"--tokens {args.tokens}: must be at least 64")

    if not args.cases:
        args.cases = [name for name, bench in BENCHES.items() if not bench.refusal(args)]
    if args.dtype is None:
        args.dtype = "bfloat16" if args.device == "cuda" else "float32"
    if args.dropout is None:
        args.dropout = DROPOUT
    if args.sizes is None:
        args.sizes = [size_of(size) for size in SIZES[args.device]]
    return args


def described_cases() -> str:
    lines = ["cases:"]
    for name, bench in BENCHES.items():
        about = bench.about
        if not bench.on_gpu:
            about += "; on a CPU only"
        if not bench.in_bfloat16:
            about += "; in float32 only"
        lines += textwrap.wrap(
            about, width=100, initial_indent=f"  {name:10}", subsequent_indent=12 * " "
        )
    return "\n".join(lines)


def size_of(word: str) -> core.Size:
    if not re.fullmatch(r"[1-9][0-9]*(x[1-9][0-9]*){3}", word):
        raise argparse.ArgumentTypeError(
            f"{word}: must be four numbers from 1 up, such as 4x8x512x64"
        )
    batch, heads, length, head_dim = map(int, word.split("x"))
    return batch, heads, length, head_dim


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
    if args.device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = f"{torch.get_num_threads()} CPU threads"
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    print(f"device {device}, dtype {args.dtype}, {versions}, load {os.getloadavg()[0]:.1f}")
    rows = []
    for name, bench in BENCHES.items():
        if name not in args.cases:
            continue
        for table in bench.tables(args):
            show(table)
            rows += table
    return rows


if __name__ == "__main__":
    main()
