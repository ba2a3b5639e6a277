"""Data of labelled sentences."""

import pytest

from tests.topics import binarise


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
