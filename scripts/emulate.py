#!/usr/bin/env python3
"""Run the kernels as NVIDIA's machine code, without a GPU: tests/ptx/README.md."""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # the kernels are compiled
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import count

from tests.ptx import cases


def table(shapes: list[str]) -> None:
    """Print what kernels and FlashAttention-2 execute, for shapes as 8x64 or 8x64x128: heads, their
    size, positions.

    8x64/1 takes the second tiles of tuning.py.
    """
    columns = count.COLUMNS
    print(f"{'':66}" + "".join(f"{name:>10}" for name in columns))
    for shape in shapes:
        size, _, place = shape.partition("/")
        for contender in count.CONTENDERS:
            found = count.passes(contender, int(place or 0), *map(int, size.split("x")))
            found["all"] = {name: sum(line[name] for line in found.values()) for name in columns}
            for name, line in found.items():
                print(
                    f"{shape} {contender:16} {name:42}"
                    + "".join(f"{n:10.2f}" for n in line.values()),
                    flush=True,
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    text = "a part of the names of cases; with --count a shape (default: 8x64 16x64)"
    parser.add_argument("names", nargs="*", metavar="CASE", help=text)
    parser.add_argument("--all", action="store_true", help="also run the slow cases")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each case")
    parser.add_argument(
        "--count", action="store_true", help="print what kernels execute for shapes as 8x64"
    )
    args = parser.parse_args()
    if args.count:
        table(args.names or ["8x64", "16x64"])
        return 0
    listed = cases.cover(cases.AXES) + (list(cases.slow_cases()) if args.all else [])
    chosen = [
        case for case in listed if not args.names or any(name in case.name for name in args.names)
    ]
    if not chosen:
        parser.error(
            f"no case has {' or '.join(args.names)} in its name; --all looks for slow ones, too"
        )
    wrong = False
    for case in chosen:
        try:
            report = cases.run(case)
        except (
            Exception
        ) as error:  # a fault of an instruction, of the compiler or of the emulator: all count
            report = dict(
                case=case.name,
                fault=f"{type(error).__name__}: {error}",
                share=float("nan"),
                seconds=0.0,
            )
        wrong |= bool(report["fault"])
        line = (
            f"{report['share']:6.2f} of the bound {report['seconds']:6.1f} s  {case.name}  "
            f"{report['fault']}"
        )
        known = {name: value for name, value in report.items() if value == value}  # JSON has no NaN
        print(json.dumps(known) if args.json else line, flush=True)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
