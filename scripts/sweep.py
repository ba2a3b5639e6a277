#!/usr/bin/env python3
"""Train and evaluate every point of a grid with the scripts of a recipe; write one JSON file for
each run.

    scripts/sweep.py examples/grids/small/mixhead_table_7.toml --seeds 3 --only softmax --only B

The same command, started again, skips finished runs and resumes interrupted ones.
examples/README.md explains the rest.
"""

import importlib.util
import sys

if sys.version_info < (3, 11) or not importlib.util.find_spec("tqdm"):
    sys.exit(
        f"sweep: error: {sys.executable} lacks Python 3.11 or the project's packages: source "
        ".venv/bin/activate"
    )

import argparse
import contextlib
import itertools
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from studies import running
from studies.grids import EVALUATION, TRAINING, Grid, Point, Run, fail, read_grid, runs
from studies.provenance import ROOT
from studies.running import Failure, Runner, dry_run
from tqdm import tqdm


def seeds(words: str) -> range:
    first, dash, last = words.partition("-")
    return range(int(first), int(last) + 1) if dash else range(1, int(first) + 1)


def arguments(words: Sequence[str]) -> tuple[argparse.Namespace, Sequence[str]]:
    own = words[: words.index("--")] if "--" in words else words
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="sweep.py", description=__doc__, formatter_class=raw)
    parser.add_argument("grid", type=Path, help="a TOML file, such as those in examples/grids")
    parser.add_argument(
        "--seeds", type=seeds, default=[1], metavar="N", help="1 to N, or FIRST-LAST (default: 1)"
    )
    labels = "run only points that have all these labels; if repeated, the points of each option"
    parser.add_argument("--only", action="append", default=[], metavar="LABEL,LABEL", help=labels)
    parser.add_argument(
        "--metric", action="append", default=[], help="evaluate only this metric; may be repeated"
    )
    jobs = "runs at a time, which share the GPUs, or the cores (default: 1)"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=jobs)
    kept = (
        "skip the runs that this file of report.py --save has, of another machine say; may be "
        "repeated"
    )
    parser.add_argument("--kept", type=Path, action="append", default=[], metavar="FILE", help=kept)
    drawn = "run seed after seed, the points of each in an order that the seed draws"
    parser.add_argument("--drawn-order", action="store_true", help=drawn)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs", help="folder of the runs (default: runs)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print fairseq's commands and run nothing"
    )
    parser.usage = (
        parser.format_usage().removeprefix("usage: ").strip() + " [-- FLAGS OF EVERY train.sh]"
    )
    return parser.parse_args(own), words[len(own) + 1 :]


def grid_of(path: Path, extra: Sequence[str] = ()) -> Grid:
    """Return the grid of a file, with the variables of the environment and the flags of the command
    line.
    """
    grid = read_grid(path)
    if not (running.EXAMPLES / grid.example / "train.sh").exists():
        fail(f"{path}: example {grid.example!r}: examples/ has no such recipe")
    # the environment comes first, so that the grid's own words win; SAVE and CHECKPOINT are refused
    # as in a grid
    train, evaluate = (
        [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]
        for names in ((*TRAINING, "SAVE", "CHECKPOINT"), EVALUATION)
    )
    base = Point([*train, *grid.base.train, *extra], [*evaluate, *grid.base.evaluate])
    return replace(grid, base=base)


def without_kept(todo: Sequence[Run], files: Sequence[Path]) -> list[Run]:
    """Return the runs whose metrics no file has, and those that they start from."""
    known: dict[str, Mapping[str, Any]] = {}
    for path in files:
        try:
            known |= {
                run["digest"]: run["metrics"]
                for run in json.loads(path.read_text(encoding="utf-8"))["runs"]
            }
        except (OSError, ValueError, LookupError, TypeError) as error:
            fail(f"--kept {path}: is no file of report.py --save: {error}")
    left = [
        run
        for run in todo
        if run.evaluate and not run.evaluate.keys() <= known.get(run.digest, {}).keys()
    ]
    needed = {before.digest for run in left for before in run.starts}
    return [run for run in todo if run in left or run.digest in needed]


def drawn_blocks(todo: Sequence[Run]) -> list[list[Run]]:
    """Return the runs of each seed, in an order that the seed draws.

    Then whatever changes during a sweep, such as the other work of the machine, favours no point.
    """
    blocks = []
    for seed in sorted({run.seed for run in todo}):
        block = [run for run in todo if run.seed == seed]
        random.Random(seed).shuffle(block)
        blocks.append(block)
    return blocks


def sweep(todo: Sequence[Run], runner: Runner) -> list[str]:
    """Do the unfinished runs, those that others start from first; return the failures."""
    missing, failures = [run for run in todo if not runner.finished(run)], []
    done = len(todo) - len(missing)
    print(f"{len(todo)} runs, {done} of them finished before; logs in {runner.out}")
    with (
        ThreadPoolExecutor(len(runner.shares)) as pool,
        tqdm(total=len(missing), unit="run", disable=None) as bar,
    ):
        for future, run in in_turn(pool, runner, missing):
            try:
                outcome = future.result()
                done += 1
            except Failure as failure:
                failures.append(f"{run.title}: {failure}")
                outcome = "failed"
            bar.update()
            if not runner.stopped_by:
                tqdm.write(f"[{done}/{len(todo)}] {run.title}: {outcome}")
    return failures


def in_turn(
    pool: ThreadPoolExecutor, runner: Runner, todo: Sequence[Run]
) -> Iterator[tuple[Future[str], Run]]:
    """Yield the runs as they end; those of one depth begin when those before them have ended."""
    for depth in sorted({len(run.starts) for run in todo}):
        futures = {pool.submit(runner, run): run for run in todo if len(run.starts) == depth}
        for future in as_completed(futures):
            yield future, futures[future]


def main(words: Sequence[str] | None = None) -> int:
    sys.stdout.reconfigure(line_buffering=True)  # a log has each line at once
    args, extra = arguments(sys.argv[1:] if words is None else words)
    if args.jobs < 1:
        fail(f"--jobs {args.jobs}: must be at least 1")
    grid = grid_of(args.grid, extra)
    if wrong := set(args.metric) - grid.metrics.keys():
        fail(f"--metric {min(wrong)}: must be among {', '.join(grid.metrics)}")
    metrics = {
        name: words for name, words in grid.metrics.items() if name in (args.metric or grid.metrics)
    }
    todo = runs(replace(grid, metrics=metrics), args.seeds, args.only)
    if not todo:
        fail("--only, --seeds: choose no run of the grid")
    # drawn before any run is left out, so that the order stays the same when a sweep goes on
    blocks = drawn_blocks(todo) if args.drawn_order else [todo]
    blocks = [without_kept(block, args.kept) for block in blocks]
    if args.dry_run or os.environ.get("DRY_RUN"):
        for run in itertools.chain(*blocks):
            save = str(run.folder(args.out) / "checkpoints")
            for name, flags in (
                ("train", run.train),
                *(("evaluate", flags) for flags in run.evaluate.values()),
            ):
                if dry_run(run, name, flags, save).returncode:
                    return 1
        return 0
    try:
        out = args.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        runner = Runner(out, args.jobs)
        with runner.stoppable():
            failures = []
            for block in blocks:
                if not runner.stopped_by:
                    failures += sweep(block, runner)
    except (OSError, Failure) as error:
        fail(str(error))
    if runner.stopped_by:
        with contextlib.suppress(OSError):  # after SIGHUP the terminal may be gone
            print("sweep: interrupted; the same command resumes", file=sys.stderr, flush=True)
        return 128 + runner.stopped_by
    for failure in failures:
        print(f"sweep: failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
