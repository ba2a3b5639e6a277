"""A pre-trained model as the recipes of fine-tuning want it: fetched, converted or copied into $DATA/<model>/model."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from shutil import copyfile
from typing import Optional

from common.archives import Archive, complete, fail, note, obtain, sha256, unpack
from common.prepare import require_files

ROOT = Path(__file__).resolve().parents[2]
ORIGIN = "origin.txt"  # the folder that the model is of, and the sums of its files
WORDPIECE, GPT2 = ("vocab.txt",), ("encoder.json", "vocab.bpe")
FILES = {"bert": WORDPIECE, "roberta": GPT2}  # beside dict.txt and model.pt

HUGGING_FACE = "https://huggingface.co/google-bert/bert-base-uncased/resolve/main"
BERT_FILES = ("config.json", "model.safetensors", "vocab.txt")
FAIRSEQ = "https://dl.fbaipublicfiles.com/fairseq"
ROBERTA = Archive("roberta.base.tar.gz", (f"{FAIRSEQ}/models/roberta.base.tar.gz",))
GPT2_FILES = tuple(Archive(name, (f"{FAIRSEQ}/gpt2_bpe/{name}",)) for name in FILES["roberta"])


def prepare_model(model: str, source: Optional[Path], data: Path) -> Path:
    """$DATA/<model>/model with model.pt, dict.txt and the vocabulary; made unless it is there."""
    folder = data / model / "model"
    names = ("model.pt", "dict.txt", *FILES[model])
    origin = str(source or "the published base model")
    if source is not None and not source.is_dir():
        fail(f"--from {source}: no such folder")
    if folder.exists():
        require_files(folder, [*names, ORIGIN])
        made, _, sums = (folder / ORIGIN).read_text(encoding="utf-8").partition("\n")
        instead = f"remove {folder.parent}, or choose another folder as DATA"
        if source is not None and made != origin:
            fail(f"--from {source}: {folder} is of {made}; {instead}")
        if source is not None and sums != _sums(source):
            fail(f"--from {source}: has changed since {folder} was made of it; {instead}")
        return folder
    sums = "" if source is None else _sums(source)
    if source is None and model == "bert":
        source = _fetched_bert(data)
    with complete(folder) as unfinished:
        unfinished.mkdir()
        if source is None:
            _fetch_roberta(unfinished, data)
        elif (source / "config.json").is_file() and not (source / "model.pt").is_file():
            _convert(model, source, unfinished)
        else:
            _copy(source, names, unfinished)
        require_files(unfinished, names)
        (unfinished / ORIGIN).write_text(f"{origin}\n{sums}", encoding="utf-8")
    note(f"{folder} has the model")
    return folder


def _sums(source: Path) -> str:
    """A line for each file of a folder that a model is made of: its sha256 and its name."""
    names = {"model.pt", "dict.txt", *BERT_FILES, "pytorch_model.bin", *GPT2}
    return "".join(f"{sha256(source / name)} {name}\n" for name in sorted(names) if (source / name).is_file())


def _fetched_bert(data: Path) -> Path:
    paths = [obtain(Archive(f"bert-base-uncased/{name}", (f"{HUGGING_FACE}/{name}",)), data) for name in BERT_FILES]
    return paths[0].parent


def _fetch_roberta(folder: Path, data: Path) -> None:
    """Its archive has dict.txt and model.pt; the pieces are GPT-2's, in files of their own."""
    wanted = {"roberta.base/model.pt", "roberta.base/dict.txt"}
    unpack(obtain(ROBERTA, data), folder, wanted.__contains__)
    for path in (folder / "roberta.base").glob("*"):
        path.rename(folder / path.name)
    (folder / "roberta.base").rmdir()
    for file in GPT2_FILES:
        copyfile(obtain(file, data), folder / file.file)


def _copy(source: Path, names: Iterable[str], folder: Path) -> None:
    if missing := [name for name in names if not (source / name).is_file()]:
        fail(f"--from {source}: has no {', '.join(missing)}")
    for name in names:
        copyfile(source / name, folder / name)


def _convert(model: str, source: Path, folder: Path) -> None:
    """From Hugging Face's format."""
    if model != "bert":
        fail(f"--from {source}: only BERT is converted from Hugging Face's format; RoBERTa is fairseq's own")
    if not (source / "vocab.txt").is_file():
        fail(f"--from {source}: has no vocab.txt")
    command = [sys.executable, str(ROOT / "scripts" / "convert_bert.py"), "to-fairseq", str(source), str(folder)]
    if subprocess.run(command, check=False).returncode:
        fail(f"--from {source}: scripts/convert_bert.py cannot read it; its own words stand above")


def check_case(folder: Optional[Path], cased: bool) -> None:
    """End the program if the model of `folder` says otherwise than --cased or its absence.

    Its tokenizer_config.json, where it has one, says so, and so does its vocab.txt: an uncased one has hardly a piece
    with an upper-case letter. Without the flag that fits, most words would become other pieces or unknown ones.
    """
    if folder is None:
        return
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            lower = json.loads(path.read_text(encoding="utf-8")).get("do_lower_case", True)
        except (ValueError, AttributeError, RecursionError) as error:
            fail(f"{path}: {error}")
        if lower == cased:
            fail(f"{path}: do_lower_case is {str(lower).lower()}; {'leave out' if lower else 'give'} --cased")
    path = folder / "vocab.txt"
    if path.is_file():
        from mixhead_plugin.data.wordpiece import read_vocabulary  # takes seconds, for nothing where no file is read

        try:
            pieces = read_vocabulary(path)
        except ValueError as error:
            fail(f"{path}: {error}")
        upper = [piece for piece in pieces if not _reserved(piece) and piece != piece.lower()]
        is_cased = 100 * len(upper) > len(pieces)
        if cased and not is_cased:
            fail(f"{path}: has no pieces with upper-case letters; leave out --cased")
        if not cased and is_cased:
            fail(f"{path}: has {len(upper)} pieces like {upper[0]!r} with an upper-case letter; give --cased")


def _reserved(piece: str) -> bool:
    """[CLS], [unused7], ...: no text."""
    return len(piece) > 2 and piece.startswith("[") and piece.endswith("]")
