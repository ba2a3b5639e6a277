"""What the preparations share: how they start and end, their folders, their flags, and fairseq-preprocess."""

import argparse
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Optional

from common.archives import fail, note

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

# ---- how a preparation ends ------------------------------------------------------------------------------------------

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """One of ENDINGS has come; everything is cleared away as after Ctrl-C."""

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = signal.Signals(number)


def _interrupt(number: int, frame: Optional[FrameType]) -> NoReturn:
    for other in ENDINGS:  # what is cleared away now is not left half done, but a second Ctrl-C has its way
        signal.signal(other, signal.SIG_DFL if other == signal.SIGINT else signal.SIG_IGN)
    raise Interrupted(number)


def start(main: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Call `main` as the program; a signal that ends it does so in one line, with the shell's status for it."""
    for number in ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _interrupt)
    try:
        sys.exit(main(*arguments))
    except Interrupted as interruption:
        note(f"interrupted by {interruption.signal.name}; run again to go on")
        sys.exit(128 + interruption.signal)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """For long work of a C++ library, in which Python would not hear a signal: it ends the process, uncleared."""
    before = {number: signal.getsignal(number) for number in ENDINGS}
    ours = [number for number, handler in before.items() if handler == _interrupt]
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


# ---- folders ---------------------------------------------------------------------------------------------------------

LOCK = "prepare.lock"  # in DATA, while a preparation is at work
_locks: set[int] = set()  # descriptors that hold one

UNCHECKED = "counts-not-checked"  # an empty file in every folder that was made with --any-counts


@contextmanager
def data_folder() -> Iterator[Path]:
    """DATA of the environment, which recipe.sh sets; made if it is not there, and nobody else's meanwhile."""
    folder = Path(os.environ["DATA"])
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(path)
    except BlockingIOError:
        fail(f"DATA={folder}: another preparation of it is at work (process {_holder(path)} or one that it started)")
    except OSError as error:
        fail(f"DATA={folder}: {error.strerror}")
    _locks.add(descriptor)
    try:
        yield folder
    finally:
        path.unlink(missing_ok=True)
        _locks.discard(descriptor)
        os.close(descriptor)


def _locked(path: Path) -> int:
    """A descriptor of the file that holds the lock on it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{os.getpid()}\n".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # of a preparation that ended in between, and removed it


def _holder(path: Path) -> str:
    """The number of the process that wrote the lock; if that was killed, its fairseq-preprocess may hold it still."""
    with suppress(OSError):
        return path.read_text().strip()
    return "?"


def mark_unchecked(folder: Path) -> None:
    """Remember that the counts of the text in `folder`, or of which it was made, were not checked."""
    (folder / UNCHECKED).touch()


def refuse_unchecked(folders: Iterable[Path], any_counts: bool) -> None:
    """Without --any-counts, end the program if one of the folders was made with it."""
    for folder in folders:
        if (folder / UNCHECKED).exists() and not any_counts:
            fail(f"{folder}: made with --any-counts, so its counts were not checked; give --any-counts, or remove it")


def require_files(folder: Path, names: Iterable[str]) -> None:
    """End the program unless the text in `folder` is whole."""
    for name in names:
        if not (folder / name).is_file():
            fail(f"{folder}: {name} is missing; remove the folder to have it made again")


# ---- flags -----------------------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """With DRY_RUN=1 nothing follows the reading of the command line: its settings are printed."""

    def parse_args(self, *arguments: Any, **settings: Any) -> Any:
        args = super().parse_args(*arguments, **settings)
        if os.environ.get("DRY_RUN"):
            print(" ".join(f"{name}={value}" for name, value in vars(args).items()))
            sys.exit()
        return args


def parser(description: str) -> Parser:
    """The command line of a prepare.sh with the flags that all have."""
    arguments = Parser(prog="prepare.sh", description=description)
    arguments.add_argument(
        "--any-counts",
        action="store_true",
        help="take text of your own in the same layout: numbers of lines and tokens are printed, not checked",
    )
    arguments.add_argument(
        "--workers", type=int, default=CORES, metavar="N", help="processes at a time (default: %(default)s)"
    )
    return arguments


# ---- fairseq-preprocess ----------------------------------------------------------------------------------------------


def preprocess(destination: Path, workers: int, flags: Sequence[str]) -> None:
    """fairseq-preprocess into `destination`, which need not be there. Its log stays in destination/preprocess.log."""
    program = shutil.which("fairseq-preprocess")
    if program is None:
        fail("fairseq-preprocess is not on the PATH: run scripts/setup.sh, or activate an environment that has fairseq")
    note(f"fairseq-preprocess writes {destination.name.removesuffix('.unfinished')}, {workers} processes")
    command = [program, *map(str, flags), "--destdir", str(destination), "--workers", str(workers)]
    # In a session of its own, Ctrl-C is left to this process. It keeps the lock even if this process is killed.
    process = subprocess.Popen(command, start_new_session=True, pass_fds=tuple(_locks))
    try:
        status = process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own processes too; what they write is removed
        process.wait()
        raise
    if status != 0:
        fail(f"fairseq-preprocess ended with status {status}; its own words stand above")
