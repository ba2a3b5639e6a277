"""Run named steps in processes of their own.

So one that fails, crashes or hangs does not end the others.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
Steps = Callable[[str], Iterable[Row]]  # yields the rows of a step

START = 30.0  # seconds that a process may take to start, beside the limit of its first step


class Event(NamedTuple):
    """A row of a step, or its end."""

    step: str
    row: Row | None = None
    fault: str = ""  # of a step that ended: why it is not complete, or an empty string
    seconds: float = 0.0  # of a step that ended


class Worker:
    """A process that runs one step after the other."""

    def __init__(self, function: Steps, log: Path):
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, function, str(log)))
        self.process.start()
        theirs.close()
        self.started = False
        self.step = ""

    def begin(self, step: str, limit: float) -> None:
        self.step = step
        self.began = time.monotonic()
        self.ends = self.began + limit + (0.0 if self.started else START)
        self.started = True
        # a process that has ended cannot be sent anything; `received` says how it ended
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(step)

    def end(self, grace: float = 0.0) -> None:
        """End the process and all that it has started.

        One that has no step ends by itself, if it gets the time.
        """
        self.connection.close()
        self.process.join(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # before it had a process group
        self.process.join()


def run(
    function: Steps, steps: Sequence[str], log: Path, *, workers: int, seconds: float, limit: float
) -> Iterator[Event]:
    """Yield rows as they come, and the end of every step.

    Args:
        function: yields the rows of a step; it must be importable in another process
        log: a file that gets what the processes print
        workers: processes at a time
        seconds: for all steps; then the others are ended or not begun
        limit: seconds for a step; then its process is ended
    """
    deadline = time.monotonic() + seconds
    waiting = deque(steps)
    working: dict[Connection, Worker] = {}

    def give_work(worker: Worker | None) -> None:
        """Begin the next step, in a new process if no worker is free; without steps one may go."""
        if waiting:
            if worker is None:
                worker = Worker(function, log)
            working[worker.connection] = worker
            worker.begin(waiting.popleft(), limit)
        elif worker is not None:
            worker.end(grace=5.0)

    try:
        for _ in range(workers):
            give_work(None)
        while working:
            now = time.monotonic()
            until = min(deadline, *(worker.ends for worker in working.values()))
            for connection in wait(list(working), max(0.0, until - now)):
                worker = working[connection]
                event = received(worker)
                yield event
                if event.row is not None:
                    continue  # its step goes on
                del working[connection]
                if event.fault.startswith(DIED):
                    worker.end()
                    give_work(None)
                else:
                    give_work(worker)

            now = time.monotonic()
            late = [worker for worker in working.values() if now >= min(deadline, worker.ends)]
            for worker in late:
                if now >= worker.ends:
                    why = f"did not end within {limit:.0f} s"
                else:
                    why = "the time of this part was over"
                yield Event(worker.step, fault=why, seconds=now - worker.began)
                del working[worker.connection]
                worker.end()
                if now < deadline:
                    give_work(None)
        for step in waiting:
            yield Event(step, fault="not begun: the time of this part was over")
    finally:
        for worker in working.values():
            worker.end()


DIED = "its process ended"


def received(worker: Worker) -> Event:
    """Return what a worker has sent, or the end of its step if its process has ended."""
    try:
        return worker.connection.recv()
    except (EOFError, ConnectionResetError):  # the second if it had not read its step
        worker.process.join()
        took = time.monotonic() - worker.began
        return Event(
            worker.step, fault=f"{DIED} with exit status {worker.process.exitcode}", seconds=took
        )


def serve(connection: Connection, function: Steps, log: str) -> None:
    """Run the steps that come; this is the process of a `Worker`."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            step = connection.recv()
            began = time.monotonic()
            print(f"---- {step}", file=sys.stderr, flush=True)
            fault = ""
            try:
                for row in function(step):
                    connection.send(Event(step, row))
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                fault = one_line(error)
            if broken := broken_device():
                connection.send(Event(step, {"fault": broken}))
                os._exit(1)  # every later call of CUDA would fail in this process
            connection.send(Event(step, fault=fault, seconds=time.monotonic() - began))


def one_line(error: BaseException) -> str:
    """Return the kind of an error and the first line that its message has, of 500 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:500]


def broken_device() -> str:
    """Return why CUDA can no longer be used in this process, or an empty string."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return one_line(error)
    return ""
