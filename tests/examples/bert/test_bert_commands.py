"""fairseq's commands pre-train and fine-tune BERT with `--user-dir examples/bert`."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from bert.answers import predictions, read_spans
from bert.squad_data import read_squad, score

from tests import pretraining, squad
from tests.commands import (
    ROBERTA_SIZES,
    WHOLE_SETS,
    as_flags,
    logged,
    run,
    several,
    two_workers,
)
from tests.helpers import run_here

BERT = Path(__file__).resolve().parents[3] / "examples" / "bert"
COMMON = ["--user-dir", BERT, *ROBERTA_SIZES, *WHOLE_SETS, "--seed", "1", "--log-format", "json"]
COMMON += (
    "--log-interval 1 --no-epoch-checkpoints --ddp-backend legacy_ddp --optimizer adam --lr 0.003"
).split()
ALONE = ["--cpu", "--num-workers=0", "--disable-validation", "--save-interval=100"]
NO_DROPOUT = as_flags(squad.DROPOUT)
UNINSTALLED = f"""
import sys
from argparse import Namespace
from fairseq import utils
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder).lower()]
sys.path = [folder for folder in sys.path if folder != "{BERT.parents[1]}"]
assert "mixhead_plugin" not in sys.modules
utils.import_user_module(Namespace(user_dir=sys.argv[1]))
import mixhead_plugin
from fairseq.tasks import TASK_REGISTRY
print(mixhead_plugin.__file__, "bert_pretraining" in TASK_REGISTRY)
"""


class Training(NamedTuple):
    """The flags of a task, whose criterion has its name, and the scores that validation prints."""

    flags: list[str]
    scores: list[str]


TRAININGS = {
    "bert_pretraining": Training(
        ["--tokens-per-sample=24", "--max-positions=64", "--batch-size=16"],
        ["loss", "mlm_loss", "nsp_loss", "nsp_accuracy"],
    ),
    # Of the five batches of an epoch, the second of two workers has two.
    "squad": Training([*as_flags(squad.WINDOWS), "--batch-size=7"], ["loss", "exact_match", "f1"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the data folder of each task."""
    folder = tmp_path_factory.mktemp("trainings")
    return {
        "bert_pretraining": pretraining.write_data(folder),
        "squad": squad.write_data(folder / "questions"),
    }


def training(data, task, save, *flags):
    flags = [
        f"--criterion={task}",
        "--arch=mixhead_bert_base",
        *COMMON,
        *TRAININGS[task].flags,
        *flags,
    ]
    return [
        "fairseq-train",
        data[task],
        f"--task={task}",
        *flags,
        "--save-dir",
        data["squad"].parent / save,
    ]


def saved(data, name):
    return torch.load(data["squad"].parent / name / "checkpoint_last.pt", weights_only=True)[
        "model"
    ]


def numbers(output, name="loss", kind="train_inner"):
    return [
        float(log[name if kind == "train_inner" else f"{kind}_{name}"])
        for log in logged(output, kind)
    ]


def test_the_user_dir_works_from_any_folder_where_the_plugin_is_not_installed(tmp_path):
    (tmp_path / "program.py").write_text(UNINSTALLED)
    path, known = run(tmp_path / "program.py", BERT, cwd=tmp_path).stdout.split()[-2:]
    assert (Path(path).parents[1], known) == (BERT.parents[1], "True")


@pytest.fixture(scope="module")
def outputs(data):
    """Return the log of each command, by name."""
    folder = data["squad"].parent
    valid = ["--user-dir", BERT, "--cpu", "--batch-size=7", "--log-format=json", *WHOLE_SETS]
    answers = ["fairseq-validate", data["squad"], "--task=squad", *valid, *as_flags(squad.WINDOWS)]
    commands = {
        "squad": training(data, "squad", "squad", "--cpu", "--num-workers=0", "--max-update=3"),
        "answers": [
            *answers,
            "--path",
            folder / "squad" / "checkpoint_last.pt",
            f"--nbest-file={folder / 'spans'}",
        ],
    }
    return {name: run_here(*command) for name, command in commands.items()}


def test_the_metrics_of_the_task_are_those_of_the_answers_in_its_file(outputs, data):
    content = read_squad(data["squad"] / "valid.json")
    found = predictions(content, read_spans(data["squad"].parent / "spans", content.questions), 20)
    best = {name: answers[0]["text"] for name, answers in found.items()}
    scores = [numbers(outputs["answers"], name, "valid")[0] for name in ("exact_match", "f1")]
    assert scores == pytest.approx(score(content.questions, best), abs=0.01)
    assert scores == [
        numbers(outputs["squad"], name, "valid")[-1] for name in ("exact_match", "f1")
    ]
    for answers in found.values():
        probabilities = [answer["probability"] for answer in answers]
        assert 0 < len(answers) <= 20 and probabilities == sorted(probabilities, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("task", TRAININGS)
def test_training_resumed_goes_on_where_it_stopped(task, data):
    """Train with dropout, and with the mixing at its own rate.

    In the parts, a worker reads ahead.
    """
    flags = [*ALONE, "--dropout=0.2", "--attention-dropout=0.2", "--mixing-lr-scale=4"]
    parts = training(data, task, f"{task}.parts", *flags, "--num-workers=1")
    whole = training(data, task, f"{task}.whole", *flags, "--max-update=12")
    outputs = several(whole, [*parts, "--max-update=4"], [*parts, "--max-update=12"])
    whole, first, second = map(numbers, outputs)
    assert len(whole) == 12 and first + second == whole
    expected = saved(data, f"{task}.whole")
    for name, value in saved(data, f"{task}.parts").items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("task", TRAININGS)
def test_two_workers_train_as_one(task, data):
    # Adam would enlarge the rounding of gradients near 0.
    flags = [
        "--cpu",
        "--optimizer=sgd",
        "--lr=0.1",
        "--max-update=6",
        "--num-workers=0",
        *NO_DROPOUT,
    ]
    one = f"{task}.one"
    two = f"{task}.two"
    (alone,) = several(training(data, task, one, *flags, "--update-freq=2"))
    both = two_workers(*training(data, task, two, *flags)[1:])
    assert numbers(both) == pytest.approx(numbers(alone), abs=2e-3)
    assert numbers(alone)[-1] < numbers(alone)[0]
    for name in TRAININGS[task].scores:
        expected, found = (numbers(output, name, "valid")[-1] for output in (alone, both))
        assert found == pytest.approx(expected, abs=2e-3), name
    ours = saved(data, two)
    for name, value in saved(data, one).items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6, msg=name)
