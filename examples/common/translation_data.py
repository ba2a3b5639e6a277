"""Make the folder that train.sh and evaluate.sh of a translation recipe read.

It has the files of fairseq-preprocess, the references for BLEU as reference/{valid,test}.{raw,tokens}.en, and the flags
of prepare.sh as settings.json.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.archives import complete, fail, note
from common.parallel_text import SOURCE, SPLITS, TARGET, write_lines
from common.prepare import mark_unchecked, preprocess


def is_ready(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return True if an earlier run made `folder` with the same flags; end the program if with others."""
    if not folder.is_dir():
        return False
    record = folder / "settings.json"
    if not record.exists():
        fail(f"{folder}: is not made by prepare.sh; remove it, or name another folder as DATA")
    try:
        made = dict(json.loads(record.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError):
        fail(f"{record}: is not made by prepare.sh; remove {folder}, or name another folder as DATA")
    for flag, value in settings.items():
        if made.get(flag) != value:
            fail(f"{flag} {value}: {folder} was made with {made.get(flag)}; remove it, or name another folder as DATA")
    note(f"{folder} is ready")
    return True


def binarise(
    folder: Path,
    cut: Mapping[str, Sequence[str]],
    references: Mapping[str, Sequence[str]],
    settings: Mapping[str, Any],
    workers: int,
    flags: Sequence[str] = (),
    checked: bool = True,
) -> None:
    """Make the folder; it appears when it is complete.

    Args:
        folder: the new folder
        cut: text in subwords by "train.de", ...
        references: target sentences by "test.raw", ...
        settings: flags of prepare.sh and their values
        workers: processes of fairseq-preprocess
        flags: of fairseq-preprocess
        checked: the counts of the text were checked
    """
    with complete(folder) as unfinished:
        text = unfinished / "text"
        for name, lines in cut.items():
            write_lines(text / name, lines)
        for name, lines in references.items():
            write_lines(unfinished / "reference" / f"{name}.{TARGET}", lines)
        prefixes = [part for split in SPLITS for part in (f"--{split}pref", str(text / split))]
        preprocess(unfinished, workers, ["--source-lang", SOURCE, "--target-lang", TARGET, *prefixes, *flags])
        shutil.rmtree(text)
        (unfinished / "settings.json").write_text(json.dumps(settings, indent=2) + "\n")
        if not checked:
            mark_unchecked(unfinished)
    note(f"{folder} is ready")
