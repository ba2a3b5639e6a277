"""Data of labelled sentences, and trainings that nothing disturbs."""

import pytest

from tests import pretraining, squad
from tests.commands import LM_SIZES, PLUGIN, SIZES, TRAINING, preprocess, start
from tests.robustness import faults
from tests.robustness.tasks import TASKS
from tests.transformer_xl import XL_SIZES

COMMON = [f"--user-dir={PLUGIN}", *TRAINING, "--save-interval-updates=3"]
DROPOUT = ["--dropout=0.2", "--attention-dropout=0.2"]
# fairseq takes the last of a flag that comes twice
TRANSLATION = ["--arch=mixhead_transformer", *SIZES, *COMMON, *DROPOUT, "--max-tokens=100"]
LANGUAGE_MODEL = [
    "--arch=mixhead_transformer_lm",
    *LM_SIZES,
    *COMMON,
    *DROPOUT,
    "--max-tokens=80",
    "--task=language_modeling",
    "--sample-break-mode=eos",
]
TRANSFORMER_XL = [
    "--arch=mixhead_transformer_xl",
    *XL_SIZES,
    *COMMON,
    "--dropout=0.1",
    "--dropatt=0.1",
    "--task=truncated_bptt_lm",
    "--tokens-per-sample=8",
    "--batch-size=3",
    "--mem-len=6",
    "--criterion=adaptive_loss",
    "--ddp-backend=legacy_ddp",
]
# Two data workers read ahead, and draw the data of each epoch anew.
READ_AHEAD = [
    *COMMON,
    "--num-workers=2",
    "--save-interval-updates=2",
    *DROPOUT,
    "--pooler-dropout=0.2",
]


@pytest.fixture(scope="session")
def labelled_data(corpus, once_a_run):
    """Sentences, with the label yes if they have a dog."""

    def make(folder):
        texts = {split: corpus / f"{split}.en" for split in ("train", "valid")}
        labels = {}
        for split, path in texts.items():
            labels[split] = folder / f"{split}.label"
            answers = ["yes" if "dog" in line else "no" for line in path.read_text().splitlines()]
            labels[split].write_text("".join(f"{answer}\n" for answer in answers))
        preprocess(texts, folder / "data" / "input0", "--only-source")
        preprocess(labels, folder / "data" / "label", "--only-source")

    return once_a_run("labelled-data", make) / "data"


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    return pretraining.write_data(tmp_path_factory.mktemp("documents"))


@pytest.fixture(scope="session")
def questions(tmp_path_factory):
    return squad.write_data(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="session")
def recipes(translation_data, text_data, labelled_data):
    """Arguments of fairseq-train by name, without --save-dir and an end."""
    recipes = {
        "transformer": [translation_data, *TRANSLATION],
        "transformer_lm": [text_data, *LANGUAGE_MODEL],
        "transformer_xl": [text_data, *TRANSFORMER_XL],
    }
    for criterion, data in (("masked_lm", text_data), ("sentence_prediction", labelled_data)):
        _, flags = TASKS[criterion]
        recipes[criterion] = [data, *flags, *READ_AHEAD, f"--criterion={criterion}"]
    return recipes


@pytest.fixture(scope="session")
def undisturbed(recipes, once_a_run):
    """Return undisturbed(recipe, *flags) -> the folder of a whole training.

    It has `save`, `log` and `events`.
    """

    def train(recipe, *flags):
        def make(folder):
            before = faults.before(folder=folder / "save", record=folder / "events")
            arguments = [*recipes[recipe], *flags, "--save-dir", folder / "save"]
            end = start("fairseq-train", *arguments, before=before).wait()
            assert end.returncode == 0, (end.stdout + end.stderr)[-3000:]
            (folder / "log").write_text(end.stdout + end.stderr)

        return once_a_run("-".join(["undisturbed", recipe, *flags]), make)

    return train
