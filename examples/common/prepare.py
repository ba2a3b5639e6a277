"""Flags, folders and the call of fairseq-preprocess, which the prepare.py of all recipes share."""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from common.cores import CORES
from common.messages import fail, note

# ---- start and end ------------------------------------------------------------------------------

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal of ENDINGS has arrived.

    As after Ctrl-C, unfinished files are removed on the way out.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.signal = signal.Signals(number)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    for other in ENDINGS:  # during the clean-up only a second Ctrl-C ends the program
        signal.signal(other, signal.SIG_DFL if other == signal.SIGINT else signal.SIG_IGN)
    raise Interrupted(number)


def start(main: Callable[..., Any], *arguments: Any) -> NoReturn:
    """Run `main` as the program.

    After a signal it prints one line and exits with 128 + the signal's number.
    """
    for number in ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _interrupt)
    try:
        sys.exit(main(*arguments))
    except Interrupted as interruption:
        note(f"interrupted by {interruption.signal.name}; run again to go on")
        sys.exit(128 + interruption.signal)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let signals end the process at once, without clean-up.

    Python cannot handle them during a long call of C++.
    """
    before = {number: signal.getsignal(number) for number in ENDINGS}
    ours = [number for number, handler in before.items() if handler == _interrupt]
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])


# ---- folders -----------------------------------------------------------------------------------

LOCK = "prepare.lock"  # in DATA; it stays, and the system drops the lock when its processes end
_locks: set[int] = set()  # descriptors of locked files

SETTINGS = "settings.json"  # in every folder that depends on flags of prepare.sh
UNCHECKED = "counts-not-checked"  # an empty file in every folder that was made with --any-counts


@contextmanager
def data_folder() -> Iterator[Path]:
    """Create the folder DATA of the environment, lock it, and yield it."""
    folder = Path(os.environ["DATA"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        fail(f"DATA={folder}: {error.strerror}")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            fail(
                f"DATA={folder}: another prepare.sh uses it (process {file.read().strip()} or one "
                "that it started)"
            )
        file.truncate(0)
        print(os.getpid(), file=file, flush=True)
        _locks.add(file.fileno())
        try:
            yield folder
        finally:
            _locks.discard(file.fileno())


def mark_unchecked(folder: Path) -> None:
    """Record that the counts of the text in `folder`, or of its source, were not checked."""
    (folder / UNCHECKED).touch()


def refuse_unchecked(folders: Iterable[Path], any_counts: bool) -> None:
    """End the program if one of the folders was made with --any-counts.

    It goes on if this run has the flag, too.
    """
    for folder in folders:
        if (folder / UNCHECKED).exists() and not any_counts:
            fail(
                f"{folder}: made with --any-counts, so its counts are unchecked; give "
                "--any-counts, or remove it"
            )


def require_files(folder: Path, names: Iterable[str]) -> None:
    """End the program unless `folder` has these files."""
    for name in names:
        if not (folder / name).is_file():
            fail(f"{folder}: {name} is missing; remove the folder to have it made again")


def is_ready(
    folder: Path,
    settings: Mapping[str, Any],
    files: Iterable[str],
    any_counts: bool,
    sources: Mapping[str, str] | None = None,
) -> bool:
    """Return True if the folder exists.

    The program ends if it lacks one of `files`, or has other settings or sources.

    Args:
        folder: the folder that prepare.sh makes
        settings: flags of prepare.sh and their values
        files: names of files that the folder must have
        any_counts: whether this run has --any-counts
        sources: checksums of what the folder is made from, by name; None if there are none. An
            older version did not record them, and its folders are taken as they are.
    """
    if not folder.exists():
        return False
    refuse_unchecked([folder], any_counts)
    require_files(folder, [SETTINGS, *files])
    made = read_settings(folder)
    refuse_other_settings(folder, made, settings)
    known = {name: value for name, value in (sources or {}).items() if name in made}
    refuse_other_settings(folder, made, known)
    note(f"{folder} is there already")
    return True


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what `write_settings` has written into a folder."""
    try:
        content = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        return dict(content.get("settings", content))
    except (ValueError, AttributeError, TypeError):
        fail(
            f"{folder / SETTINGS}: is not made by prepare.sh; remove {folder} to have it made again"
        )


def refuse_other_settings(
    folder: Path, made: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """End the program if a folder was made with other settings."""
    for name, value in settings.items():
        if made.get(name) != value:
            fail(
                f"{folder}: made with {name} {made.get(name)}, not {value}; remove it, or choose "
                "another DATA"
            )


def write_settings(
    folder: Path, settings: Mapping[str, Any], any_counts: bool, **more: Any
) -> None:
    content = json.dumps({"settings": dict(settings), **more}, indent=2)
    (folder / SETTINGS).write_text(f"{content}\n", encoding="utf-8")
    if any_counts:
        mark_unchecked(folder)


# ---- flags -------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """A command line that, with DRY_RUN=1, prints its settings and ends the program."""

    def parse_args(self, *arguments: Any, **settings: Any) -> Any:
        args = super().parse_args(*arguments, **settings)
        if os.environ.get("DRY_RUN"):
            print(" ".join(f"{name}={value}" for name, value in vars(args).items()))
            sys.exit()
        return args


def parser(description: str) -> Parser:
    """Return the command line of a prepare.sh, with the flags that all recipes share."""
    arguments = Parser(prog="prepare.sh", description=description)
    arguments.add_argument(
        "--any-counts",
        action="store_true",
        help=(
            "for text of your own in the same layout: print the numbers of lines and tokens "
            "instead of checking them"
        ),
    )
    arguments.add_argument(
        "--workers",
        type=int,
        default=CORES,
        metavar="N",
        help="processes at a time (default: %(default)s)",
    )
    return arguments


# ---- fairseq-preprocess ------------------------------------------------------------------------


def preprocess(destination: Path, workers: int, flags: Sequence[str]) -> None:
    """Run fairseq-preprocess; it creates `destination`, and keeps its log there."""
    program = shutil.which("fairseq-preprocess")
    if program is None:
        fail(
            "fairseq-preprocess is not on the PATH: run scripts/setup.sh, or activate an "
            "environment that has fairseq"
        )
    note(
        f"fairseq-preprocess writes {destination.name.removesuffix('.unfinished')}, {workers} "
        "processes"
    )
    command = [program, *map(str, flags), "--destdir", str(destination), "--workers", str(workers)]
    # In its own session it gets no Ctrl-C; this process kills it. It keeps the lock even if this
    # process is killed.
    process = subprocess.Popen(command, start_new_session=True, pass_fds=tuple(_locks))
    try:
        status = process.wait()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its workers
        process.wait()
        raise
    if status != 0:
        fail(f"fairseq-preprocess ended with status {status}; its messages are above")
