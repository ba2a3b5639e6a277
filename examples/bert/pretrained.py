"""Fetch, convert or copy the pre-trained model for GLUE and SQuAD to $DATA/<model>/model."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import copyfile
from typing import Optional

from common.archives import Archive, obtain, sha256, unpack
from common.files import written_whole
from common.messages import fail, note
from common.prepare import is_ready, require_files, write_settings

# beside dict.txt and model.pt
FILES = {"bert": ("vocab.txt",), "roberta": ("encoder.json", "vocab.bpe")}

HUGGING_FACE = "https://huggingface.co/google-bert/bert-base-uncased/resolve/main"
BERT_FILES = ("config.json", "model.safetensors", "vocab.txt")
FAIRSEQ = "https://dl.fbaipublicfiles.com/fairseq"
ROBERTA = Archive("roberta.base.tar.gz", (f"{FAIRSEQ}/models/roberta.base.tar.gz",))
PUBLISHED = "the published base model"


def prepare_model(model: str, source: Optional[Path], data: Path) -> Path:
    """Make $DATA/<model>/model with model.pt, dict.txt and the vocabulary, unless it exists."""
    folder = data / model / "model"
    names = ("model.pt", "dict.txt", *FILES[model])
    if source is not None and not source.is_dir():
        fail(f"--from {source}: no such folder")
    # Without --from an existing model of any source is used.
    settings = {} if source is None else {"from": str(source), "sha256": _sums(source, model)}
    if is_ready(folder, settings, names, any_counts=True):
        return folder
    if source is None and model == "bert":
        source = _fetch_bert(data)
    with written_whole(folder) as unfinished:
        unfinished.mkdir()
        if source is None:
            _fetch_roberta(unfinished, data)
        elif model == "bert" and _is_of_transformers(source):
            _convert(source, unfinished)
        else:
            _copy(source, unfinished, names)
        require_files(unfinished, names)
        write_settings(unfinished, settings or {"from": PUBLISHED}, any_counts=False)
    note(f"{folder} has the model")
    return folder


def _sums(source: Path, model: str) -> dict[str, str]:
    names = {"model.pt", "dict.txt", *FILES[model], *BERT_FILES, "pytorch_model.bin"}
    return {name: sha256(source / name) for name in sorted(names) if (source / name).is_file()}


def _is_of_transformers(source: Path) -> bool:
    return (source / "config.json").is_file() and not (source / "model.pt").is_file()


def _copy(source: Path, folder: Path, names: Sequence[str]) -> None:
    """Copy the files of a model of fairseq."""
    missing = [name for name in names if not (source / name).is_file()]
    if missing:
        fail(f"--from {source}: has no {', '.join(missing)}")
    for name in names:
        copyfile(source / name, folder / name)


def _fetch_bert(data: Path) -> Path:
    """Return the folder with the files of the published BERT."""
    files = []
    for name in BERT_FILES:
        archive = Archive(f"bert-base-uncased/{name}", (f"{HUGGING_FACE}/{name}",))
        files.append(obtain(archive, data))
    return files[0].parent


def _fetch_roberta(folder: Path, data: Path) -> None:
    """Unpack dict.txt and model.pt; the pieces of GPT-2 are files of their own."""
    wanted = {"roberta.base/model.pt", "roberta.base/dict.txt"}
    unpack(obtain(ROBERTA, data), folder, lambda name: name in wanted)
    for path in (folder / "roberta.base").glob("*"):
        path.rename(folder / path.name)
    (folder / "roberta.base").rmdir()
    for name in FILES["roberta"]:
        copyfile(obtain(Archive(name, (f"{FAIRSEQ}/gpt2_bpe/{name}",)), data), folder / name)


def _convert(source: Path, folder: Path) -> None:
    """Convert a BERT of Hugging Face."""
    program = Path(__file__).with_name("convert_bert.py")
    command = [sys.executable, str(program), "to-fairseq", str(source), str(folder)]
    if subprocess.run(command, check=False).returncode:
        fail(f"--from {source}: {program} cannot read it; its messages are above")


def check_case(folder: Optional[Path], cased: bool) -> None:
    """End the program if the vocab.txt of `folder` does not agree with --cased or its absence.

    An uncased vocabulary has hardly a piece with an upper-case letter. With the wrong flag most
    words would become other pieces or unknown ones.
    """
    path = folder / "vocab.txt" if folder is not None else None
    if path is None or not path.is_file():
        return
    pieces = path.read_text(encoding="utf-8", errors="replace").split("\n")
    # [CLS], [unused7]
    words = [piece for piece in pieces if not (piece.startswith("[") and piece.endswith("]"))]
    upper = [piece for piece in words if piece != piece.lower()]
    is_cased = 100 * len(upper) > len(pieces)
    if cased and not is_cased:
        fail(f"{path}: has no pieces with upper-case letters; leave out --cased")
    if is_cased and not cased:
        fail(
            f"{path}: has {len(upper)} pieces with an upper-case letter, such as {upper[0]!r}; "
            "give --cased"
        )
