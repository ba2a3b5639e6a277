"""Train and evaluate one run of a grid with the scripts of its recipe.

`Runner` does so for scripts/sweep.py.
"""

import contextlib
import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from studies.commands import command_of, dry_run
from studies.fairseq_logs import NUMBER, Progress, last_line
from studies.machines import cpu_seconds, shares
from studies.provenance import add_commit, checksum, device, versions
from studies.records import read_run
from studies.runs import Run, as_name, canonical

OF_ONE_MACHINE = {"--user-dir", "--save-dir", "--continue-once"}  # flags left out of the record
# Flags that the recipes set by the number and the kind of the processors (common/recipe.sh).
OF_PROCESSORS = {
    "--amp",
    "--batch-size",
    "--bf16",
    "--cpu",
    "--ddp-backend",
    "--distributed-backend",
    "--distributed-world-size",
    "--fp16",
    "--max-tokens",
    "--update-freq",
}
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# seconds from SIGTERM to SIGKILL: a training ends its update and saves a checkpoint first
GRACE = 60.0
POLL = 0.1  # seconds between two looks at a running script


class Shown(Progress):
    """Shows the points of a training while it runs.

    A bar on a terminal, elsewhere a line for each validation.
    """

    def __init__(self, points: Sequence[dict[str, float]], run: Run, updates: int | None):
        super().__init__(points)
        self.title = run.title
        self.bar = tqdm(total=updates, desc=run.title, unit=" updates", leave=False, disable=None)

    def add(self, *line: Any) -> dict[str, float] | None:
        point = super().add(*line)
        if point:
            self.bar.update(point["update"] - self.bar.n)
        if point and "valid_loss" in point:
            tqdm.write(
                f"{self.title}: update {point['update']}, valid loss {point['valid_loss']:g}"
            )
        return point


class Failure(Exception):
    """Ends one run; the message says where its log is."""


@dataclass(frozen=True)
class Job:
    """A run that this command has begun."""

    run: Run
    folder: Path
    variables: Mapping[str, str]  # its share of the machine, and SAVE
    lock: int  # the file that keeps other sweeps out of the folder
    record: dict[str, Any]  # the content of run.json

    def save(self) -> None:
        """Write run.json, whole or not at all."""
        unfinished = self.folder / "run.json.unfinished"
        unfinished.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(self.folder / "run.json")


class Runner:
    """Runs the scripts of a recipe, each run in its folder, until a signal ends them."""

    def __init__(self, out: Path, jobs: int):
        self.out = out
        self.stopped_by = 0  # the signal
        self.shares = shares(jobs)  # those that no run has now

    def known(self, run: Run) -> dict[str, Any]:
        """Return what run.json says; it is empty for a run that has not begun."""
        path = run.folder(self.out) / "run.json"
        try:
            return read_run(path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise Failure(
                f"{path}: cannot be read ({error}); remove the file to train again"
            ) from error

    def finished(self, run: Run) -> bool:
        """Return True if the run is trained and has all its metrics."""
        return bool(self.known(run).get("trained")) and not self.missing(run)

    def missing(self, run: Run) -> list[str]:
        """Return the metrics that were not evaluated with these flags."""
        evaluated = self.known(run).get("evaluate", {})
        return [
            metric
            for metric, words in run.evaluate.items()
            if evaluated.get(metric) != canonical(words)
        ]

    def do(self, run: Run) -> str:
        """Train and evaluate what is missing of a run; return its metrics as text.

        A thread of sweep.py calls it. There are as many threads as shares, so one is left.
        """
        if self.stopped_by:
            raise Failure("stopped before it began")
        share = self.shares.pop()
        try:
            folder = run.folder(self.out)
            if run.start and not self.known(run.start).get("trained"):
                raise Failure(f"starts from {run.start.title}, which is not trained")
            folder.mkdir(parents=True, exist_ok=True)
            variables = {**share, "SAVE": str(folder / "checkpoints")}
            with held(folder) as lock:
                job = Job(run, folder, variables, lock, self.known(run))
                if not job.record.get("trained"):
                    self.train(job)
                for metric in self.missing(run):
                    self.evaluate(job, metric)
            values = [f"{metric} {job.record['metrics'][metric]:g}" for metric in run.evaluate]
            return ", ".join(values) or "trained"
        except OSError as error:
            raise Failure(str(error)) from error
        finally:
            self.shares.append(share)

    def begin(self, job: Job) -> None:
        """Fill the record of a training that begins, or goes on."""
        record = job.record
        now = start_of(job.run, job.variables)

        # A record without a text is of a task that draws its own, or of a training that failed
        # because its text was not there yet. That of now is recorded below.
        text = record.get("data")
        if text is None:
            record.pop("data", None)
        elif text != now["data"]:
            texts = f"SHA-256 {text}, now {now['data']}"
            raise Failure(f"began with another text ({texts}); folder: {job.folder}")

        others = other_flags(record.get("flags") or {}, now["flags"])
        if others:
            raise Failure(f"began with other flags ({', '.join(others)}); folder: {job.folder}")

        # the updates and the time of the run that this one starts from count
        if job.run.start:
            before = self.known(job.run.start)
            for name in ("points", "seconds", "cpu_seconds", "peak_memory_mib"):
                if name in before:
                    now[name] = before[name]

        # What an earlier process has recorded stays, because it began the training: a field that
        # is missing is new, or of a version that did not write it.
        for name, value in now.items():
            record.setdefault(name, value)
        add_commit(record)

    def train(self, job: Job) -> None:
        """Train to the end, from the last checkpoint if there is one."""
        self.begin(job)
        record = job.record
        log = job.folder / "train.log"
        flags = record["flags"] or {}  # older versions wrote None where a recipe has none
        updates = flags.get("--max-update", [""])[0]
        progress = Shown(record["points"], job.run, int(updates) if updates.isdecimal() else None)
        try:
            used = self.script(job, "train", job.run.train, log, progress)
            record["trained"] = used["status"] == 0
            for name in ("seconds", "cpu_seconds"):
                record[name] = round(record.get(name, 0.0) + used[name], 2)
            memory = max(record.get("peak_memory_mib", 0.0), used["peak_memory_mib"])
            record["peak_memory_mib"] = memory
        finally:
            # also after a signal, so that the training can go on
            progress.bar.close()
            record["points"] = progress.all()
            record |= last_validation(record["points"])
            job.save()
        if not record["trained"]:
            raise Failure(f"train.sh failed ({last_line(log)[:200]}); log: {log}")

    def evaluate(self, job: Job, metric: str) -> None:
        """Record the number in the last line that evaluate.sh prints."""
        log = job.folder / f"evaluate-{as_name(metric)}.log"
        words = job.run.evaluate[metric]
        used = self.script(job, "evaluate", words, log)
        last = last_line(log)
        number = NUMBER.search(last)
        if used["status"] or not number:
            why = "failed" if used["status"] else "ended in a line without a number"
            raise Failure(f"evaluate.sh {why} ({last[:200]}); log: {log}")
        add_commit(job.record)
        # 'perplexity' of 'perplexity = 20.54', 'BLEU' of 'BLEU|case.lc+... = 33.5 66.1/...'
        measure = re.split(r"[|=:]", last)[0].strip()
        job.record.setdefault("measures", {})[metric] = measure
        job.record["metrics"][metric] = float(number[1])
        job.record.setdefault("evaluate", {})[metric] = canonical(words)
        job.save()

    def script(
        self, job: Job, name: str, words: Sequence[str], log: Path, progress: Progress | None = None
    ) -> dict[str, float]:
        """Run a script to its end.

        Args:
            job: the run
            name: 'train' or 'evaluate'
            words: the arguments of the script, and its variables
            log: the file that its output is appended to
            progress: collects the points of a training; None for an evaluation

        Returns:
            its exit status, its seconds of wall clock and of CPU, and the memory of its largest
                process in MiB
        """
        command, variables = command_of(job.run, name, words, job.variables["SAVE"])
        variables = {**job.variables, **variables}
        if progress:
            command += ["--log-format", "json"]
        shown = shlex.join([*(f"{key}={value}" for key, value in variables.items()), *command])
        with (
            log.open("a", encoding="utf-8") as file,
            log.open(encoding="utf-8", errors="replace") as lines,
        ):
            lines.seek(0, os.SEEK_END)  # the lines of earlier processes have been read
            file.write(f"$ {shown}\n")
            file.flush()
            if self.stopped_by:  # since the run began
                raise Failure(f"stopped before {name}.sh began")
            began = time.monotonic()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,  # fairseq's own processes end with it
                pass_fds=(job.lock,),  # a training that outlives this command keeps its folder
            )
            usage = self.wait(process, lines, progress)
        unit = 1 if sys.platform == "darwin" else 2**10  # bytes
        return {
            "status": process.returncode,
            "seconds": time.monotonic() - began,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "peak_memory_mib": round(usage.ru_maxrss * unit / 2**20, 1),
        }

    def wait(
        self, process: subprocess.Popen, lines: Iterable[str], progress: Progress | None
    ) -> Any:
        """Follow the log, pass a stop signal on, and return the resource usage of the process."""
        kill_at = 0.0  # when SIGKILL follows; 0 before SIGTERM was sent
        begun = ""  # a line that the script is still writing
        while True:
            cpu = cpu_seconds(process.pid)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            for line in lines:
                begun += line
                if not begun.endswith("\n"):
                    continue
                if progress:
                    progress.read(begun, cpu)
                begun = ""
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                if status:
                    end_group(process.pid, signal.SIGKILL)  # processes that a failed script left
                return usage
            if self.stopped_by and not kill_at:
                end_group(process.pid, signal.SIGTERM)
                kill_at = time.monotonic() + GRACE
            elif kill_at and time.monotonic() > kill_at:
                end_group(process.pid, signal.SIGKILL)
            time.sleep(POLL)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let SIGINT, SIGTERM and SIGHUP end all scripts within the context.

        A SIGHUP that nohup ignores is ignored.
        """
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


def last_validation(points: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return valid_loss and valid_objective of the last validation; nothing without one."""
    for point in reversed(points):
        if "valid_loss" in point:
            return {name: value for name, value in point.items() if name.startswith("valid_")}
    return {}


def start_of(run: Run, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of a run before its training.

    `records.RunRecord` says what the fields are.
    """
    data, flags = dry_training(run, variables)
    kept = {name: values for name, values in flags.items() if name not in OF_ONE_MACHINE}
    on_gpus = bool(flags) and "--cpu" not in flags
    return {
        "labels": dict(run.labels),
        "seed": run.seed,
        "digest": run.digest,
        "example": run.example,
        "device": device(on_gpus, variables.get("CUDA_VISIBLE_DEVICES")),
        "versions": versions(),
        "train": canonical(run.train),
        "flags": kept,
        "data": checksum(data) if data else None,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "threads": int(variables.get("OMP_NUM_THREADS", 0)) or None,
        "trained": False,
        "metrics": {},
        "evaluate": {},
        "points": [],
        "seconds": 0.0,  # also of a run that was stopped before it began
    }


def other_flags(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> list[str]:
    """Return how the flags of a training that goes on differ from those that it began with.

    Paths may differ, because they are of one machine. So may what the recipe sets by the number of
    GPUs, if that is another one. No flags are those of an older version, or of a recipe that trains
    without fairseq.

    Args:
        before: the flags in the record
        now: those of a dry run
    """
    if not before:
        return []
    free = set(OF_ONE_MACHINE)
    if processors(before) != processors(now):
        free |= OF_PROCESSORS

    found = []
    for name in sorted((before.keys() | now.keys()) - free):
        values = [shown_flag(name, flags.get(name)) for flags in (before, now)]
        if values[0] != values[1]:
            found.append(f"{values[0]}, now {values[1]}")
    return found


def processors(flags: Mapping[str, Sequence[str]]) -> tuple[bool, Sequence[str] | None]:
    """Return whether a training uses the CPU, and in how many processes."""
    return "--cpu" in flags, flags.get("--distributed-world-size")


def shown_flag(name: str, values: Sequence[str] | None) -> str:
    """Return '--lr 0.1', or 'no --lr'; each absolute path is a '/'."""
    if values is None:
        return f"no {name}"
    return " ".join([name, *("/" if value.startswith("/") else value for value in values)])


def dry_training(run: Run, variables: Mapping[str, str]) -> tuple[str, dict[str, list[str]]]:
    """Return the data and the flags of fairseq's command, which a dry run of train.sh prints.

    It has the variables of the job, because --update-freq depends on the number of its GPUs. Both
    are empty for a recipe that trains without fairseq. A dry run that fails is a Failure, because
    the record of the run would lack them for good.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ended = dry_run(run, "train", run.train, variables, **pipes)
    if ended.returncode:
        last = ended.stderr.strip().rpartition("\n")[2]
        raise Failure(f"train.sh cannot print its command ({last[:200]})")
    for line in ended.stdout.splitlines():
        if line.startswith("fairseq-"):
            _, data, *words = shlex.split(line)
            flags = canonical(words)
            flags.pop("", None)  # words that belong to no flag
            return data, flags
    return "", {}
