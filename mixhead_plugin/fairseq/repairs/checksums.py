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


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def _load(original, path: str, *args, **kwargs) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as beside:  # zlib and torch both compute without Python's lock
        checking = beside.submit(check_records, path)
        try:
            return original(path, *args, **kwargs)
        finally:
            checking.result()


def check_records(path: str | os.PathLike[str]) -> None:
    """Refuse a zip file with a record that differs from its checksum;
    pass files of other formats.
    """
    try:
        file = zipfile.ZipFile(path)
    except (
        zipfile.BadZipFile,
        ValueError,
        OSError,
    ):  # missing, cut, or of torch before 1.6: torch finds that
        return
    with file:
        for record in file.infolist():
            try:
                if record.CRC:  # torch writes 0 if its checksums are switched off
                    with file.open(record) as content:
                        # in few steps: each needs Python's lock, and torch waits
                        while content.read(1 << 22):
                            pass
            except Exception as error:  # of a head that has changed, there are many
                raise OptionError(
                    f"{path}: is damaged, its record {record.filename} has changed since it was "
                    "written; take another "
                    "checkpoint"
                ) from error
