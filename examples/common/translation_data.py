"""Make the folder that train.sh and evaluate.sh of a translation recipe read.

It has the files of fairseq-preprocess and the references for BLEU, which are
reference/{valid,test}.{raw,tokens}.en. Its settings.json has the flags of prepare.sh and the
checksum of the text.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.files import written_whole
from common.fingerprint import fingerprint
from common.messages import fail, note
from common.parallel_text import LANGUAGES, SOURCE, SPLITS, TARGET, write_lines
from common.prepare import SETTINGS, preprocess, read_settings, write_settings

TEXT = "text"  # in settings.json: the checksum of the text that a folder was made from


def checksum(text: Path) -> str:
    """Return 12 digits of the SHA-256 of a text: the files of each language, and their names."""
    files: list[Path] = []
    for language in LANGUAGES:
        files += text.glob(f"*.{language}")
    sums = fingerprint(text, files)["sha256"]
    whole = "".join(f"{name} {sums[name]}\n" for name in sorted(sums))
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def refuse_unknown_text(data: Path) -> None:
    """End the program if a folder of DATA does not record its text, as those of older versions.

    Before another text is made, because then nothing would tell that the two do not fit.
    """
    for file in sorted(data.glob(f"*/{SETTINGS}")):
        folder = file.parent
        if TEXT not in read_settings(folder):
            fail(
                f"{folder}: an older version made it from a text that is gone; remove it, or "
                "choose another DATA"
            )


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
        settings: flags of prepare.sh and their values, and the checksum of the text
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
