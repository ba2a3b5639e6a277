"""Write files and folders whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or folder to write.

    It is renamed to `path` if the block succeeds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    remove(unfinished)
    try:
        yield unfinished
        if unfinished.is_dir():
            remove(path)  # a folder does not replace another
        os.replace(unfinished, path)
    finally:
        remove(unfinished)
