"""Fixtures of all tests."""

import gc
import importlib.util
import itertools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from common.cores import CORES

from tests import launcher

# Before torch is imported. The suite starts many small processes on few cores: what the caller
# exports (clusters set OMP_NUM_THREADS) does not count.
os.environ.update(launcher.ONE_THREAD)
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
    return CORES + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect the tests without collecting garbage.

    Modules and tests stay until the end, and they are more than a million objects. Each later
    collection of garbage would go through them again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


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


@pytest.fixture(scope="session", autouse=True)
def folder_of_the_run(tmp_path_factory, pytestconfig):
    """The folder that all workers share, with the sockets of the launchers' servers."""
    folder = tmp_path_factory.getbasetemp()
    # Not by xdist's variable, which a pytest that a test of a worker starts has, too.
    if hasattr(pytestconfig, "workerinput"):
        folder = folder.parent  # of the folders of all workers
    launcher.SOCKETS = folder
    return folder


@pytest.fixture(scope="session")
def once_a_run(folder_of_the_run):
    """Return once_a_run(name, make) -> a folder, which the first worker that needs it makes.

    `make` takes the empty folder and fills it. The other workers of pytest-xdist wait for that, and
    then find the files. So no test may change them.
    """

    def once(name, make):
        folder = folder_of_the_run / f"once-{name}"
        made = folder_of_the_run / f"once-{name}.made"
        with launcher.locked(folder_of_the_run / f"once-{name}.lock"):
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # what one that failed has left
                folder.mkdir()
                make(folder)
                made.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A few hundred sentences of three words, the object in another place on each side."""
    folder = tmp_path_factory.mktemp("corpus")
    pairs = []
    for subject, verb, object_ in itertools.product(NOUNS, VERBS, NOUNS):
        if subject != object_:
            source = f"{subject} {object_} {verb}"
            pairs.append((source, f"{NOUNS[subject]} {VERBS[verb]} {NOUNS[object_]}"))
    # Shuffled: steps of 37 reach every pair once, because 37 is prime and does not divide 120.
    pairs = [pairs[i * 37 % len(pairs)] for i in range(len(pairs))]
    for split, chosen in {"train": pairs[:90], "valid": pairs[90:105], "test": pairs[105:]}.items():
        for side, language in enumerate(("de", "en")):
            (folder / f"{split}.{language}").write_text(
                "".join(f"{pair[side]}\n" for pair in chosen)
            )
    return folder


@pytest.fixture(scope="session")
def translation_data(corpus, once_a_run):
    from tests.commands import preprocess  # not above: tests/ops runs without fairseq

    def make(folder):
        flags = ["--source-lang", "de", "--target-lang", "en", "--joined-dictionary"]
        texts = {split: corpus / split for split in ("train", "valid", "test")}
        preprocess(texts, folder / "de-en", *flags)

    return once_a_run("translation-data", make) / "de-en"


@pytest.fixture(scope="session")
def text_data(corpus, once_a_run):
    from tests.commands import preprocess  # not above: tests/ops runs without fairseq

    def make(folder):
        texts = {split: corpus / f"{split}.en" for split in ("train", "valid", "test")}
        preprocess(texts, folder / "text", "--only-source")

    return once_a_run("text-data", make) / "text"


@pytest.fixture(scope="session")
def translation_checkpoint(translation_data, once_a_run):
    """Position-wise mixing in every attention, after one update."""
    from tests.commands import SIZES, train

    def make(save):
        flags = [*SIZES, "--disable-validation"]
        train(translation_data, "mixhead_transformer", save, *flags, updates=1)

    return once_a_run("translation", make) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def text_checkpoint(text_data, once_a_run):
    """A language model after one update."""
    from tests.commands import LM_SIZES, train

    def make(save):
        flags = [
            "--task=language_modeling",
            "--tokens-per-sample=16",
            "--sample-break-mode=eos",
            "--disable-validation",
            *LM_SIZES,
        ]
        train(text_data, "mixhead_transformer_lm", save, *flags, updates=1)

    return once_a_run("text", make) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def translator(translation_data, once_a_run):
    """A Mixhead model that has learnt the tiny language."""
    from tests.commands import SIZES, train

    def make(save):
        flags = [
            *SIZES,
            "--criterion=label_smoothed_cross_entropy",
            "--share-all-embeddings",
            "--eval-bleu",
            "--dropout=0",
            # at the end alone
            "--validate-interval=1000",
            "--save-interval=1000",
        ]
        train(translation_data, "mixhead_transformer", save, *flags, updates=120)

    return once_a_run("translator", make) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def fairseq_translator(translation_data, once_a_run):
    """fairseq's own model, after four updates."""
    from tests.commands import SIZES, train

    def make(save):
        train(translation_data, "transformer", save, *SIZES, "--share-all-embeddings", updates=4)

    return once_a_run("fairseq-translator", make) / "checkpoint_last.pt"
