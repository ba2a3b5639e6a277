"""Trainings that can be killed at a chosen moment, each forked from one process that has everything imported.

A kill needs a process of its own, and the imports of one cost more than a tiny training. The server (this file, run as
a module) answers each line of JSON with one: a training's process id, or how it has ended.
"""

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

ROOT = Path(__file__).parents[2]


# What every training imports, the second two when it parses its flags and builds its optimizer.
NEEDED = ["fairseq_cli.train", "mixhead_plugin.models", "hydra.core.override_parser.overrides_parser", "torch._dynamo"]


class End(NamedTuple):
    """How a training ended: its exit status, negative for a signal as in `subprocess`, and what it said."""

    status: int
    output: str


class Training(NamedTuple):
    process: int
    log: Path


class Trainings:
    """The tests' side, in a `with` statement."""

    def __enter__(self) -> "Trainings":
        command = [sys.executable, "-m", "tests.robustness.faults"]
        self._server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout.readline() == '"ready"\n'
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def _ask(self, **order: Any) -> Any:
        print(json.dumps(order), file=self._server.stdin, flush=True)
        return json.loads(self._server.stdout.readline())

    def start(self, log: Path, *arguments: Any, fault: Optional[Dict[str, Any]] = None, before: str = "") -> Training:
        """A training that writes to `log`.

        Args:
            arguments: of fairseq-train
            fault: what happens to it, see `_Faults`
            before: Python, run in its process before it begins
        """
        log.write_text("")
        order = {"arguments": [str(a) for a in arguments], "log": str(log), "fault": fault, "before": before}
        return Training(self._ask(start=order), log)

    def end(self, training: Training, seconds: float = 300) -> End:
        """Wait for the end of a training; one that takes longer is killed and fails the test."""
        deadline = time.monotonic() + seconds
        while (status := self._ask(status=training.process)) is None:
            if time.monotonic() > deadline:
                os.kill(training.process, signal.SIGKILL)
                raise AssertionError(f"no end in {seconds} seconds: {training.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.02)
        return End(status, training.log.read_text(errors="replace"))

    def run(self, log: Path, *arguments: Any, **settings: Any) -> End:
        return self.end(self.start(log, *arguments, **settings))


class _Faults:
    """Sees what a training does to the files of a folder: opening for writing, renaming, removing.

    Args:
        folder: whose files count
        record: a file that gets a line for each event
        at: the number of the event, from 0, at which something happens
        how: `kill`, before it takes effect; `cut`, as many bytes later, in the midst of the writing; `full`, as if the
            disk had room for that many bytes of each file from then on; `gone`, the folder becomes a file
        bytes: see `how`
    """

    def __init__(self, folder: str, record: Optional[str] = None, at: int = -1, how: str = "kill", bytes: int = 0):
        self.folder, self.at, self.how, self.bytes = os.path.join(folder, ""), at, how, bytes
        self.record = open(record, "w") if record else None  # noqa: SIM115 (as long as the process lives)
        self.count = 0

    def __call__(self, event: str, arguments: Any) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in ("os.rename", "os.remove", "os.link")):
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else ""
        if not path.startswith(self.folder):
            return
        if self.record:
            print(event, os.path.basename(path), file=self.record, flush=True)
        self.count += 1
        if self.count - 1 == self.at:
            self.strike()

    def strike(self) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.how == "gone":
            folder = Path(self.folder)
            folder.rename(folder.with_suffix(".gone"))
            folder.touch()
        else:
            if self.how == "cut":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.bytes, resource.RLIM_INFINITY))


def _train(arguments: List[str], log: str, fault: Optional[Dict[str, Any]], before: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    sys.argv = ["fairseq-train", *arguments]
    from fairseq_cli.train import cli_main

    status = 0
    try:
        exec(before, {})
        if fault is not None:
            sys.addaudithook(_Faults(**fault))
        cli_main()
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        status = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _serve() -> None:
    for name in NEEDED:
        importlib.import_module(name)
    print('"ready"', flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "start" in order:
            answer = os.fork()
            if answer == 0:
                _train(**order["start"])
        else:
            process, status = os.waitpid(order["status"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if process else None
        print(json.dumps(answer), flush=True)


def events(record: Path) -> List[List[str]]:
    """What a training did, as [event, name of the file]"""
    return [line.split(" ", 1) for line in record.read_text().splitlines()]


if __name__ == "__main__":
    _serve()
