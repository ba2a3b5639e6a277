"""Write fairseq's binary sets, and the settings that made a folder of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.archives import fail, note
from common.prepare import mark_unchecked, refuse_unchecked, require_files

SETTINGS = "settings.json"


def is_ready(folder: Path, settings: Mapping[str, Any], files: Iterable[str], any_counts: bool) -> bool:
    """Return True if the folder exists; end the program if it lacks one of `files` or has other settings."""
    if not folder.exists():
        return False
    refuse_unchecked([folder], any_counts)
    require_files(folder, [SETTINGS, *files])
    try:
        made = dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["settings"])
    except (ValueError, LookupError, TypeError, RecursionError):
        fail(f"{folder / SETTINGS}: is not made by prepare.sh; remove {folder} to have it made again")
    for name, value in settings.items():
        if made.get(name) != value:
            fail(f"{folder}: made with {name} {made.get(name)}, not {value}; remove it, or choose another DATA")
    note(f"{folder} is there already")
    return True


def write_settings(folder: Path, settings: Mapping[str, Any], any_counts: bool, **more: Any) -> None:
    content = json.dumps({"settings": dict(settings), **more}, indent=2)
    (folder / SETTINGS).write_text(f"{content}\n", encoding="utf-8")
    if any_counts:
        mark_unchecked(folder)


class BinarySet:
    """Writes a memory-mapped set of fairseq, as fairseq-preprocess does.

    Args:
        prefix: its path without .bin and .idx
        symbols: the size of its dictionary
    """

    def __init__(self, prefix: Path, symbols: int):
        from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder, best_fitting_int_dtype  # takes seconds

        self.prefix = prefix
        self.builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", best_fitting_int_dtype(symbols))

    def add(self, numbers: Sequence[int]) -> None:
        import torch

        self.builder.add_item(torch.tensor(numbers))

    def close(self) -> None:
        self.builder.finalize(f"{self.prefix}.idx")
