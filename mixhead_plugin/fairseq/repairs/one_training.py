"""Lock --save-dir while a training runs; refuse a second one in a line that names the first.

Two trainings in one --save-dir, such as a requeued one and the orphan of the first, overwrite each
other's checkpoints: the better model is lost.
"""

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from typing import IO

from fairseq import checkpoint_utils
from fairseq.distributed import utils
from fairseq.trainer import Trainer

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import replaces

logger = logging.getLogger(__name__)

LOCK_FILE = ".mixhead.lock"  # this file stays: removing it could let two trainings in
# Seconds to wait for a lock. The workers of a killed training need some to end, and after SLURM has
# restarted a job, NFS frees the locks of the dead machine late.
WAIT = 120.0 if os.environ.get("SLURM_RESTART_COUNT") else 10.0
# The open files, by path. The system drops a lock when its process ends, however it ends.
_held: dict[str, IO[str]] = {}


# Only a training calls this, before it reads and writes checkpoints.
@replaces(checkpoint_utils, "load_checkpoint")
def _load(original, cfg, trainer, **kwargs):
    saves = isinstance(trainer, Trainer) and not cfg.no_save
    if saves and utils.is_master(trainer.cfg.distributed_training):  # the worker that writes
        lock(cfg.save_dir)
    return original(cfg, trainer, **kwargs)


def lock(folder: str) -> None:
    """Lock a folder until this process ends.

    Where files cannot be locked, a warning says so.

    Raises:
        OptionError: another process keeps the folder locked for WAIT seconds
    """
    path = os.path.join(os.path.realpath(folder), LOCK_FILE)
    deadline = time.monotonic() + WAIT
    if path in _held:
        return
    try:
        file = open(path, "a+", errors="replace")  # noqa: SIM115 (open as long as the process)
        with suppress(OSError):
            os.chmod(path, 0o666)  # others who may write into the folder may train in it later
        while not _try_to_lock(file):
            if time.monotonic() > deadline:
                file.seek(0)
                raise OptionError(
                    f"--save-dir {folder}: {file.read()} trains in it; must be another folder"
                )
            time.sleep(0.2)
        _held[path] = file
        file.truncate(0)  # the name of an earlier process
        print(f"process {os.getpid()} on {socket.gethostname()}", end="", file=file, flush=True)
    except OSError as error:  # a file of another user, or a file system without locks
        logger.warning(
            f"--save-dir {folder}: cannot be locked ({error.strerror}); train only once in it"
        )


def _try_to_lock(file: IO[str]) -> bool:
    """Lock a file if no other process has locked it; return whether this process has it now."""
    try:
        # Not flock: children would keep that lock, and not every NFS passes it on to other
        # machines.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True
