#!/usr/bin/env python3
"""Train and evaluate every point of a grid with the scripts of a recipe, and collect a table.

    examples/sweep.py examples/grids/mixhead_table_8.toml --jobs 4
    examples/sweep.py wikitext2 --axis head-mixing=none,average,position-wise --axis dropout=0.4,0.5 -- --clip-norm 1

Each run has a folder of its own below --out with its checkpoints, its logs and its result. Started again, the sweep
skips what has a result and goes on with what was interrupted or failed. A run is known by its flags.
"""

import argparse
import csv
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn, Optional

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
KEYS = {"example", "title", "train", "evaluate", "metrics", "axes", "published"}
# The last line of an evaluate.sh: "perplexity = 20.54", "BLEU|nrefs:1|... = 33.5 66.1/...", "loss: 2.3"
METRIC = re.compile(r"[=:]\s+(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b")


def fail(message: str) -> NoReturn:
    print(f"sweep: error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- what is to be run -----------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """What one value of an axis adds to the two commands; words like MODEL=vanilla are environment variables."""

    train: str = ""
    evaluate: str = ""


class Grid(NamedTuple):
    """All runs of a sweep."""

    example: str
    title: str
    base: Point
    metrics: Mapping[str, str]  # name -> flags of evaluate.sh
    axes: Mapping[str, Mapping[str, Point]]  # axis -> label -> what it adds
    published: Mapping[str, str]  # "label/label" -> numbers to set beside


class Run(NamedTuple):
    """One point of the grid, in the words of the command line."""

    example: str
    labels: Mapping[str, str]  # axis -> label
    train: tuple[str, ...]
    evaluate: Mapping[str, tuple[str, ...]]  # metric -> arguments

    @property
    def digest(self) -> str:
        """Of what the training depends on, whatever the order that it was given in."""
        flags = {"example": self.example, "train": canonical(self.train)}
        return hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def title(self) -> str:
        """The labels, as far as they can stand in the name of a file."""
        return re.sub(r"[^\w.=+-]+", "_", ",".join(self.labels.values()))


def canonical(words: Sequence[str]) -> dict[str, list[str]]:
    """Flag -> values; of a flag given twice the later counts, as fairseq reads it."""
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            flags[name] = [value] if equals else []
        elif is_variable(word) and not name:
            flags[word.partition("=")[0]] = [word.partition("=")[2]]
        else:
            flags.setdefault(name, []).append(word)
    return dict(sorted(flags.items()))


def is_variable(word: str) -> bool:
    return re.match(r"[A-Z][A-Z0-9_]*=", word) is not None


def split(flags: Any, where: str) -> list[str]:
    """The words of `flags`."""
    if not isinstance(flags, str):
        fail(f"{where}: must be a text of flags, not {flags!r}")
    try:
        return shlex.split(flags)
    except ValueError as error:
        fail(f"{where} = {flags!r}: {error}")


def runs(grid: Grid) -> list[Run]:
    """Every point of the grid, the last axis moving fastest."""
    found = []
    for labels in itertools.product(*grid.axes.values()):
        points = [grid.base, *(axis[label] for axis, label in zip(grid.axes.values(), labels))]
        train = in_order(word for point in points for word in split(point.train, "train"))
        shared = [word for point in points for word in split(point.evaluate, "evaluate")]
        variables = [word for word in train if is_variable(word)]
        evaluate = {
            metric: in_order([*variables, *shared, *split(flags, f"metrics.{metric}")])
            for metric, flags in grid.metrics.items()
        }
        found.append(Run(grid.example, dict(zip(grid.axes, labels)), train, evaluate))
    titles: dict[str, str] = {}
    for run in found:
        if run.digest in titles:
            fail(f"two points of the grid are the same run: {titles[run.digest]}, {run.title}")
        titles[run.digest] = run.title
    return found


def in_order(words: Any) -> tuple[str, ...]:
    """Variables first, whichever axis they came with."""
    return tuple(sorted(words, key=lambda word: not is_variable(word)))


def read_grid(path: Path) -> Grid:
    """A TOML or JSON file; examples/README.md describes it."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            content = json.loads(text)
        else:
            import tomllib  # Python >= 3.11

            content = tomllib.loads(text)
    except ImportError:
        fail(f"{path}: TOML needs Python 3.11 or later; JSON can be read by any")
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}")
    if unknown := sorted(content.keys() - KEYS):
        fail(f"{path}: {', '.join(unknown)}: must be among {', '.join(sorted(KEYS))}")
    if "example" not in content or not content.get("axes"):
        fail(f"{path}: needs example and axes")
    axes = {}
    for axis, values in content["axes"].items():
        points = {label: {"train": value} if isinstance(value, str) else value for label, value in values.items()}
        for label, value in points.items():
            if not isinstance(value, dict) or not value.keys() <= set(Point._fields):
                fail(f"{path}: axes.{axis}.{label}: must be flags, or train and evaluate")
        axes[axis] = {label: Point(**value) for label, value in points.items()}
    return Grid(
        content["example"],
        content.get("title", path.stem),
        Point(content.get("train", ""), content.get("evaluate", "")),
        content.get("metrics", {"result": ""}),
        axes,
        content.get("published", {}),
    )


def typed_grid(example: str, axes: Sequence[str]) -> Grid:
    """A grid of flags with lists of values: head-mixing=none,average"""
    found = {}
    for axis in axes:
        flag, equals, values = axis.partition("=")
        if not equals or not flag.strip("-") or not all(values.split(",")):
            fail(f"--axis {axis}: must be a flag and its values, such as head-mixing=none,average")
        if len(set(values.split(","))) < len(values.split(",")):
            fail(f"--axis {axis}: has a value twice")
        flag = flag.lstrip("-")
        found[flag] = {value: Point(f"--{flag} {shlex.quote(value)}") for value in values.split(",")}
    return Grid(example, example, Point(), {"result": ""}, found, {})


# ---- running ---------------------------------------------------------------------------------------------------------


class Failure(Exception):
    """Of one run; the message says where its log is."""


class Runner:
    """Runs the scripts of a recipe, each run in its folder, and can stop them all."""

    def __init__(self, out: Path, jobs: int):
        self.out = out
        self.processes: set[subprocess.Popen] = set()
        self.stopping = False
        self.lock = threading.Lock()
        self.places: SimpleQueue[dict[str, str]] = SimpleQueue()
        for place in places(jobs):
            self.places.put(place)

    def folder(self, run: Run) -> Path:
        """Where an earlier sweep, whose labels may have been others, left the run, or where it will be."""
        return next(self.out.glob(f"*-{run.digest}"), self.out / f"{run.title}-{run.digest}")

    def values(self, run: Run) -> dict[str, float]:
        """By metric what is known of the run: of evaluations with these very flags."""
        path = self.folder(run) / "result.json"
        known = json.loads(path.read_text())["evaluations"] if path.exists() else []
        flags = {metric: canonical(words) for metric, words in run.evaluate.items()}
        return {metric: e["value"] for metric in flags for e in known if e["flags"] == flags[metric]}

    def record(self, run: Run, metric: str, value: float) -> None:
        path = self.folder(run) / "result.json"
        empty = {"example": run.example, "labels": dict(run.labels), "train": canonical(run.train), "evaluations": []}
        result = json.loads(path.read_text()) if path.exists() else empty
        result["evaluations"].append({"metric": metric, "flags": canonical(run.evaluate[metric]), "value": value})
        unfinished = path.with_name("result.json.unfinished")
        unfinished.write_text(json.dumps(result, indent=2) + "\n")
        unfinished.replace(path)

    def __call__(self, run: Run) -> None:
        place = self.places.get()
        try:
            self.train_and_evaluate(run, place)
        finally:
            self.places.put(place)

    def train_and_evaluate(self, run: Run, place: Mapping[str, str]) -> None:
        folder = self.folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        save = {**place, "SAVE": str(folder / "checkpoints")}
        trained = folder / "trained"
        if not trained.exists():
            self.script(run, "train", run.train, save, folder / "train.log")
            trained.touch()
        known = self.values(run)
        for metric, arguments in run.evaluate.items():
            if metric in known:
                continue
            log = folder / f"evaluate-{metric}.log"
            self.script(run, "evaluate", arguments, save, log)
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            if (number := METRIC.search(last)) is None:
                raise Failure(f"evaluate.sh ended in {last!r}, which has no number; log: {log}")
            self.record(run, metric, float(number[1]))

    def script(self, run: Run, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        command, variables = command_of(run.example, name, arguments)
        with log.open("a") as file:
            file.write(f"$ {shlex.join([f'{key}={value}' for key, value in {**environment, **variables}.items()])} ")
            file.write(f"{shlex.join(command)}\n")
            file.flush()
            with self.lock:
                if self.stopping:
                    raise Failure(f"stopped before {name}.sh; log: {log}")
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, **variables},
                    start_new_session=True,  # fairseq's own processes end with it
                )
                self.processes.add(process)
            status = process.wait()
            with self.lock:
                self.processes.discard(process)
        if status != 0:
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise Failure(f"{name}.sh ended with status {status} ({last[:200]}); log: {log}")

    def stop(self) -> None:
        with self.lock:
            self.stopping = True
            for process in self.processes:
                os.killpg(process.pid, signal.SIGTERM)


def command_of(example: str, name: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command and the variables that stand before it."""
    variables = dict(word.split("=", 1) for word in itertools.takewhile(is_variable, arguments))
    return [str(EXAMPLES / example / f"{name}.sh"), *arguments[len(variables) :]], variables


def places(jobs: int) -> Iterator[dict[str, str]]:
    """For every job its share of the GPUs, or of the cores where there are none."""
    gpus = visible_gpus() if jobs > 1 else []
    for job in range(jobs):
        if gpus:
            # more jobs than GPUs: several share one
            mine = gpus[job::jobs] if jobs <= len(gpus) else [gpus[job % len(gpus)]]
            yield {"CUDA_VISIBLE_DEVICES": ",".join(mine)}
        elif "OMP_NUM_THREADS" in os.environ:
            yield {}
        else:
            yield {"OMP_NUM_THREADS": str(max(1, CORES // jobs))}


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number, _ in enumerate(listed.splitlines())]


def sweep(grid: Grid, runner: Runner, jobs: int) -> dict[str, str]:
    """Do what has not been done; what went wrong, by the title of the run."""
    todo = runs(grid)
    missing = [run for run in todo if runner.values(run).keys() != run.evaluate.keys()]
    done = len(todo) - len(missing)
    print(f"{len(todo)} runs, {done} of them done before; logs in {runner.out}", flush=True)
    failures = {}
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(runner, run): run for run in missing}
        try:
            for future in as_completed(waiting):
                run = waiting[future]
                try:
                    future.result()
                    outcome = ", ".join(f"{metric} {value:g}" for metric, value in runner.values(run).items())
                except Failure as failure:
                    failures[run.title] = str(failure)
                    outcome = "failed"
                done += 1
                print(f"[{done}/{len(todo)}] {run.title}: {outcome}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            runner.stop()
            raise
    return failures


# ---- tables ----------------------------------------------------------------------------------------------------------


def cell(values: Mapping[str, float], metrics: Iterable[str], published: Optional[str]) -> str:
    """As papers print it, valid/test, and their own numbers in brackets."""
    found = "/".join(f"{values[metric]:.2f}" if metric in values else "-" for metric in metrics)
    return f"{found} ({published})" if published else found


def markdown(grid: Grid, runner: Runner) -> str:
    """The last axis from left to right, the others downwards."""
    *down, (_, across) = grid.axes.items()
    heads = [*(axis for axis, _ in down), *across]
    lines = [
        f"# {grid.title}",
        "",
        "/".join(grid.metrics) + (" (in brackets: published)" if grid.published else ""),
        "",
    ]
    lines += ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    row: list[str] = []
    for run in runs(grid):
        labels = list(run.labels.values())
        row = row or labels[:-1]
        row.append(cell(runner.values(run), grid.metrics, grid.published.get("/".join(labels))))
        if len(row) == len(heads):
            lines.append("| " + " | ".join(row) + " |")
            row = []
    return "\n".join(lines) + "\n"


def write_tables(grid: Grid, runner: Runner) -> str:
    """table.md, table.csv and table.json; returns the first."""
    text = markdown(grid, runner)
    (runner.out / "table.md").write_text(text)
    rows = []
    for run in runs(grid):
        values = {**dict.fromkeys(grid.metrics), **runner.values(run)}
        published = grid.published.get("/".join(run.labels.values()), "")
        rows.append({**run.labels, **values, "published": published, "folder": runner.folder(run).name})
    (runner.out / "table.json").write_text(json.dumps({"title": grid.title, "rows": rows}, indent=2) + "\n")
    with (runner.out / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*grid.axes, *grid.metrics, "published", "folder"])
        writer.writeheader()
        writer.writerows(rows)
    return text


def dry_run(grid: Grid) -> None:
    """Print fairseq's commands of all runs, as the scripts print them with DRY_RUN=1."""
    for run in runs(grid):
        for name, words in (("train", run.train), *(("evaluate", words) for words in run.evaluate.values())):
            command, variables = command_of(run.example, name, words)
            if subprocess.run(command, env={**os.environ, **variables, "DRY_RUN": "1"}, check=False).returncode:
                sys.exit(1)


# ---- the command -----------------------------------------------------------------------------------------------------


def arguments() -> tuple[argparse.Namespace, list[str]]:
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    parser = argparse.ArgumentParser(
        prog="sweep.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("grid", help="a TOML or JSON file, or the name of a recipe, whose grid is given by --axis")
    parser.add_argument(
        "--axis", action="append", default=[], metavar="FLAG=VALUE,VALUE", help="of train.sh; may be repeated"
    )
    parser.add_argument("--evaluate", default="", metavar="FLAGS", help="for every evaluate.sh")
    parser.add_argument("--out", type=Path, help="folder of the runs and the table (default: runs/sweep/<grid>)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, sharing the GPUs out (default: 1)")
    parser.usage = parser.format_usage().removeprefix("usage: ").strip() + " [-- FLAGS OF EVERY train.sh]"
    return parser.parse_args(own), words[len(own) + 1 :]


def grid_of(args: argparse.Namespace, extra: Sequence[str]) -> Grid:
    """What the command line asks for."""
    if Path(args.grid).suffix in (".toml", ".json"):
        if args.axis:
            fail(f"--axis {args.axis[0]}: {args.grid} has the axes")
        grid = read_grid(Path(args.grid))
    else:
        grid = typed_grid(args.grid, args.axis)
        if not args.axis:
            fail("--axis is missing: the name of a recipe needs at least one, such as --axis head-mixing=none,average")
    if not (EXAMPLES / grid.example / "train.sh").exists():
        recipes = sorted(path.parent.name for path in EXAMPLES.glob("*/train.sh"))
        fail(f"{grid.example}: must be a file that ends in .toml or .json, or one of {', '.join(recipes)}")
    base = Point(f"{grid.base.train} {shlex.join(extra)}".strip(), f"{grid.base.evaluate} {args.evaluate}".strip())
    return grid._replace(base=base)


def main() -> None:
    args, extra = arguments()
    grid = grid_of(args, extra)
    if args.jobs < 1:
        fail(f"--jobs {args.jobs}: must be at least 1")
    if os.environ.get("DRY_RUN"):
        dry_run(grid)
        return

    out = (args.out or ROOT / "runs" / "sweep" / Path(args.grid).stem).resolve()
    out.mkdir(parents=True, exist_ok=True)
    runner = Runner(out, args.jobs)
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        failures = sweep(grid, runner, args.jobs)
    except KeyboardInterrupt:
        print("sweep: interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    print(f"\n{write_tables(grid, runner)}\ntable.md, table.csv, table.json and all logs: {out}")
    for name, reason in failures.items():
        print(f"sweep: failed: {name}: {reason}", file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
