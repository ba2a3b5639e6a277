"""Checkpoint files that are whole or not there, and which of them a training can go on from."""

import errno
import glob
import logging
import os
import shutil
import time
from contextlib import suppress
from typing import IO, Any, Callable, NamedTuple, Optional

import torch
from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError

logger = logging.getLogger(__name__)

# What may be over in a moment, on a network's file system. A full disk or a folder that is gone is not.
PASSING = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT}
ATTEMPTS, PAUSE = 3, 2.5  # seconds; fairseq's


class Saved(NamedTuple):
    """A checkpoint that loads and that a training can go on from."""

    path: str
    updates: int


def save(state: Any, path: str) -> None:
    """`torch.save`, but a file of that name is whole at every moment: as before, or as it shall be.

    Raises:
        OptionError: the file cannot be written; one line that names the newest checkpoint beside it
    """
    _replace(path, lambda file: torch.save(state, file))


def copy(source: str, path: str) -> None:
    """Copy a checkpoint, as `save` writes one."""

    with open(source, "rb") as whole:

        def write(file: IO[bytes]) -> None:
            whole.seek(0)
            shutil.copyfileobj(whole, file, 1 << 20)

        _replace(path, write)


def _replace(path: str, write: Callable[[IO[bytes]], None]) -> None:
    path = os.path.realpath(path)  # of a link, as fairseq writes through it
    part = f"{path}.tmp"  # what a killed process leaves behind is overwritten by the next
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with open(part, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            break
        except BaseException as error:
            with suppress(OSError):
                os.remove(part)
            cause = _system_error(error)
            if cause is None:
                raise
            if cause.errno not in PASSING or attempt == ATTEMPTS:
                raise OptionError(f"checkpoint {path}: cannot be written: {cause.strerror}{advice(path)}") from error
            logger.warning(f"checkpoint {path}: {cause.strerror}; one more attempt in {PAUSE} seconds")
            time.sleep(PAUSE)
    _sync_folder(os.path.dirname(path) or ".")


def _system_error(error: Optional[BaseException]) -> Optional[OSError]:
    """torch.save covers what the system says with an error of its own."""
    while isinstance(error, Exception) and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, OSError) else None


def _sync_folder(folder: str) -> None:
    with suppress(OSError):  # some file systems have no such thing
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_folder(folder: str) -> None:
    """Refuse a --save-dir that nothing can be written to; it is made if it is not there.

    Raises:
        OptionError: one line
    """
    trial = os.path.join(folder, f".writable.{os.getpid()}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(trial, "w") as file:
            file.write("a full disk has room for empty files\n")
        os.remove(trial)
    except OSError as error:
        with suppress(OSError):
            os.remove(trial)
        raise OptionError(f"--save-dir {folder}: cannot be written to: {error.strerror}") from error


def newest(folder: str, apart_from: str = "") -> Optional[Saved]:
    """The checkpoint of a folder that was written last, of those that load and have the state of a training."""
    paths = [path for path in glob.glob(os.path.join(glob.escape(folder), "checkpoint*.pt")) if path != apart_from]
    with suppress(OSError):
        paths.sort(key=os.path.getmtime, reverse=True)
    found = (_look_into(path) for path in paths)
    return next((saved for saved in found if saved is not None), None)


def _look_into(path: str) -> Optional[Saved]:
    try:
        state = checkpoint_utils.load_checkpoint_to_cpu(path)
        return Saved(path, int(state["optimizer_history"][-1]["num_updates"])) if state["extra_state"] else None
    except Exception:  # of many kinds, for what is no checkpoint
        return None


def advice(path: str) -> str:
    """What can be gone on from beside `path`, to be put behind an error."""
    saved = newest(os.path.dirname(path))
    if saved is None:
        return "; no checkpoint is there to go on from"
    return f"; {saved.path}, of update {saved.updates}, is whole"


def warn_of_a_new_start(path: str) -> None:
    """Say so if a training finds no checkpoint at `path`, where it looks for its own, and others beside it.

    Raises:
        OptionError: `path` is a link to nothing
    """
    if os.path.isfile(path):
        return
    if os.path.islink(path):
        raise OptionError(f"{path}: a link to nothing; must be a checkpoint, or not there")
    saved = newest(os.path.dirname(path))
    if saved is not None:
        logger.warning(
            f"no {path}: training begins from nothing, though {saved.path}, of update {saved.updates}, is there; "
            f"--restore-file {saved.path} goes on from it"
        )


def name_another(path: str, error: OptionError) -> OptionError:
    """`error`, of a checkpoint that does not load, with the one to go on from instead."""
    saved = newest(os.path.dirname(path), apart_from=path)
    advice = "no other checkpoint is beside it"
    if saved is not None:
        advice = f"--restore-file {saved.path} goes on from update {saved.updates}"
    return OptionError(f"{error}; {advice}")
