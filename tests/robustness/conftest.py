"""Data of labelled sentences, and trainings that nothing disturbs."""

import pytest

from tests.commands import LM_SIZES, PLUGIN, SIZES, TRAINING, preprocess, start
from tests.robustness import faults
from tests.robustness.tasks import TASKS
from tests.xl import XL_SIZES

COMMON = ["--user-dir", PLUGIN, *TRAINING, "--save-interval-updates", "3"]
DROPOUT = ["--dropout", "0.2", "--attention-dropout", "0.2"]
# fairseq takes the last of a flag that comes twice
TRANSLATION = ["--arch", "mixhead_transformer", *SIZES, *COMMON, *DROPOUT, "--max-tokens", "100"]
LANGUAGE_MODEL = [
    "--arch",
    "mixhead_transformer_lm",
    *LM_SIZES,
    *COMMON,
    *DROPOUT,
    "--max-tokens",
    "80",
]
LANGUAGE_MODEL += ["--task", "language_modeling", "--sample-break-mode", "eos"]
TRANSFORMER_XL = [
    "--arch",
    "mixhead_transformer_xl",
    *XL_SIZES,
    *COMMON,
    "--dropout",
    "0.1",
    "--dropatt",
    "0.1",
]
TRANSFORMER_XL += [
    "--task",
    "truncated_bptt_lm",
    "--tokens-per-sample",
    "8",
    "--batch-size",
    "3",
    "--mem-len",
    "6",
]
TRANSFORMER_XL += ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"]
# Two data workers read ahead, and draw the data of each epoch anew.
READ_AHEAD = [
    *COMMON,
    "--num-workers",
    "2",
    "--save-interval-updates",
    "2",
    *DROPOUT,
    "--pooler-dropout",
    "0.2",
]


@pytest.fixture(scope="session")
def labelled_data(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    for part in ("input0", "label"):
        (folder / part).mkdir()
        for split in ("train", "valid"):
            lines = (corpus / f"{split}.en").read_text().splitlines()
            lines = (
                lines if part == "input0" else ["yes" if "dog" in line else "no" for line in lines]
            )
            (folder / part / split).write_text("".join(f"{line}\n" for line in lines))
        texts = {split: folder / part / split for split in ("train", "valid")}
        preprocess(texts, folder / "data" / part, "--only-source")
    return folder / "data"


@pytest.fixture(scope="session")
def recipes(translation_data, text_data, labelled_data):
    """Arguments of fairseq-train by name, without --save-dir and an end."""
    masked, sentences = (TASKS[name][1] for name in ("masked_lm", "sentence_prediction"))
    return {
        "transformer": [translation_data, *TRANSLATION],
        "transformer_lm": [text_data, *LANGUAGE_MODEL],
        "transformer_xl": [text_data, *TRANSFORMER_XL],
        "masked_lm": [text_data, *masked, *READ_AHEAD, "--criterion", "masked_lm"],
        "sentence_prediction": [
            labelled_data,
            *sentences,
            *READ_AHEAD,
            "--criterion",
            "sentence_prediction",
        ],
    }


@pytest.fixture(scope="session")
def undisturbed(recipes, tmp_path_factory):
    """undisturbed(recipe, *flags) -> the folder of a whole training, with `save`, `log` and
    `events`.
    """
    made = {}

    def train(recipe, *flags):
        if (recipe, flags) not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            before = faults.before(folder=folder / "save", record=folder / "events")
            arguments = [*recipes[recipe], *flags, "--save-dir", folder / "save"]
            end = start("fairseq-train", *arguments, before=before).wait()
            assert end.returncode == 0, (end.stdout + end.stderr)[-3000:]
            (folder / "log").write_text(end.stdout + end.stderr)
            made[recipe, flags] = folder
        return made[recipe, flags]

    return train
