"""Write each checkpoint under a temporary name, and rename it when it is on the disk.

fairseq copies a checkpoint onto checkpoint_best.pt and checkpoint_last.pt: a kill leaves a partial
file. It renames other checkpoints before they are on the disk. If writing fails, it appends the
next attempt to the same file.
"""

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import replaces

logger = logging.getLogger(__name__)

# Errors of a network file system that may soon pass, unlike a full disk.
PASSING = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT}
# As fairseq: how often it tries, and the seconds between two attempts.
ATTEMPTS = 3
PAUSE = 2.5


class NotCopied(OptionError):
    """A checkpoint was written, but its copy could not be."""

    # `whole` has a default, because torch builds the errors of its workers from the message alone.
    def __init__(self, message: str, whole: str = ""):
        super().__init__(message)
        self.whole = whole  # the path of the checkpoint


@replaces(checkpoint_utils, "torch_persistent_save")
def _save(original, obj: Any, filename: str, async_write: bool = False) -> None:
    if async_write or not PathManager.supports_rename(filename):
        original(obj, filename, async_write=async_write)
    else:
        write_whole(filename, lambda file: torch.save(obj, file))


@replaces(PathManager, "copy")
def _copy(original, src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    for path in (src_path, dst_path):
        if PathManager.path_requires_pathmanager(path):  # not a file of this machine
            return original(src_path, dst_path, overwrite)

    def copy(file: IO[bytes]) -> None:
        with open(src_path, "rb") as whole:
            shutil.copyfileobj(whole, file, 1 << 20)

    try:
        write_whole(dst_path, copy)
    except OptionError as error:
        raise NotCopied(str(error), src_path) from error
    return dst_path


@replaces(checkpoint_utils, "save_checkpoint")
def _save_under_all_names(
    original, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None
) -> Any:
    try:
        return original(cfg, trainer, epoch_itr, val_loss)
    except NotCopied as error:
        # fairseq writes a file once, and copies it to the other names, such as that of the last
        # checkpoint. The disk is full after the first one was written: keep it under the name that
        # the next training looks for. A link needs no room, and never replaces a file.
        last = os.path.join(cfg.save_dir, f"checkpoint_last{trainer.checkpoint_suffix}.pt")
        with suppress(OSError):
            os.link(error.whole, last)
        raise OptionError(str(error)) from error


def write_whole(path: str, write: Callable[[IO[bytes]], None]) -> None:
    """Write a file under a temporary name, and rename it when it is on the disk.

    Args:
        path: the path of the file; a link is followed, and the file behind it is replaced
        write: writes the content; it is called again if an error may have passed

    Raises:
        OptionError: the system does not let us write; there is no temporary file then
    """
    path = os.path.realpath(path)
    part = f"{path}.tmp"  # a killed process leaves this file; the next one overwrites it
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _write_and_rename(part, path, write)
            return
        except BaseException as error:  # a kill by Ctrl-C, too, must not leave a part
            with suppress(OSError):
                os.remove(part)
            cause = _system_error(error)
            if cause is None:
                raise
            if cause.errno not in PASSING or attempt == ATTEMPTS:
                raise OptionError(
                    f"checkpoint {path}: cannot be written: {cause.strerror}"
                ) from error
            logger.warning(f"checkpoint {path}: {cause.strerror}; next attempt in {PAUSE} seconds")
            time.sleep(PAUSE)


def _write_and_rename(part: str, path: str, write: Callable[[IO[bytes]], None]) -> None:
    with open(part, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)

    # The folder holds the new name; some file systems cannot sync folders.
    with suppress(OSError):
        folder = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the OSError behind `error`, or None; torch.save raises an error of its own for it."""
    while isinstance(error, Exception) and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, OSError) else None
