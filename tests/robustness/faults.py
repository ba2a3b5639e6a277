"""Strike a training at a chosen moment: when it opens, renames or removes a chosen file.

`before` is the source that a command runs first, see tests/launcher.py. This file imports nothing
of fairseq or torch.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any


def before(**settings: Any) -> str:
    """Return the source that installs `Faults` with these settings in a process."""
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in settings.items()
    }
    return f"from tests.robustness import faults; faults.install({settings})"


def install(settings: dict[str, Any]) -> None:
    sys.addaudithook(Faults(**settings))


def events(record: Path) -> list[list[str]]:
    """Return what a training did: [event, name of the file], one after the other."""
    return [line.split(" ", 1) for line in record.read_text().splitlines()]


class Faults:
    """An audit hook that sees what a process does with the files of a folder.

    That is how it opens files for writing, renames and removes them.

    Args:
        folder: whose files count
        record: a file that gets a line for each event
        at: the number of the event, from 0, at which something happens
        how: 'kill' the process before the event takes effect; 'cut' kills it once a file has so
            many `bytes`; 'full' leaves room for so many `bytes` in each file from then on
        bytes: see `how`
    """

    def __init__(
        self,
        folder: str,
        record: str | None = None,
        at: int = -1,
        how: str = "kill",
        bytes: int = 0,
    ):
        self.folder, self.at, self.how, self.bytes = os.path.join(folder, ""), at, how, bytes
        self.record = None
        if record:
            self.record = open(record, "w")  # noqa: SIM115 (as long as the process lives)
        self.count = 0

    def __call__(self, event: str, arguments: Any) -> None:
        writes = (
            event == "open"
            and isinstance(arguments[2], int)
            and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        )
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
        if self.how == "cut":
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.bytes, resource.RLIM_INFINITY))
