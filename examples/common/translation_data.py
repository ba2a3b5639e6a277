"""Make the folder that train.sh and evaluate.sh of a translation recipe read.

It has the files of fairseq-preprocess, the references for BLEU as
reference/{valid,test}.{raw,tokens}.en, and the flags of prepare.sh as settings.json.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.archives import note
from common.files import written_whole
from common.parallel_text import SOURCE, SPLITS, TARGET, write_lines
from common.prepare import preprocess, write_settings


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
        flags: further flags of fairseq-preprocess
        checked: whether the counts of the text were checked
    """
    with written_whole(folder) as unfinished:
        text = unfinished / "text"
        for name, lines in cut.items():
            write_lines(text / name, lines)
        for name, lines in references.items():
            write_lines(unfinished / "reference" / f"{name}.{TARGET}", lines)
        own = [f"--source-lang={SOURCE}", f"--target-lang={TARGET}"]
        own += [f"--{split}pref={text / split}" for split in SPLITS]
        preprocess(unfinished, workers, [*own, *flags])
        shutil.rmtree(text)
        write_settings(unfinished, settings, any_counts=not checked)
    note(f"{folder} is ready")
