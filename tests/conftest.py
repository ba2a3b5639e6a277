"""What all tests share."""

import os

# The suite starts many small processes on few cores, whatever the caller's environment says of threads.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

import pytest
import torch

NOUNS = {"hund": "dog", "katze": "cat", "vogel": "bird", "mann": "man", "frau": "woman", "kind": "child"}
VERBS = {"sieht": "sees", "hört": "hears", "mag": "likes", "sucht": "seeks"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Of `-n auto`: one more than there are cores, since many tests wait for processes of their own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores + 1


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A few hundred sentences of three words, the object in another place on each side."""
    folder = tmp_path_factory.mktemp("corpus")
    pairs = [
        (f"{s} {o} {v}", f"{NOUNS[s]} {VERBS[v]} {NOUNS[o]}") for s in NOUNS for v in VERBS for o in NOUNS if s != o
    ]
    pairs = [pairs[i * 37 % len(pairs)] for i in range(len(pairs))]
    for split, chosen in {"train": pairs[:90], "valid": pairs[90:105], "test": pairs[105:]}.items():
        for side, language in enumerate(("de", "en")):
            (folder / f"{split}.{language}").write_text("".join(f"{pair[side]}\n" for pair in chosen))
    return folder


@pytest.fixture(scope="session")
def translation_data(corpus, tmp_path_factory):
    from tests.commands import preprocess  # not above: tests/ops runs without fairseq

    flags = ["--source-lang", "de", "--target-lang", "en", "--joined-dictionary"]
    return preprocess(corpus, tmp_path_factory.mktemp("data") / "de-en", *flags)


@pytest.fixture(scope="session")
def text_data(corpus, tmp_path_factory):
    from tests.commands import preprocess  # not above: tests/ops runs without fairseq

    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "valid", "test"):
        (folder / split).write_text((corpus / f"{split}.en").read_text())
    return preprocess(folder, folder / "text", "--only-source")
