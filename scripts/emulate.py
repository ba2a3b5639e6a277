#!/usr/bin/env python3
"""Run the kernels as NVIDIA's machine code, without a GPU: tests/ptx/README.md."""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # the kernels are compiled
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import count

from tests.ptx import cases


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="CASE",
        help="a part of the names of cases; with --count a shape (default: 8x64 16x64)",
    )
    parser.add_argument("--all", action="store_true", help="also run the slow cases")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each case")
    parser.add_argument(
        "--count", action="store_true", help="print what kernels execute for shapes as 8x64"
    )
    args = parser.parse_args()
    args.cases = [] if args.count else chosen(args.names, args.all)
    if not args.count and not args.cases:
        parser.error(
            f"no case has {' or '.join(args.names)} in its name; --all looks for slow ones, too"
        )
    return args


def chosen(names: list[str], with_slow: bool) -> list[cases.Case]:
    """Return the cases with one of the words in their names; all without words."""
    listed = cases.cover(cases.AXES)
    if with_slow:
        listed += cases.slow_cases()
    if not names:
        return listed

    def is_named(case: cases.Case) -> bool:
        return any(name in case.name for name in names)

    return list(filter(is_named, listed))


# ---- what kernels execute ----------------------------------------------------------------------


def print_counts(shapes: list[str]) -> None:
    """Print what kernels and FlashAttention-2 execute, for shapes as 8x64 or 8x64x128: heads, their
    size, positions.

    8x64/1 takes the second tiles of tuning.py.
    """
    print(f"{'':66}" + "".join(f"{name:>10}" for name in count.COLUMNS))
    for shape in shapes:
        size, _, place = shape.partition("/")
        heads_size_positions = [int(word) for word in size.split("x")]
        for contender in count.CONTENDERS:
            passes = count.passes(contender, int(place or 0), *heads_size_positions)
            for name, numbers in with_sum(passes).items():
                cells = "".join(f"{number:10.2f}" for number in numbers.values())
                print(f"{shape} {contender:16} {name:42}{cells}", flush=True)


def with_sum(passes: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return the passes, and after them their sum."""
    whole = dict.fromkeys(count.COLUMNS, 0.0)
    for one in passes.values():
        for name in whole:
            whole[name] += one[name]
    return {**passes, "all": whole}


# ---- cases -------------------------------------------------------------------------------------


def report_of(case: cases.Case) -> dict[str, Any]:
    """Run a case; return its name, its fault (empty without one), its share and its seconds.

    The share is the largest error divided by the bound of the law; NaN if the case did not end.
    """
    try:
        return cases.run(case)
    # Whatever it is, the case is wrong: a fault of an instruction, of the compiler or of the
    # emulator.
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        return {"case": case.name, "fault": fault, "share": math.nan, "seconds": 0.0}


def line_of(report: dict[str, Any], as_json: bool) -> str:
    if as_json:
        # JSON has no NaN
        known = {name: value for name, value in report.items() if value == value}
        return json.dumps(known)
    figures = f"{report['share']:6.2f} of the bound {report['seconds']:6.1f} s"
    return f"{figures}  {report['case']}  {report['fault']}"


def main() -> int:
    args = arguments()
    if args.count:
        print_counts(args.names or ["8x64", "16x64"])
        return 0
    wrong = False
    for case in args.cases:
        report = report_of(case)
        wrong = wrong or bool(report["fault"])
        print(line_of(report, args.json), flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
