"""Damaged binarised data and dictionaries: the check refuses each, and every command calls it."""

import re
import shutil
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import (
    BucketPadLengthDataset,
    Dictionary,
    FastaDataset,
    ListDataset,
    MaskTokensDataset,
)
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

from mixhead_plugin.errors import OptionError
from mixhead_plugin.fairseq.repairs.binarized_data import check
from tests.commands import LM_SIZES, PLUGIN, SIZES, TRAINING
from tests.helpers import run_here

LENGTHS = 26  # bytes of an .idx before the lengths of its sentences


def keep(part, suffix, prefix):
    path = prefix.with_name(prefix.name + suffix)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part) if isinstance(part, float) else part])


def write(suffix, content, prefix, at=0, mode="wb"):
    with prefix.with_name(f"{prefix.name}{suffix}").open(mode) as file:
        file.seek(at, 2 if mode == "ab" else 0)
        file.write(content)


def remove(suffix, prefix):
    prefix.with_name(f"{prefix.name}{suffix}").unlink()


def no_sentences(prefix):
    keep(18, ".idx", prefix)
    write(".idx", struct.pack("<Q", 0), prefix, mode="ab")
    write(".bin", b"", prefix)


def swapped(prefix):
    """Take the index of another set."""
    shutil.copy(prefix.with_name("train.idx"), f"{prefix}.idx")


over = partial(write, mode="r+b")


def over_begin(at, prefix):
    lines = struct.unpack_from("<Q", Path(f"{prefix}.idx").read_bytes(), 18)[0]
    over(".idx", struct.pack("<q", at), prefix, at=LENGTHS + 4 * lines + 8)


DAMAGE = {
    "half a .bin": partial(keep, 0.5, ".bin"),
    "a .bin without its last byte": partial(keep, -1, ".bin"),
    "a .bin with a byte more": partial(write, ".bin", b"\0", mode="ab"),
    "an empty .bin": partial(write, ".bin", b""),
    "no .bin": partial(remove, ".bin"),
    "no .idx": partial(remove, ".idx"),
    "an empty .idx": partial(write, ".idx", b""),
    "five bytes of an .idx": partial(keep, 5, ".idx"),
    "twenty bytes of an .idx": partial(keep, 20, ".idx"),
    "half an .idx": partial(keep, 0.5, ".idx"),
    "an .idx with a byte more": partial(write, ".idx", b"\0", mode="ab"),
    "an .idx that is HTML": partial(write, ".idx", b"<html>404</html>" * 10),
    "zeros": partial(write, ".idx", bytes(500)),
    "another magic": partial(over, ".idx", b"MMIDIDY"),
    "a later format": partial(over, ".idx", struct.pack("<Q", 2), at=9),
    "tokens of no type": partial(over, ".idx", b"\x63", at=17),
    "no sentences": no_sentences,
    "10 ** 18 sentences": partial(over, ".idx", struct.pack("<Q", 10**18), at=18),
    "a length below 0": partial(over, ".idx", struct.pack("<i", -5), at=LENGTHS),
    **{f"the second sentence at {at}": partial(over_begin, at) for at in (0, 1, 2**63 - 1, -2)},
    "a length of 2 ** 31": partial(over, ".idx", struct.pack("<i", 2**31 - 1), at=LENGTHS),
    "the .idx of another set": swapped,
    "a token of no dictionary": partial(over, ".bin", b"\xff\xff", at=4),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_check_refuses_damaged_data(kind, text_data, tmp_path):
    data = shutil.copytree(text_data, tmp_path / "text")
    check(str(data / "test"), 30)
    DAMAGE[kind](data / "test")
    with pytest.raises(OptionError, match=f"^{re.escape(str(data))}/test[.]") as error:
        check(str(data / "test"), 30)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_a_token_below_0_is_refused(dtype, tmp_path):
    for tokens in ([[4, 5], [6, 2]], [[4, 5], [-7, 2]]):
        builder = MMapIndexedDatasetBuilder(str(tmp_path / "test.bin"), dtype=dtype)
        for sentence in tokens:
            builder.add_item(torch.tensor(sentence))
        builder.finalize(str(tmp_path / "test.idx"))
        if tokens[1][0] == 6:
            check(str(tmp_path / "test"), 7)
    with pytest.raises(OptionError, match="has the token -7, its dictionary has 7 symbols"):
        check(str(tmp_path / "test"), 7)


def test_the_check_refuses_the_first_token_that_a_dictionary_lacks(text_data):
    largest = int(np.fromfile(text_data / "test.bin", np.uint16).max())
    check(str(text_data / "test"), largest + 1)
    with pytest.raises(
        OptionError, match=f"has the token {largest}, its dictionary has {largest} symbols"
    ):
        check(str(text_data / "test"), largest)


# Commands that read data, the file that each gets, and its damage.
READERS = {
    "train": ("train.de-en.de", "half a .bin"),
    "train a language model": ("train", "a token of no dictionary"),
    "eval-lm": ("test", "no sentences"),
    "generate": ("test.de-en.en", "half an .idx"),
}
USE = ["--user-dir", PLUGIN, "--cpu", "--max-tokens", "400"]
TRAIN = [*TRAINING, *USE, "--max-update", "1"]


@pytest.mark.parametrize(
    "reader",
    [name if "train" in name else pytest.param(name, marks=pytest.mark.slow) for name in READERS],
)
def test_every_command_calls_the_check(reader, translation_data, text_data, request, tmp_path):
    prefix, kind = READERS[reader]
    data = shutil.copytree(translation_data if "de-en" in prefix else text_data, tmp_path / "data")
    DAMAGE[kind](data / prefix)
    if "train" in reader:
        flags = ["--arch", "mixhead_transformer", *SIZES]
        if reader == "train a language model":
            flags = ["--task", "language_modeling", "--arch", "mixhead_transformer_lm", *LM_SIZES]
        words = ["fairseq-train", data, *flags, *TRAIN, "--save-dir", tmp_path / "save"]
    else:
        checkpoint = request.getfixturevalue(
            "translation_checkpoint" if reader == "generate" else "text_checkpoint"
        )
        words = [f"fairseq-{reader}", data, *USE, "--path", checkpoint]
    with pytest.raises(OptionError, match=f"^{re.escape(str(data / prefix))}[.]"):
        run_here(*words)
    assert not list(tmp_path.glob("save/*.pt"))


WRONG_DICTIONARIES = {
    "empty": (b"", "has no symbols; must have a line '<symbol> <count>' for each"),
    "a blank line": (b"hund 5\n\nkatze 1\n", "line 2 is ''; must be '<symbol> <count>'"),
    "no count": (b"hund 5\nkatze\n", "line 2 is 'katze'; must be '<symbol> <count>'"),
    "a word as the count": (b"hund five\n", "line 1 is 'hund'; must be '<symbol> <count>'"),
    "a symbol twice": (
        b"hund 5\nkatze 1\nhund 2\n",
        "line 3 has the symbol 'hund' again; must be left out, or end with #fairseq:overwrite",
    ),
    "Latin-1": (b"h\xfcte 5\n", "is not in UTF-8; must be the file that fairseq-preprocess wrote"),
}


@pytest.mark.parametrize("kind", WRONG_DICTIONARIES)
def test_a_dictionary_that_cannot_be_right_is_refused_in_one_line(kind, tmp_path):
    content, expected = WRONG_DICTIONARIES[kind]
    path = tmp_path / "dict.de.txt"
    path.write_bytes(content)
    with pytest.raises(OptionError) as error:
        Dictionary.load(str(path))
    assert str(error.value) == f"{path}: {expected}"


def test_counts_below_0_are_refused_only_where_they_are_used(tmp_path):
    """sentencepiece's vocabulary of BPE has them.

    A maintainer of fairseq calls such dictionaries right.
    """
    path = tmp_path / "dict.de.txt"
    path.write_bytes(b"hund 0\nkatze -1\n")
    words = Dictionary.load(str(path))
    assert len(words) == 6
    settings = {"pad_idx": words.pad(), "mask_idx": words.add_symbol("<mask>")}
    MaskTokensDataset([], words, **settings)
    with pytest.raises(
        OptionError, match=r"^--freq-weighted-replacement: draws tokens by their counts, but"
    ):
        MaskTokensDataset([], words, freq_weighted_replacement=True, **settings)


def test_a_fasta_file_is_indexed_without_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "$(touch harm)"
    folder.mkdir()
    (folder / "train.fasta").write_bytes(b">a\nACG\nT\n>b\n>c\nGG\r\n")
    found = FastaDataset(str(folder / "train"))
    assert (found.offsets.tolist(), found.sizes.tolist()) == ([0, 9, 12], [4, 0, 2])
    assert [found[i] for i in range(3)] == [(">a", "ACGT"), (">b", ""), (">c", "GG")]
    assert not (tmp_path / "harm").exists()


def test_buckets_hold_equally_many_sentences():
    words = ListDataset([torch.ones(length) for length in range(1, 9)], sizes=range(1, 9))
    buckets = BucketPadLengthDataset(words, words.sizes, num_buckets=2, pad_idx=0, left_pad=False)
    assert [len(buckets[i]) for i in range(8)] == [4, 4, 4, 4, 8, 8, 8, 8]
