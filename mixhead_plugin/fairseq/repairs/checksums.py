"""Compare each record of a checkpoint with its checksum, and name the one that has changed.

torch writes a checksum (CRC-32) of each record and never reads it. If a disk or a copy changes a
byte, another weight is loaded unnoticed.
"""

import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.replace import replaces

STEP = 1 << 22  # bytes; each step needs Python's lock, for which torch waits


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def _load(original, path: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    # Beside the loading: zlib and torch both compute without Python's lock.
    with ThreadPoolExecutor(1) as beside:
        checking = beside.submit(check_records, path)
        try:
            return original(path, *args, **kwargs)
        finally:
            # A damaged record says more than torch's error about it, so it comes first.
            checking.result()


def check_records(path: str | os.PathLike[str]) -> None:
    """Refuse a zip file with a record that differs from its checksum; pass other formats.

    Raises:
        OptionError: with the name of the record
    """
    try:
        file = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, ValueError, OSError):
        return  # missing, cut, or of torch before 1.6: torch finds that
    with file:
        for record in file.infolist():
            try:
                if record.CRC:  # torch writes 0 if its checksums are switched off
                    _read(file, record)
            except Exception as error:  # a head that has changed gives many kinds of them
                raise OptionError(
                    f"{path}: is damaged, its record {record.filename} has changed since it was "
                    "written; take another checkpoint"
                ) from error


def _read(file: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record to its end, where `zipfile` compares the checksum."""
    with file.open(record) as content:
        while content.read(STEP):
            pass
