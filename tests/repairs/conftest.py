"""A small checkpoint of translation and one of a language model."""

import pytest

from tests.commands import LM_SIZES, SIZES, train


@pytest.fixture(scope="session")
def translation_checkpoint(translation_data, tmp_path_factory):
    save = tmp_path_factory.mktemp("translation")
    train(translation_data, "mixhead_transformer", save, *SIZES, "--disable-validation", updates=1)
    return save / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def text_checkpoint(text_data, tmp_path_factory):
    save = tmp_path_factory.mktemp("text")
    flags = ["--task", "language_modeling", "--tokens-per-sample", "32", *LM_SIZES, "--disable-validation"]
    train(text_data, "mixhead_transformer_lm", save, *flags, updates=1)
    return save / "checkpoint_last.pt"
