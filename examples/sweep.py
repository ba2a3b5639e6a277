#!/usr/bin/env python3
"""Train and evaluate every point of a grid with the scripts of a recipe, and collect a table.

    examples/sweep.py examples/grids/mixhead_table_8.toml --jobs 4
    examples/sweep.py wikitext2 --axis head-mixing=none,average,position-wise --axis dropout=0.4,0.5 -- --clip-norm 1

Each run has a folder of its own below --out with its checkpoints, its logs and its result. Started again, the sweep
skips what has a result and goes on with what was interrupted or failed. A run is known by its flags and variables
(DATA, BREAKS, VARIANT, MODEL, SELECT, PRECISION; AVERAGE for its evaluation), of the grid or of the environment.
"""

import argparse
import contextlib
import csv
import fcntl
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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple, NoReturn, Optional

EXAMPLES = Path(__file__).resolve().parent
ROOT = EXAMPLES.parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
KEYS = {"example", "title", "train", "evaluate", "metrics", "axes", "published"}
# What the scripts read from the environment and a result depends on. GPUS is not among them: an update has the same
# number of tokens on any number of GPUs.
TRAINING = ("DATA", "BREAKS", "VARIANT", "MODEL", "SELECT", "PRECISION")
EVALUATION = ("AVERAGE",)
OWN = ("SAVE", "CHECKPOINT")  # of every run
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
PATIENCE = 1.0  # seconds for a lock: who only asks whether a run is held has it for a moment
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
        return as_name(",".join(self.labels.values()))


def as_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", text)


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


def from_environment() -> Point:
    """The recipes' variables that are set, as words of a grid; empty ones are unset to the scripts too."""
    for name in OWN:
        if os.environ.get(name):
            fail(f"{name}={os.environ[name]}: must not be set; sweep.py gives each run its own")

    def words(names: Iterable[str]) -> str:
        return shlex.join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))

    return Point(words(TRAINING), words(EVALUATION))


def split(flags: str, where: str) -> list[str]:
    """The words of `flags`."""
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
    """Variables first, whichever axis they came with; DATA as seen from anywhere."""
    found = []
    for word in words:
        name, _, value = word.partition("=")
        if name in OWN:
            fail(f"{word}: must not be set; sweep.py gives each run its own")
        found.append(f"DATA={os.path.abspath(value)}" if name == "DATA" and value else word)
    return tuple(sorted(found, key=lambda word: not is_variable(word)))


def read_grid(path: Path) -> Grid:
    """A TOML or JSON file; examples/README.md describes it."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            content = json.loads(text, object_pairs_hook=once)
        else:
            import tomllib  # Python >= 3.11

            content = tomllib.loads(text)
    except ImportError:
        fail(f"{path}: TOML needs Python 3.11 or later; JSON can be read by any")
    except (OSError, ValueError) as error:
        fail(f"{path}: {error}")
    except RecursionError:
        fail(f"{path}: is nested too deeply")
    try:
        return checked(content, path.stem)
    except ValueError as error:
        fail(f"{path}: {error}")


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """JSON takes the last of two values with one name; TOML refuses them."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return content


def checked(content: Any, title: str) -> Grid:
    """The grid that a file's content means; ValueError says what makes no sense in it."""
    content = table(content, "the file")
    if unknown := sorted(content.keys() - KEYS):
        raise ValueError(f"{', '.join(unknown)}: must be among {', '.join(sorted(KEYS))}")
    if "example" not in content or not content.get("axes"):
        raise ValueError("needs example and axes")
    axes = {}
    for axis, values in table(content["axes"], "axes").items():
        points = axes[axis] = {}
        for label, value in table(values, f"axes.{axis}").items():
            value = {"train": value} if isinstance(value, str) else value
            if not isinstance(value, dict) or not value.keys() <= set(Point._fields):
                raise ValueError(f"axes.{axis}.{label}: must be flags, or train and evaluate")
            points[label] = Point(**{name: written(flags, f"axes.{axis}.{label}") for name, flags in value.items()})
    metrics = table(content.get("metrics", {"result": ""}), "metrics")
    published = table(content["published"], "published") if content.get("published") else {}
    points = {"/".join(labels) for labels in itertools.product(*axes.values())}
    for label in published:
        if label not in points:
            raise ValueError(f"published.{label!r}: is no point of the grid, such as {min(points)!r}")
    columns = [*axes, *metrics, "published", "folder"]
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)}: a column of the table already, cannot be an axis or a metric too")
    return Grid(
        written(content["example"], "example"),
        written(content.get("title", title), "title"),
        Point(written(content.get("train", ""), "train"), written(content.get("evaluate", ""), "evaluate")),
        {metric: written(flags, f"metrics.{metric}") for metric, flags in metrics.items()},
        axes,
        {label: written(numbers, f"published.{label!r}") for label, numbers in published.items()},
    )


def table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{where}: must be a table with something in it, not {value!r}")
    return value


def written(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: must be a text, not {value!r}")
    return value


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
        if flag in found:
            fail(f"--axis {axis}: {flag} has an axis already")
        found[flag] = {value: Point(f"--{flag} {shlex.quote(value)}") for value in values.split(",")}
    return Grid(example, example, Point(), {"result": ""}, found, {})


# ---- running ---------------------------------------------------------------------------------------------------------


class Failure(Exception):
    """Of one run; the message says where its log is."""


class Busy(Failure):
    """The run is another sweep's."""


class Runner:
    """Runs the scripts of a recipe, each run in its folder, and can stop them all."""

    def __init__(self, out: Path, jobs: int):
        self.out = out
        self.processes: set[subprocess.Popen] = set()
        self.stopped_by = 0  # the signal
        self.lock = threading.Lock()
        self.broken: set[Path] = set()
        self.places: SimpleQueue[Mapping[str, str]] = SimpleQueue()
        shares = places(jobs)
        self.jobs = len(shares)
        for share in shares:
            self.places.put(share)

    def folder(self, run: Run) -> Path:
        """Where an earlier sweep, whose labels may have been others, left the run, or where it will be."""
        # a name has 255 bytes at most
        return next(self.out.glob(f"*-{run.digest}"), self.out / f"{run.title[:60]}-{run.digest}")

    def evaluations(self, run: Run) -> list[dict[str, Any]]:
        """All that are known of the run."""
        path = self.folder(run) / "result.json"
        try:
            known = json.loads(path.read_text())["evaluations"]
            return [{"metric": e["metric"], "flags": e["flags"], "value": float(e["value"])} for e in known]
        except FileNotFoundError:
            return []
        except (ValueError, LookupError, TypeError):
            if path not in self.broken:
                print(f"sweep: {path}: cut off, or not written by this; taken as not done", file=sys.stderr, flush=True)
            self.broken.add(path)
            return []

    def values(self, run: Run) -> dict[str, float]:
        """By metric what is known of the run: of evaluations with these very flags."""
        known = self.evaluations(run)
        flags = {metric: canonical(words) for metric, words in run.evaluate.items()}
        return {metric: e["value"] for metric in flags for e in known if e["flags"] == flags[metric]}

    def record(self, run: Run, metric: str, value: float) -> None:
        path = self.folder(run) / "result.json"
        new = {"metric": metric, "flags": canonical(run.evaluate[metric]), "value": value}
        result = {
            "example": run.example,
            "labels": dict(run.labels),
            "train": canonical(run.train),
            "training": training(path.parent)._asdict(),
            "evaluations": [*self.evaluations(run), new],
        }
        write(path, result)

    def __call__(self, run: Run) -> None:
        if self.stopped_by:
            raise Failure("stopped before it began")
        place = self.places.get()
        try:
            folder = self.folder(run)
            folder.mkdir(parents=True, exist_ok=True)
            with self.hold(folder) as held:
                self.train_and_evaluate(run, folder, place, held)
        except OSError as error:
            raise Failure(str(error)) from error
        finally:
            self.places.put(place)

    @contextlib.contextmanager
    def hold(self, folder: Path) -> Iterator[int]:
        """Keep other sweeps out of a run.

        The scripts inherit the open file, and the lock with it: if this process is killed and a training lives on, it
        still has its folder for itself.
        """
        with (folder / "lock").open("a") as file:
            end = time.monotonic() + PATIENCE
            while not locked(file):
                if self.stopped_by or time.monotonic() > end:
                    raise Busy(f"being run by another sweep; its folder: {folder}")
                time.sleep(0.05)
            yield file.fileno()

    def train_and_evaluate(self, run: Run, folder: Path, place: Mapping[str, str], held: int) -> None:
        save = {**place, "SAVE": str(folder / "checkpoints")}
        trained = folder / "trained"
        if not trained.exists():
            self.script(run, "train", run.train, save, folder / "train.log", held)
            trained.touch()
        known = self.values(run)
        for metric, arguments in run.evaluate.items():
            if metric in known:
                continue
            log = folder / f"evaluate-{as_name(metric)}.log"
            self.script(run, "evaluate", arguments, save, log, held)
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            if (number := METRIC.search(last)) is None:
                raise Failure(f"evaluate.sh ended in {last!r}, which has no number; log: {log}")
            self.record(run, metric, float(number[1]))

    def script(
        self, run: Run, name: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path, held: int
    ) -> None:
        command, variables = command_of(run.example, name, arguments)
        command = [word.replace("{save}", environment["SAVE"]) for word in command]
        with log.open("a") as file:
            file.write(f"$ {shlex.join([f'{key}={value}' for key, value in {**environment, **variables}.items()])} ")
            file.write(f"{shlex.join(command)}\n")
            file.flush()
            with self.lock:
                if self.stopped_by:
                    raise Failure(f"stopped before {name}.sh; log: {log}")
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment, **variables},
                    start_new_session=True,  # fairseq's own processes end with it
                    pass_fds=(held,),
                )
                self.processes.add(process)
            started = time.monotonic()
            status, peak = end_of(process)
            seconds = time.monotonic() - started
            if status != 0:
                with contextlib.suppress(ProcessLookupError):  # nothing is left of what it started
                    os.killpg(process.pid, signal.SIGKILL)
            with self.lock:
                self.processes.discard(process)
        if name == "train":
            write(log.with_name("training.json"), training(log.parent).and_(seconds, peak))
        if status != 0:
            last = log.read_text(errors="replace").strip().rpartition("\n")[2]
            raise Failure(f"{name}.sh ended with status {status} ({last[:200]}); log: {log}")

    def send(self, number: int) -> None:
        with self.lock:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, number)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Within, SIGINT, SIGTERM and SIGHUP end all scripts, and no other begins.

        Each has a handler even where it was inherited as ignored, as SIGINT is by what a script starts with `&`: what
        is handled here is at its default in the scripts. Only a SIGHUP that nohup ignores does nothing.
        """
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        caught: SimpleQueue[int] = SimpleQueue()  # its put() may interrupt anything

        def handler(number: int, frame: Any) -> None:
            if not self.stopped_by and not (number == signal.SIGHUP and nohup):
                self.stopped_by = number
                caught.put(number)

        def end() -> None:
            if caught.get():
                self.send(signal.SIGTERM)
                time.sleep(GRACE)
                self.send(signal.SIGKILL)

        threading.Thread(target=end, daemon=True).start()
        previous = {number: signal.signal(number, handler) for number in STOPS}
        try:
            yield
        finally:
            for number, old in previous.items():
                signal.signal(number, old)
            caught.put(0)


def locked(file: IO[str]) -> bool:
    """Whether the file is this process' own now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Training(NamedTuple):
    """What a training has taken so far, of all its starts."""

    seconds: float = 0.0
    peak_rss_mib: float = 0.0  # of its largest process
    starts: int = 0

    def and_(self, seconds: float, peak_rss_mib: float) -> dict[str, float]:
        more = Training(round(self.seconds + seconds, 2), max(self.peak_rss_mib, peak_rss_mib), self.starts + 1)
        return more._asdict()


def training(folder: Path) -> Training:
    """Of the run in `folder`; a start that was killed together with this program is not in it."""
    try:
        return Training(**json.loads((folder / "training.json").read_text()))
    except (OSError, ValueError, TypeError):
        return Training()


def write(path: Path, content: Any) -> None:
    """JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:  # a full disk
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def end_of(process: subprocess.Popen) -> tuple[int, float]:
    """Wait for it; its exit status, and the peak in MiB of the largest process among it and those it waited for.

    Linux counts what this process had when it started that one, too: a few MiB of a sweep.
    """
    try:
        _, status, usage = os.wait4(process.pid, 0)
    except ChildProcessError:  # SIGCHLD is ignored: the system has waited
        return process.wait(), 0.0
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes
    return process.returncode, round(usage.ru_maxrss * unit / 2**20, 1)


def command_of(example: str, name: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command, with the checkout where its words have {root}, and the variables that stand before it."""
    variables = dict(word.split("=", 1) for word in itertools.takewhile(is_variable, arguments))
    words = [word.replace("{root}", str(ROOT)) for word in arguments[len(variables) :]]
    return [str(EXAMPLES / example / f"{name}.sh"), *words], variables


def places(jobs: int) -> list[dict[str, str]]:
    """For every job that can run at a time its share of the GPUs, or of the cores where there are none."""
    wanted = os.environ.get("GPUS", "")
    if wanted and not wanted.isdecimal():
        fail(f"GPUS={wanted}: must be a number")
    gpus = visible_gpus() if jobs > 1 and int(wanted or 1) > 0 else []
    if gpus:
        jobs = min(jobs, len(gpus))
        # A power of two, which the batches of an update can be shared by.
        size = 1 << (len(gpus) // jobs).bit_length() - 1
        shares = [gpus[size * job : size * (job + 1)] for job in range(jobs)]
        own = {"GPUS": str(min(int(wanted), size))} if wanted else {}
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share), **own} for share in shares]
    return [{} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, CORES // jobs))}] * jobs


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        # CUDA reads as far as the first that is none
        return list(itertools.takewhile(lambda n: n not in ("", "-1"), os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number, _ in enumerate(listed.splitlines())]


def nothing_more(run: Run, left: int) -> str:
    return ""


def sweep(
    todo: Sequence[Run], runner: Runner, on_result: Callable[[Run, int], str] = nothing_more
) -> list[tuple[Run, Failure]]:
    """Do what has not been done; returns what went wrong, or nothing more once the runner was stopped.

    `on_result` is called after each run that has all its numbers, with how many are left; what it returns ends the
    run's line.
    """
    missing = [run for run in todo if runner.values(run).keys() != run.evaluate.keys()]
    done = len(todo) - len(missing)
    print(f"{len(todo)} runs, {done} of them done before; logs in {runner.out}", flush=True)
    failures = []
    with ThreadPoolExecutor(runner.jobs) as pool:
        waiting = {pool.submit(runner, run): run for run in missing}
        pending = set(waiting)
        while pending:
            # The time-out is for a signal that comes just before the wait: its handler would run only after it.
            finished, pending = wait(pending, timeout=1, return_when=FIRST_COMPLETED)
            for future in finished:
                run = waiting[future]
                try:
                    future.result()
                    outcome = ", ".join(f"{metric} {value:g}" for metric, value in runner.values(run).items())
                    outcome += on_result(run, len(todo) - done - 1)
                except Failure as failure:
                    failures.append((run, failure))
                    outcome = "being run by another sweep" if isinstance(failure, Busy) else "failed"
                done += 1
                if not runner.stopped_by:
                    print(f"[{done}/{len(todo)}] {run.title}: {outcome}", flush=True)
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


def dry_run(todo: Iterable[Run], runner: Runner) -> None:
    """Print fairseq's commands of all runs in their folders, as the scripts print them with DRY_RUN=1."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for run in todo:
        save = str(runner.folder(run) / "checkpoints")
        for name, words in (("train", run.train), *(("evaluate", words) for words in run.evaluate.values())):
            command, variables = command_of(run.example, name, words)
            command = [word.replace("{save}", save) for word in command]
            environment = {**os.environ, "SAVE": save, **variables, "DRY_RUN": "1"}
            if subprocess.run(command, env=environment, check=False).returncode:
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
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="runs at a time (default: 1, with all GPUs). More than one share the GPUs out: 1, 2, 4, 8, ... for each, "
        "the same for all (GPUS=n in the environment: n of them); never more runs at a time than GPUs. Without GPUs "
        "they share the cores",
    )
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
    outer = from_environment()  # first, so that the grid's own wins
    train = f"{outer.train} {grid.base.train} {shlex.join(extra)}"
    evaluate = f"{outer.evaluate} {grid.base.evaluate} {args.evaluate}"
    return grid._replace(base=Point(train.strip(), evaluate.strip()))


def main() -> None:
    args, extra = arguments()
    grid = grid_of(args, extra)
    if args.jobs < 1:
        fail(f"--jobs {args.jobs}: must be at least 1")
    out = (args.out or ROOT / "runs" / "sweep" / Path(args.grid).stem).resolve()
    if os.environ.get("DRY_RUN"):
        dry_run(runs(grid), Runner(out, 1))
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {out}: cannot be made a folder: {error.strerror}")
    runner = Runner(out, args.jobs)
    try:
        with runner.stoppable():
            failures = sweep(runs(grid), runner)
            tables = "" if runner.stopped_by else write_tables(grid, runner)
    except OSError as error:
        fail(str(error))
    if runner.stopped_by:
        with contextlib.suppress(OSError):  # after SIGHUP the terminal may be gone
            print("sweep: interrupted; the same command goes on from here", file=sys.stderr, flush=True)
        sys.exit(128 + runner.stopped_by)
    print(f"\n{tables}\ntable.md, table.csv, table.json and all logs: {out}")
    for run, failure in failures:
        what = "left out" if isinstance(failure, Busy) else "failed"
        print(f"sweep: {what}: {run.title}: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
