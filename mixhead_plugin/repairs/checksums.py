"""Compare each record of a checkpoint with its checksum, and name the one that has changed.

The zip format holds a checksum (CRC-32) of each record, which torch writes and never reads. Where a disk or a copy has
changed a byte, another weight is loaded and nobody notices.
"""

import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.repairs.replace import replaces


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def _load(original, path: str, *args, **kwargs) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as beside:  # zlib and torch both compute without Python's lock
        checking = beside.submit(check_records, path)
        try:
            return original(path, *args, **kwargs)
        finally:
            checking.result()


def check_records(path: str | os.PathLike[str]) -> None:
    """Refuse a zip file with a record that differs from its checksum; pass files of other formats."""
    try:
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
    except (zipfile.BadZipFile, ValueError, OSError):  # missing, cut, or of torch before 1.6: torch finds that
        return
    content = np.memmap(path, mode="r")
    for record in records:
        head = record.header_offset + 26  # two lengths, then the name and the extra field
        begin = head + 4 + sum(int.from_bytes(content[at : at + 2], "little") for at in (head, head + 2))
        # torch writes 0 if its checksums are switched off.
        if record.CRC and zlib.crc32(content[begin : begin + record.file_size]) != record.CRC:
            raise OptionError(
                f"{path}: is damaged, its record {record.filename} has changed since it was written; take another "
                "checkpoint"
            )
