"""Fixtures of all tests."""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.launcher import ONE_THREAD

# Before torch is imported. The suite starts many small processes on few cores: what the caller
# exports (clusters set OMP_NUM_THREADS) does not count.
os.environ.update(ONE_THREAD)
# Images of containers ask Python to keep no bytecode. Then each of the suite's many processes would
# compile fairseq, transformers and the plugin anew, which takes longer than importing them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# transformers copies the code of folders that a test trusts; not into the user's cache.
os.environ["HF_MODULES_CACHE"] = str(Path(tempfile.gettempdir()) / "mixhead_tests_modules")
# Scripts look for the commands of this environment, which need not be activated.
os.environ["PATH"] = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
)

import torch

from tests import covering, ids

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    # Its first import decides whether its functions can be interpreted, and transformers imports
    # it, too.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton  # noqa: F401

    del os.environ["TRITON_INTERPRET"]  # other tests start processes

NOUNS = {
    "hund": "dog",
    "katze": "cat",
    "vogel": "bird",
    "mann": "man",
    "frau": "woman",
    "kind": "child",
}
VERBS = {"sieht": "sees", "hört": "hears", "mag": "likes", "sucht": "seeks"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Return the number for `-n auto`: one more than there are cores.

    Many tests wait for other processes.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores + 1


def pytest_generate_tests(metafunc):
    covering.parametrize(metafunc)


def pytest_make_parametrize_id(val, argname):
    return ids.id_of(val, argname)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        # not `in item.keywords`, which has the names of folders, too: a checkout may be in one
        # called gpu
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A few hundred sentences of three words, the object in another place on each side."""
    folder = tmp_path_factory.mktemp("corpus")
    pairs = [
        (f"{s} {o} {v}", f"{NOUNS[s]} {VERBS[v]} {NOUNS[o]}")
        for s in NOUNS
        for v in VERBS
        for o in NOUNS
        if s != o
    ]
    # Shuffled: steps of 37 reach every pair once, because 37 is prime and does not divide 120.
    pairs = [pairs[i * 37 % len(pairs)] for i in range(len(pairs))]
    for split, chosen in {"train": pairs[:90], "valid": pairs[90:105], "test": pairs[105:]}.items():
        for side, language in enumerate(("de", "en")):
            (folder / f"{split}.{language}").write_text(
                "".join(f"{pair[side]}\n" for pair in chosen)
            )
    return folder


@pytest.fixture(scope="session")
def translation_data(corpus, tmp_path_factory):
    from tests.commands import preprocess  # not above: tests/ops runs without fairseq

    flags = ["--source-lang", "de", "--target-lang", "en", "--joined-dictionary"]
    texts = {split: corpus / split for split in ("train", "valid", "test")}
    return preprocess(texts, tmp_path_factory.mktemp("data") / "de-en", *flags)


@pytest.fixture(scope="session")
def text_data(corpus, tmp_path_factory):
    from tests.commands import preprocess  # not above: tests/ops runs without fairseq

    texts = {split: corpus / f"{split}.en" for split in ("train", "valid", "test")}
    return preprocess(texts, tmp_path_factory.mktemp("data") / "text", "--only-source")


@pytest.fixture(scope="session")
def translation_checkpoint(translation_data, tmp_path_factory):
    """Position-wise mixing in every attention, after one update."""
    from tests.commands import SIZES, train

    save = tmp_path_factory.mktemp("translation")
    train(translation_data, "mixhead_transformer", save, *SIZES, "--disable-validation", updates=1)
    return save / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def text_checkpoint(text_data, tmp_path_factory):
    """A language model after one update."""
    from tests.commands import LM_SIZES, train

    save = tmp_path_factory.mktemp("text")
    flags = [
        "--task=language_modeling",
        "--tokens-per-sample=16",
        "--sample-break-mode=eos",
        *LM_SIZES,
    ]
    train(text_data, "mixhead_transformer_lm", save, *flags, "--disable-validation", updates=1)
    return save / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def translator(translation_data, tmp_path_factory):
    """A Mixhead model that has learnt the tiny language."""
    from tests.commands import SIZES, train

    save = tmp_path_factory.mktemp("translator")
    flags = [
        "--criterion=label_smoothed_cross_entropy",
        "--share-all-embeddings",
        "--eval-bleu",
        "--dropout=0",
    ]
    flags += ["--validate-interval", "1000", "--save-interval", "1000"]  # at the end alone
    train(translation_data, "mixhead_transformer", save, *SIZES, *flags, updates=120)
    return save / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def fairseq_translator(translation_data, tmp_path_factory):
    """fairseq's own model, after four updates."""
    from tests.commands import SIZES, train

    save = tmp_path_factory.mktemp("fairseq")
    train(translation_data, "transformer", save, *SIZES, "--share-all-embeddings", updates=4)
    return save / "checkpoint_last.pt"
