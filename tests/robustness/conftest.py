"""What several files of these tests share."""

import shutil

import pytest

from tests.commands import LM_SIZES, PLUGIN, SIZES, preprocess, run
from tests.topics import binarise

TRAIN = "--optimizer adam --lr 0.01 --cpu --max-tokens 400 --num-workers 0 --seed 1 --no-epoch-checkpoints".split()
TRAIN += ["--user-dir", PLUGIN, "--max-update", "1", "--required-batch-size-multiple", "1", "--disable-validation"]
USE = ["--user-dir", PLUGIN, "--cpu", "--max-tokens", "400"]
LM = ["--task", "language_modeling"]
TRANSLATION_TRAIN = ["--arch", "mixhead_transformer", *SIZES, *TRAIN]
LM_TRAIN = [*LM, "--arch", "mixhead_transformer_lm", *LM_SIZES, "--tokens-per-sample", "32", *TRAIN]


@pytest.fixture(scope="session")
def lab(corpus, tmp_path_factory):
    """Data of translation and of text, and a trained checkpoint of each: de-en, text, de-en.pt, text.pt."""
    folder = tmp_path_factory.mktemp("lab")
    preprocess(corpus, folder / "de-en", "--source-lang", "de", "--target-lang", "en", "--joined-dictionary")
    for split in ("train", "valid", "test"):
        shutil.copy(corpus / f"{split}.en", folder / split)
    preprocess(folder, folder / "text", "--only-source")
    for name, flags in {"de-en": TRANSLATION_TRAIN, "text": LM_TRAIN}.items():
        save = folder / f"{name}.saved"
        run("fairseq-train", folder / name, *flags, "--save-dir", save)
        (save / "checkpoint_last.pt").rename(folder / f"{name}.pt")
    return folder


@pytest.fixture(scope="session")
def labelled_data(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    for part in ("input0", "label"):
        (folder / part).mkdir()
        for split in ("train", "valid"):
            lines = (corpus / f"{split}.en").read_text().splitlines()
            lines = lines if part == "input0" else ["yes" if "dog" in line else "no" for line in lines]
            (folder / part / split).write_text("".join(f"{line}\n" for line in lines))
        binarise({split: folder / part / split for split in ("train", "valid")}, folder / "data" / part)
    return folder / "data"
