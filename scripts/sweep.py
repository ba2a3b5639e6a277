#!/usr/bin/env python3
"""Train and evaluate every point of a grid with the scripts of a recipe; write one JSON file for each run.

    scripts/sweep.py examples/grids/mixhead_table_8.toml --jobs 4
    scripts/sweep.py examples/grids/small/mixhead_table_7.toml --seeds 3 --only softmax --only B
    scripts/sweep.py examples/grids/wikitext2_orthogonal.toml --dry-run -- --clip-norm 1

Each run has a folder below --out with its checkpoints, its logs and run.json. The same command, started again, skips
finished runs and resumes interrupted ones. A run is identified by its flags, its seed and the recipe's variables (DATA,
BREAKS, VARIANT, MODEL, SELECT, PRECISION; AVERAGE for an evaluation). So grids share the runs that they have in common.
scripts/report.py makes tables and pictures of the runs.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (the system's Python may be older)
    sys.exit(f"sweep: error: {sys.executable} is Python {sys.version.split()[0]}: must be 3.11 or later")

import argparse
import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from grids import EVALUATION, TRAINING, Grid, Point, Run, as_name, canonical, fail, is_variable, read_grid, runs

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
OF_ONE_MACHINE = {"--user-dir", "--save-dir"}  # flags left out of the record
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE = 10.0  # seconds from SIGTERM to SIGKILL
POLL = 0.1  # seconds between two looks at a running script
NUMBER = re.compile(r"[=:]\s+(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\b")  # in "perplexity = 20.54", "BLEU|... = 33.5 66.1/..."
PROGRESS = re.compile(r"\| INFO \| (\w+) \| (\{.*\})\s*$")  # a line of fairseq-train --log-format json
RESUMED = re.compile(r"Loaded checkpoint .* @ (\d+) updates\)")


# ---- what a training reports -----------------------------------------------------------------------------------------


class Progress:
    """Collects the points of a training from the lines of fairseq's log, one process after another.

    A point has the update, the tokens so far, a loss in bits, and the CPU seconds so far, without start-up and
    validations. After an interruption, updates after the last checkpoint are dropped.
    """

    def __init__(self, points: Sequence[dict[str, float]]):
        self.points: list[dict[str, float]] = []
        self.before = points  # of earlier processes
        self.spent = 0.0
        self.cpu = 0.0  # of this process, when a line was read last
        self.updating = False

    def read(self, line: str, cpu: float | None) -> dict[str, float] | None:
        """Return the new point if the line has one; `cpu` is the CPU time of the process so far."""
        if resumed := RESUMED.search(line):
            self.points = [point for point in self.before if point["update"] <= int(resumed[1])]
            self.spent = self.points[-1].get("cpu_seconds", 0.0) if self.points else 0.0
        elif "Start iterating over samples" in line:
            self.before = self.points
            self.pass_time(cpu, updating=True)
        elif "begin validation on" in line:
            self.pass_time(cpu, updating=False)
        elif match := PROGRESS.search(line):
            return self.add(match[1], json.loads(match[2]), cpu)
        return None

    def pass_time(self, cpu: float | None, updating: bool) -> None:
        if cpu is not None:
            self.spent += cpu - self.cpu if self.updating else 0.0
            self.cpu = cpu
        self.updating = updating

    def add(self, series: str, values: Mapping[str, Any], cpu: float | None) -> dict[str, float] | None:
        prefix = "" if series == "train_inner" else f"{series}_"
        if series == "train" or f"{prefix}num_updates" not in values:  # the mean of an epoch, or another's line
            return None
        self.pass_time(cpu, updating=True)
        last = self.points[-1] if self.points else {"update": 0, "tokens": 0}
        update = int(values[f"{prefix}num_updates"])
        per_update = float(values.get("wpb", 0)) or last["tokens"] / max(last["update"], 1)
        point = {"update": update, "tokens": round(last["tokens"] + (update - last["update"]) * per_update)}
        if cpu is not None:
            point["cpu_seconds"] = round(self.spent, 2)
        loss = values.get(f"{prefix}nll_loss", values.get(f"{prefix}loss", "nan"))
        point["train_loss" if series == "train_inner" else f"{series}_loss"] = float(loss)
        self.points.append(point)
        return point

    def all(self) -> Sequence[dict[str, float]]:
        """Return the points, those of earlier processes too where this one ended before its first update."""
        return self.points or self.before


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process and its ended children; None if the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


# ---- the record of a run ---------------------------------------------------------------------------------------------


@functools.cache
def about() -> dict[str, Any]:
    """Return the machine and the versions, which are the same for all runs of this command."""
    own = ROOT / ".venv" / "bin" / "python"
    beside_fairseq = Path(shutil.which("fairseq-train") or "python3").with_name("python3")
    python = str(own if own.exists() else beside_fairseq)
    names = ("torch", "numpy", "fairseq", "fairseq-fixed", "ve-fairseq")
    code = f"""import json, platform; from importlib.metadata import distributions
found = {{d.name: d.version for d in distributions() if d.name in {names}}}
print(json.dumps({{"python": platform.python_version(), **found}}))"""
    printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout
    source = (ROOT / "mixhead_plugin" / "__init__.py").read_text()
    version = source.partition('__version__ = "')[2].partition('"')[0]
    versions = {**json.loads(printed or "{}"), "mixhead_plugin": version}
    return {"device": f"{processor()}, {CORES} cores", "versions": versions}


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


@functools.cache
def commit() -> str:
    """Return the commit, with + if files differ from it; empty outside of git."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def add_commit(record: dict[str, Any]) -> None:
    """Add the current commit to those of a run."""
    record["commit"] = ", ".join(dict.fromkeys(filter(None, (*record.get("commit", "").split(", "), commit()))))


@functools.cache
def checksum(folders: str) -> str | None:
    """Return 12 digits of the SHA-256 of the text that fairseq reads; None if there is none."""
    found = [
        path for folder in folders.split(":") for kind in ("*.bin", "dict*.txt") for path in Path(folder).rglob(kind)
    ]
    whole = hashlib.sha256()
    for path in sorted(found):
        with path.open("rb") as file:
            whole.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()[:12] if found else None


# ---- running ---------------------------------------------------------------------------------------------------------


class Failure(Exception):
    """Ends one run; the message says where its log is."""


class Runner:
    """Runs the scripts of a recipe, each run in its folder, until a signal ends them."""

    def __init__(self, out: Path, jobs: int):
        self.out = out
        self.stopped_by = 0  # the signal
        self.shares: SimpleQueue[Mapping[str, str]] = SimpleQueue()
        found = shares(jobs)
        self.jobs = len(found)
        for share in found:
            self.shares.put(share)

    def known(self, run: Run) -> dict[str, Any]:
        """Return what run.json says; it is empty for a run that has not begun."""
        path = run.folder(self.out) / "run.json"
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            raise Failure(f"{path}: cannot be read ({error}); remove the file to train again") from error

    def missing(self, run: Run) -> list[str]:
        """Return the metrics that were not evaluated with these flags."""
        evaluated = self.known(run).get("evaluate", {})
        return [metric for metric, words in run.evaluate.items() if evaluated.get(metric) != canonical(words)]

    def __call__(self, run: Run) -> str:
        """Train and evaluate what is missing of a run; return its metrics as text."""
        share = self.shares.get()
        try:
            folder = run.folder(self.out)
            folder.mkdir(parents=True, exist_ok=True)
            with held(folder) as lock:
                self.train_and_evaluate(run, folder, dict(share), lock)
                values = self.known(run)["metrics"]
                return ", ".join(f"{metric} {values[metric]:g}" for metric in run.evaluate)
        except OSError as error:
            raise Failure(str(error)) from error
        finally:
            self.shares.put(share)

    def train_and_evaluate(self, run: Run, folder: Path, share: dict[str, str], lock: int) -> None:
        place = {**share, "SAVE": str(folder / "checkpoints")}
        record = self.known(run)
        if not record.get("trained"):
            now = start_of(run, place)
            if record and record["data"] != now["data"]:
                raise Failure(
                    f"began with another text (SHA-256 {record['data']}, now {now['data']}); folder: {folder}"
                )
            record = {**now, **record}
            add_commit(record)
            progress = Progress(record["points"])
            try:
                used = self.script(run, "train", run.train, place, folder / "train.log", lock, progress)
                record["trained"] = used.pop("status") == 0
                for name in ("seconds", "cpu_seconds"):
                    record[name] = round(record.get(name, 0.0) + used[name], 2)
                record["peak_memory_mib"] = max(record.get("peak_memory_mib", 0.0), used["peak_memory_mib"])
            finally:
                record["points"] = progress.all()
                write(folder / "run.json", record)
            if not record["trained"]:
                log = folder / "train.log"
                raise Failure(f"train.sh failed ({last_line(log)[:200]}); log: {log}")
        for metric in self.missing(run):
            log = folder / f"evaluate-{as_name(metric)}.log"
            used = self.script(run, "evaluate", run.evaluate[metric], place, log, lock, None)
            last = last_line(log)
            number = NUMBER.search(last)
            if used["status"] or not number:
                why = "failed" if used["status"] else "ended in a line without a number"
                raise Failure(f"evaluate.sh {why} ({last[:200]}); log: {log}")
            add_commit(record)
            record["measure"] = re.split(r"[|=:]", last)[0].strip()
            record["metrics"][metric] = float(number[1])
            record["evaluate"][metric] = canonical(run.evaluate[metric])
            write(folder / "run.json", record)

    def script(
        self, run: Run, name: str, words: Sequence[str], place: Mapping[str, str], log: Path, lock: int,
        progress: Progress | None,
    ) -> dict[str, float]:  # fmt: skip
        """Run a script to its end; return its status, its seconds, and the memory of its largest process."""
        command, variables = command_of(run.example, name, words, place["SAVE"])
        if progress:
            command += ["--log-format", "json"]
        shown = shlex.join([*(f"{key}={value}" for key, value in {**place, **variables}.items()), *command])
        with log.open("a", encoding="utf-8") as file, log.open(encoding="utf-8", errors="replace") as lines:
            lines.seek(0, os.SEEK_END)
            file.write(f"$ {shown}\n")
            file.flush()
            if self.stopped_by:
                raise Failure("stopped before it began")
            began = time.monotonic()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **place, **variables},
                start_new_session=True,  # fairseq's own processes end with it
                pass_fds=(lock,),  # a training that outlives this command keeps its folder
            )
            usage = self.wait(process, run, lines, progress)
        unit = 1 if sys.platform == "darwin" else 2**10  # bytes
        return {
            "status": process.returncode,
            "seconds": time.monotonic() - began,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_memory_mib": round(usage.ru_maxrss * unit / 2**20, 1),
        }

    def wait(self, process: subprocess.Popen, run: Run, lines: Iterable[str], progress: Progress | None) -> Any:
        """Follow the log, pass a stop signal on, and return the resource usage of the process."""
        killed_at, begun = 0.0, ""
        while True:
            cpu = cpu_seconds(process.pid)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            for line in lines:
                begun += line
                if begun.endswith("\n"):  # else the script is still writing the line
                    point = progress.read(begun, cpu) if progress else None
                    begun = ""
                    if point and "valid_loss" in point:
                        print(f"{run.title}: update {point['update']}, valid loss {point['valid_loss']:g}", flush=True)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                if status:
                    end_group(process.pid, signal.SIGKILL)  # processes that a failed script left
                return usage
            if self.stopped_by and not killed_at:
                end_group(process.pid, signal.SIGTERM)
                killed_at = time.monotonic() + GRACE
            elif killed_at and time.monotonic() > killed_at:
                end_group(process.pid, signal.SIGKILL)
            time.sleep(POLL)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Within, SIGINT, SIGTERM and SIGHUP end all scripts; a SIGHUP that nohup ignores does nothing."""
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

        def stop(number: int, frame: Any) -> None:
            if not (number == signal.SIGHUP and nohup):
                self.stopped_by = self.stopped_by or number

        previous = {number: signal.signal(number, stop) for number in STOPS}
        try:
            yield
        finally:
            for number, old in previous.items():
                signal.signal(number, old)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[int]:
    """Keep other sweeps out of a run."""
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Failure(f"another sweep runs it; its folder: {folder}") from error
        yield file.fileno()


def end_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def last_line(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]


def write(path: Path, content: Any) -> None:
    """Write JSON, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def start_of(run: Run, place: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of a run before its training; a dry run of train.sh prints all flags and the data."""
    printed = dry_run(run, "train", run.train, place["SAVE"], stdout=subprocess.PIPE, stderr=subprocess.PIPE).stdout
    command = next((line for line in printed.splitlines() if line.startswith("fairseq-")), "")
    _, data, *flags = [*shlex.split(command), "", ""]
    own = {"labels": dict(run.labels), "seed": run.seed, "digest": run.digest, "example": run.example}
    return {
        **own,
        **about(),
        "train": canonical(run.train),
        "flags": {name: values for name, values in canonical(flags).items() if name not in {*OF_ONE_MACHINE, ""}},
        "data": checksum(data) if data else None,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "threads": int(place.get("OMP_NUM_THREADS", 0)) or None,
        "trained": False,
        "metrics": {},
        "evaluate": {},
        "points": [],
    }


def command_of(example: str, name: str, words: Sequence[str], save: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the variables that stand before it, {root} and {save} filled in."""
    words = [word.replace("{root}", str(ROOT)).replace("{save}", save) for word in words]
    variables = dict(word.split("=", 1) for word in itertools.takewhile(is_variable, words))
    return [str(EXAMPLES / example / f"{name}.sh"), *words[len(variables) :]], variables


def dry_run(run: Run, name: str, words: Sequence[str], save: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command, variables = command_of(run.example, name, words, save)
    environment = {**os.environ, "SAVE": save, **variables, "DRY_RUN": "1"}
    return subprocess.run(command, env=environment, text=True, check=False, **options)


# ---- machines --------------------------------------------------------------------------------------------------------


def shares(jobs: int) -> list[dict[str, str]]:
    """Return for each job its share of the GPUs, or of the cores if there are no GPUs."""
    wanted = os.environ.get("GPUS", "")
    if wanted and not wanted.isdecimal():
        fail(f"GPUS={wanted}: must be a number")
    gpus = visible_gpus() if jobs > 1 and wanted != "0" else []
    if gpus:
        jobs = min(jobs, len(gpus))
        size = 1 << (len(gpus) // jobs).bit_length() - 1  # a power of two can share the batches of an update
        own = {"GPUS": str(min(int(wanted), size))} if wanted else {}
        return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[size * job : size * (job + 1)]), **own} for job in range(jobs)]
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, CORES // jobs)))}] * jobs


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name not in ("", "-1")]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number, _ in enumerate(listed.splitlines())]


# ---- the command -----------------------------------------------------------------------------------------------------


def seeds(words: str) -> range:
    first, dash, last = words.partition("-")
    return range(int(first), int(last) + 1) if dash else range(1, int(first) + 1)


def arguments(words: Sequence[str]) -> tuple[argparse.Namespace, Sequence[str]]:
    own = words[: words.index("--")] if "--" in words else words
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="sweep.py", description=__doc__, formatter_class=raw)
    parser.add_argument("grid", type=Path, help="a TOML file, such as those in examples/grids")
    parser.add_argument("--seeds", type=seeds, default=[1], metavar="N", help="1 to N, or FIRST-LAST (default: 1)")
    labels = "run only points that have all these labels; if repeated, the points of each option"
    parser.add_argument("--only", action="append", default=[], metavar="LABEL,LABEL", help=labels)
    jobs = "runs at a time, which share the GPUs, or the cores (default: 1)"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=jobs)
    parser.add_argument("--out", type=Path, default=ROOT / "runs", help="folder of the runs (default: runs)")
    parser.add_argument("--dry-run", action="store_true", help="print fairseq's commands and run nothing")
    parser.usage = parser.format_usage().removeprefix("usage: ").strip() + " [-- FLAGS OF EVERY train.sh]"
    return parser.parse_args(own), words[len(own) + 1 :]


def grid_of(path: Path, extra: Sequence[str] = ()) -> Grid:
    """Return the grid of a file, with the variables of the environment and the flags of the command line."""
    grid = read_grid(path)
    if not (EXAMPLES / grid.example / "train.sh").exists():
        fail(f"{path}: example {grid.example!r}: examples/ has no such recipe")
    for name in ("SAVE", "CHECKPOINT"):
        if os.environ.get(name):
            fail(f"{name}={os.environ[name]}: must not be set; sweep.py gives each run its own")
    # the environment comes first, so that the grid's own words win
    train, evaluate = (
        shlex.join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))
        for names in (TRAINING, EVALUATION)
    )
    base = Point(f"{train} {grid.base.train} {shlex.join(extra)}", f"{evaluate} {grid.base.evaluate}")
    return replace(grid, base=base)


def sweep(todo: Sequence[Run], runner: Runner) -> list[str]:
    """Do the unfinished runs; return the failures."""
    missing, failures = [run for run in todo if runner.missing(run)], []
    done = len(todo) - len(missing)
    print(f"{len(todo)} runs, {done} of them finished before; logs in {runner.out}", flush=True)
    with ThreadPoolExecutor(runner.jobs) as pool:
        futures = {pool.submit(runner, run): run for run in missing}
        for future in as_completed(futures):
            try:
                outcome = future.result()
                done += 1
            except Failure as failure:
                failures.append(f"{futures[future].title}: {failure}")
                outcome = "failed"
            if not runner.stopped_by:
                print(f"[{done}/{len(todo)}] {futures[future].title}: {outcome}", flush=True)
    return failures


def main(words: Sequence[str] | None = None) -> int:
    args, extra = arguments(sys.argv[1:] if words is None else words)
    if args.jobs < 1:
        fail(f"--jobs {args.jobs}: must be at least 1")
    todo = runs(grid_of(args.grid, extra), args.seeds, args.only)
    if not todo:
        fail("--only, --seeds: choose no run of the grid")
    if args.dry_run or os.environ.get("DRY_RUN"):
        for run in todo:
            save = str(run.folder(args.out) / "checkpoints")
            for name, flags in (("train", run.train), *(("evaluate", flags) for flags in run.evaluate.values())):
                if dry_run(run, name, flags, save).returncode:
                    return 1
        return 0
    try:
        out = args.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        runner = Runner(out, args.jobs)
        with runner.stoppable():
            failures = sweep(todo, runner)
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
