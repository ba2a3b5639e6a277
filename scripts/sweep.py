#!/usr/bin/env python3
"""Train and evaluate every point of a grid with the scripts of a recipe; write one JSON file for
each run.

    scripts/sweep.py examples/grids/small/mixhead_table_7.toml --seeds 3 --only softmax --only B

The same command, started again, skips finished runs and resumes interrupted ones.
examples/README.md explains the rest.
"""

import importlib.util
import sys

# Before the other imports, which would end in a traceback.
if sys.version_info < (3, 11) or not importlib.util.find_spec("pydantic"):
    sys.exit(
        f"sweep: error: {sys.executable} lacks Python 3.11 or the project's packages: source "
        ".venv/bin/activate"
    )

import argparse
import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from common.seeds import HELP, seeds
from studies.commands import dry_run, grid_of
from studies.faults import fail
from studies.grids import Grid
from studies.provenance import ROOT
from studies.records import read_results
from studies.running import Failure, Runner
from studies.runs import Run, runs
from tqdm import tqdm

# ---- the flags ---------------------------------------------------------------------------------


def arguments(words: Sequence[str]) -> tuple[argparse.Namespace, Sequence[str]]:
    """Return the command's own arguments, and after '--' the flags of every train.sh."""
    # argparse itself would take what follows '--' for a second grid
    of_sweep = words[: words.index("--")] if "--" in words else words
    of_train = words[len(of_sweep) + 1 :]
    parser = argparse.ArgumentParser(
        prog="sweep.py",
        description=__doc__,
        epilog="Flags after '--' go to every train.sh: sweep.py GRID.toml -- --max-update 9000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("grid", type=Path, help="a TOML file, such as those in examples/grids")
    parser.add_argument("--seeds", type=seeds, default=range(1, 2), metavar="N", help=HELP)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="LABEL,LABEL",
        help="run only points that have all these labels; if repeated, the points of each option",
    )
    parser.add_argument(
        "--metric", action="append", default=[], help="evaluate only this metric; may be repeated"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time, which share the GPUs, or the cores (default: 1)",
    )
    parser.add_argument(
        "--kept",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="skip the runs that this file of report.py --save has, of another machine say; may "
        "be repeated",
    )
    parser.add_argument(
        "--drawn-order",
        action="store_true",
        help="run seed after seed, the points of each in an order that the seed draws",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs", help="folder of the runs (default: runs)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print fairseq's commands and run nothing"
    )
    return parser.parse_args(of_sweep), of_train


# ---- what is to do -----------------------------------------------------------------------------


def with_metrics(grid: Grid, names: Sequence[str]) -> Grid:
    """Return the grid with the metrics of --metric alone; with all without any."""
    for name in names:
        if name not in grid.metrics:
            fail(f"--metric {name}: must be among {', '.join(grid.metrics)}")
    if not names:
        return grid
    chosen = {name: metric for name, metric in grid.metrics.items() if name in names}
    return grid.model_copy(update={"metrics": chosen})


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


def without_kept(todo: Sequence[Run], files: Sequence[Path]) -> list[Run]:
    """Return the runs whose metrics no file has, and those that they start from."""
    known = kept_metrics(files)
    left = [run for run in todo if run.evaluate.keys() - known.get(run.digest, set())]
    needed = {before.digest for run in left for before in run.starts}
    return [run for run in todo if run in left or run.digest in needed]


def kept_metrics(files: Sequence[Path]) -> dict[str, set[str]]:
    """Return the metrics of each run of the files, by digest."""
    known: dict[str, set[str]] = {}
    for path in files:
        try:
            content = read_results(path)
        except (OSError, ValueError) as error:
            fail(f"--kept {path}: is no file of report.py --save: {error}")
        for run in content["runs"]:
            known.setdefault(run["digest"], set()).update(run["metrics"])
    return known


# ---- doing it ----------------------------------------------------------------------------------


def print_commands(todo: Sequence[Run], out: Path) -> int:
    """Let the scripts print fairseq's commands; return 1 at the first that cannot."""
    for run in todo:
        save = str(run.folder(out) / "checkpoints")
        scripts = [("train", run.train)]
        scripts += [("evaluate", words) for words in run.evaluate.values()]
        for name, words in scripts:
            if dry_run(run, name, words, {"SAVE": save}).returncode:
                return 1
    return 0


def sweep(todo: Sequence[Run], runner: Runner) -> list[str]:
    """Do the unfinished runs, those that others start from first; return the failures."""
    missing = [run for run in todo if not runner.finished(run)]
    failures = []
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
        futures = {pool.submit(runner.do, run): run for run in todo if len(run.starts) == depth}
        for future in as_completed(futures):
            yield future, futures[future]


def main(words: Sequence[str] | None = None) -> int:
    sys.stdout.reconfigure(line_buffering=True)  # a log has each line at once
    args, of_train = arguments(sys.argv[1:] if words is None else words)
    if args.jobs < 1:
        fail(f"--jobs {args.jobs}: must be at least 1")
    grid = with_metrics(grid_of(args.grid, of_train), args.metric)
    todo = runs(grid, args.seeds, args.only)

    # drawn before any run is left out, so that the order stays the same when a sweep goes on
    blocks = drawn_blocks(todo) if args.drawn_order else [todo]
    blocks = [without_kept(block, args.kept) for block in blocks]
    if args.dry_run or os.environ.get("DRY_RUN"):
        return print_commands([run for block in blocks for run in block], args.out)

    failures = []
    try:
        out = args.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        runner = Runner(out, args.jobs)
        with runner.stoppable():
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
