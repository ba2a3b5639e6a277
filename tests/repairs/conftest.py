"""A small checkpoint of translation."""

import pytest

from tests.commands import SIZES, train


@pytest.fixture(scope="session")
def translation_checkpoint(translation_data, tmp_path_factory):
    save = tmp_path_factory.mktemp("translation")
    train(translation_data, "mixhead_transformer", save, *SIZES, "--disable-validation", updates=1)
    return save / "checkpoint_last.pt"
