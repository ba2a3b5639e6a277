"""Compare each record of a checkpoint with its checksum, and name the one that has changed.

The zip format holds a checksum (CRC-32) of each record, which torch writes and never reads. Where a disk or a copy has
changed a byte, another weight is loaded and nobody notices.
"""

import mmap
import os
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fairseq import checkpoint_utils

from mixhead_plugin.errors import OptionError
from mixhead_plugin.repairs.replace import replaces


@replaces(checkpoint_utils, "load_checkpoint_to_cpu")
def _load(original, path: str, *args, **kwargs) -> dict[str, Any]:
    if not os.path.isfile(path) or os.path.getsize(path) == 0:
        return original(path, *args, **kwargs)
    with ThreadPoolExecutor(1) as beside:  # zlib and torch both compute without Python's lock
        searching = beside.submit(changed_record, path)
        try:
            return original(path, *args, **kwargs)
        finally:
            if (name := searching.result()) is not None:
                raise OptionError(
                    f"{path}: is damaged, its record {name} has changed since it was written; take another checkpoint"
                )


def changed_record(path: str) -> str | None:
    """Return the name of the first record of a zip file that differs from its checksum, or None."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            records = zipfile.ZipFile(file).infolist()
        except (zipfile.BadZipFile, ValueError, OSError):  # of torch before 1.6, or cut: torch finds that
            return None
        with memoryview(content) as view:
            for record in records:
                head = record.header_offset + 26  # two lengths, then the name and the extra field
                begin = head + 4 + sum(int.from_bytes(view[at : at + 2], "little") for at in (head, head + 2))
                if zlib.crc32(view[begin : begin + record.file_size]) != record.CRC:
                    return record.filename
    return None
