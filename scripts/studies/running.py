"""Train and evaluate one run of a grid with the scripts of its recipe; `Runner` does so for
scripts/sweep.py.
"""

import contextlib
import fcntl
import itertools
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

from studies.fairseq_logs import NUMBER, Progress, last_line
from studies.grids import Run, as_name, canonical, fail, is_variable
from studies.provenance import CORES, ROOT, about, add_commit, checksum

EXAMPLES = ROOT / "examples"
OF_ONE_MACHINE = {"--user-dir", "--save-dir", "--continue-once"}  # flags left out of the record
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# seconds from SIGTERM to SIGKILL: a training ends its update and saves a checkpoint first
GRACE = 60.0
POLL = 0.1  # seconds between two looks at a running script


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process and its ended children; None if the system has no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Shown(Progress):
    """Shows the points of a training while it runs: a bar on a terminal, a line for each
    validation.
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
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            raise Failure(
                f"{path}: cannot be read ({error}); remove the file to train again"
            ) from error

    def finished(self, run: Run) -> bool:
        return bool(self.known(run).get("trained")) and not self.missing(run)

    def missing(self, run: Run) -> list[str]:
        """Return the metrics that were not evaluated with these flags."""
        evaluated = self.known(run).get("evaluate", {})
        return [
            metric
            for metric, words in run.evaluate.items()
            if evaluated.get(metric) != canonical(words)
        ]

    def __call__(self, run: Run) -> str:
        """Train and evaluate what is missing of a run; return its metrics as text."""
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
            return (
                ", ".join(f"{metric} {job.record['metrics'][metric]:g}" for metric in run.evaluate)
                or "trained"
            )
        except OSError as error:
            raise Failure(str(error)) from error
        finally:
            self.shares.append(share)

    def train(self, job: Job) -> None:
        """Train to the end, from the last checkpoint if there is one."""
        record, now = job.record, start_of(job.run, job.variables)
        if record and record["data"] != now["data"]:
            texts = f"SHA-256 {record['data']}, now {now['data']}"
            raise Failure(f"began with another text ({texts}); folder: {job.folder}")
        if job.run.start:  # its updates and its time count
            before = self.known(job.run.start)
            now |= {
                name: before[name]
                for name in ("points", "seconds", "cpu_seconds", "peak_memory_mib")
            }
        record |= {**now, **record}
        add_commit(record)
        log, updates = job.folder / "train.log", record["flags"].get("--max-update", [""])[0]
        progress = Shown(record["points"], job.run, int(updates) if updates.isdecimal() else None)
        try:
            used = self.script(job, "train", job.run.train, log, progress)
            record["trained"] = used["status"] == 0
            for name in ("seconds", "cpu_seconds"):
                record[name] = round(record.get(name, 0.0) + used[name], 2)
            record["peak_memory_mib"] = max(
                record.get("peak_memory_mib", 0.0), used["peak_memory_mib"]
            )
        finally:
            progress.bar.close()
            record["points"] = progress.all()
            validated = (point for point in reversed(record["points"]) if "valid_loss" in point)
            record |= {
                name: value
                for name, value in next(validated, {}).items()
                if name.startswith("valid_")
            }
            job.save()
        if not record["trained"]:
            raise Failure(f"train.sh failed ({last_line(log)[:200]}); log: {log}")

    def evaluate(self, job: Job, metric: str) -> None:
        log, words = job.folder / f"evaluate-{as_name(metric)}.log", job.run.evaluate[metric]
        used = self.script(job, "evaluate", words, log)
        last = last_line(log)
        number = NUMBER.search(last)
        if used["status"] or not number:
            why = "failed" if used["status"] else "ended in a line without a number"
            raise Failure(f"evaluate.sh {why} ({last[:200]}); log: {log}")
        add_commit(job.record)
        job.record.setdefault("measures", {})[metric] = re.split(r"[|=:]", last)[0].strip()
        job.record["metrics"][metric] = float(number[1])
        job.record["evaluate"][metric] = canonical(words)
        job.save()

    def script(
        self, job: Job, name: str, words: Sequence[str], log: Path, progress: Progress | None = None
    ) -> dict[str, float]:
        """Run a script to its end; return its status, its seconds, and the memory of its largest
        process.
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
        killed_at, begun = 0.0, ""
        while True:
            cpu = cpu_seconds(process.pid)
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            for line in lines:
                begun += line
                if begun.endswith("\n"):  # else the script is still writing the line
                    if progress:
                        progress.read(begun, cpu)
                    begun = ""
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
        """Let SIGINT, SIGTERM and SIGHUP end all scripts within the context. Ignore a SIGHUP that
        nohup ignores.
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


def start_of(run: Run, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the record of a run before its training; a dry run of train.sh prints all flags and
    the data.
    """
    printed = dry_run(
        run, "train", run.train, variables["SAVE"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ).stdout
    command = next((line for line in printed.splitlines() if line.startswith("fairseq-")), "")
    _, data, *flags = [*shlex.split(command), "", ""]
    own = {
        "labels": dict(run.labels),
        "seed": run.seed,
        "digest": run.digest,
        "example": run.example,
    }
    return {
        **own,
        **about(),
        "train": canonical(run.train),
        "flags": {
            name: values
            for name, values in canonical(flags).items()
            if name not in {*OF_ONE_MACHINE, ""}
        },
        "data": checksum(data) if data else None,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "threads": int(variables.get("OMP_NUM_THREADS", 0)) or None,
        "trained": False,
        "metrics": {},
        "evaluate": {},
        "points": [],
        "seconds": 0.0,  # also of a run that was stopped before it began
    }


def command_of(
    run: Run, name: str, words: Sequence[str], save: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command and the variables that stand before it, {root}, {save} and {start} filled
    in.
    """
    start = str(run.start.folder(Path(save).parents[1]) / "checkpoints") if run.start else ""
    for mark, path in (("{root}", str(ROOT)), ("{save}", save), ("{start}", start)):
        words = [word.replace(mark, path) for word in words]
    variables = dict(word.split("=", 1) for word in itertools.takewhile(is_variable, words))
    return [str(EXAMPLES / run.example / f"{name}.sh"), *words[len(variables) :]], variables


def dry_run(
    run: Run, name: str, words: Sequence[str], save: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    command, variables = command_of(run, name, words, save)
    environment = {**os.environ, "SAVE": save, **variables, "DRY_RUN": "1"}
    return subprocess.run(command, env=environment, text=True, check=False, **options)


# ---- machines ----------------------------------------------------------------------------------


def shares(jobs: int) -> list[dict[str, str]]:
    """Return for each job its share of the GPUs, or of the cores if there are no GPUs."""
    wanted = os.environ.get("GPUS", "")
    if wanted and not wanted.isdecimal():
        fail(f"GPUS={wanted}: must be a number")
    gpus = visible_gpus() if jobs > 1 and wanted != "0" else []
    if gpus:
        jobs = min(jobs, len(gpus))
        # a power of two can share the batches of an update
        size = 1 << (len(gpus) // jobs).bit_length() - 1
        own = {"GPUS": str(min(int(wanted), size))} if wanted else {}
        return [
            {"CUDA_VISIBLE_DEVICES": ",".join(gpus[size * job : size * (job + 1)]), **own}
            for job in range(jobs)
        ]
    return [
        {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, CORES // jobs)))}
    ] * jobs


def visible_gpus() -> list[str]:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [
            name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name not in ("", "-1")
        ]
    # in a process of its own, which frees torch's memory
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return [str(number) for number in range(int(found))]
