"""Say which files a program has read, so that a file of results tells its data and its model."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def fingerprint(path: Path, files: Iterable[Path] | None = None) -> dict[str, Any]:
    """Return the name of a file or of a folder, and the SHA-256 of each of its files by name.

    Args:
        path: whose last name is kept; the folders above it are of one machine alone
        files: those that were read; by default the file itself, or all files of the folder
    """
    if files is None:
        files = [path]
        if path.is_dir():
            files = sorted(each for each in path.iterdir() if each.is_file())
    sums = {}
    for file in files:
        with file.open("rb") as content:
            sums[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return {"name": path.resolve().name, "sha256": sums}
