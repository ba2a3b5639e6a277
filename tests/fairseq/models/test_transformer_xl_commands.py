"""Transformer-XL in fairseq's commands."""

import math
import re

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils

from tests.commands import PLUGIN, logged, run, several, two_workers
from tests.helpers import run_here
from tests.transformer_xl import XL_SIZES

TASK = ["--task", "truncated_bptt_lm", "--batch-size", "3", "--cpu", "--num-workers", "0"]
TRAINING = [
    *TASK,
    "--tokens-per-sample=8",
    "--arch=mixhead_transformer_xl",
    f"--user-dir={PLUGIN}",
    *XL_SIZES,
]
TRAINING += ["--mem-len", "6", "--optimizer", "adam", "--lr", "0.01", "--seed", "1"]
TRAINING += [
    "--log-format=json",
    "--log-interval=1",
    "--no-epoch-checkpoints",
    "--ddp-backend=legacy_ddp",
]
WORDS = 8  # in a window


def losses(output):
    return [log["loss"] for log in logged(output)]


@pytest.fixture(scope="module")
def outputs(text_data, tmp_path_factory):
    """Return the log of each command.

    A model with dropout is trained for more than one epoch, once in two parts.
    """
    folder = tmp_path_factory.mktemp("xl")
    flags = [
        text_data,
        *TRAINING,
        "--criterion=adaptive_loss",
        "--dropout=0.1",
        "--dropatt=0.1",
    ]
    of_model = [
        text_data,
        f"--user-dir={PLUGIN}",
        *TASK,
        "--path",
        folder / "parts" / "checkpoint_last.pt",
    ]
    commands = {
        "whole": ["fairseq-train", *flags, "--save-dir", folder / "whole", "--max-update", "22"],
        "first": ["fairseq-train", *flags, "--save-dir", folder / "parts", "--max-update", "7"],
        "second": ["fairseq-train", *flags, "--save-dir", folder / "parts", "--max-update", "22"],
        "eval-lm": [
            "fairseq-eval-lm",
            *of_model,
            f"--tokens-per-sample={WORDS}",
            "--softmax-batch=5",
        ],
    }
    return {"model": of_model, **{name: run_here(*command) for name, command in commands.items()}}


def test_training_resumed_within_an_epoch_goes_on_where_it_stopped(outputs):
    """Compare all losses; validations and checkpoints lie in between."""
    assert losses(outputs["first"]) + losses(outputs["second"]) == losses(outputs["whole"])
    found = [float(loss) for loss in losses(outputs["whole"])]
    assert len(found) == 22 and sum(found[-5:]) < 0.8 * sum(found[:5])  # it learns


@pytest.mark.slow
def test_a_checkpoint_has_memory_and_validates_as_in_training(outputs):
    state = torch.load(outputs["model"][-1], weights_only=True)
    assert state["model"]["decoder.memory.version_1.states"].shape == (2, 6, 3, 12)
    (validated,) = several(["fairseq-validate", *outputs["model"], "--log-format", "json"])
    for output in (validated, outputs["whole"]):
        found = float(logged(output, "valid")[-1]["valid_loss"])
        assert found == pytest.approx(state["extra_state"]["val_loss"], abs=2e-3)


def test_eval_lm_gives_the_perplexity_of_the_text(outputs, text_data):
    """Score each row of windows as one text; fairseq's task skips the first word of a window."""
    (model,), _ = checkpoint_utils.load_model_ensemble([str(outputs["model"][-1])])
    model.eval()
    lines = data_utils.load_indexed_dataset(
        f"{text_data}/test", Dictionary.load(f"{text_data}/dict.txt")
    )
    words = torch.cat([lines[i] for i in range(len(lines))]).long()
    windows = math.ceil(len(words) / WORDS) // 3
    total = 0.0
    count = 0
    for row in words[: 3 * windows * WORDS].split(windows * WORDS):
        for window, part in enumerate(row.split(WORDS)):
            found = model.get_normalized_probs(model(part[None], window=window), log_probs=True)[
                0, :-1
            ]
            total += found.gather(1, part[1:, None]).sum().item()
            count += len(part) - 1
    found = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", outputs["eval-lm"])
    assert float(found[1]) == pytest.approx(-total / count / math.log(2), abs=1e-4)


@pytest.mark.slow
def test_generate_and_interactive_continue_a_text(outputs):
    flags = ["--tokens-per-sample", "4", "--beam", "2", "--max-len-b", "7"]
    found = run("fairseq-generate", *outputs["model"], *flags).stdout
    sources = dict(re.findall(r"^S-(\d+)\t(.*)$", found, re.M))
    hypotheses = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", found, re.M))
    assert len(hypotheses) == len(sources) >= 4
    typed = "dog sees\n" + "man hears cat " * 5 + "\n"
    found = run(
        "fairseq-interactive", *outputs["model"], "--beam", "2", "--batch-size", "1", stdin=typed
    ).stdout
    first, second = re.findall(r"^H-\d+\t\S+\t(.*)$", found, re.M)
    # longer than a window
    assert first.startswith("dog sees ") and second.startswith("man hears cat " * 5)


@pytest.mark.slow
def test_two_workers_share_a_text_as_one_worker_has_it_and_resume(text_data, tmp_path):
    """Train on the same text, twice two rows and once four.

    Each worker's memory must be of its own text.
    """
    flags = [text_data, *TRAINING, "--criterion", "cross_entropy", "--lr", "0.001"]
    shared = [*flags, "--batch-size", "2", "--save-dir", tmp_path / "two"]
    with_two = two_workers(*shared, "--max-update", "12")
    alone = run(
        "fairseq-train",
        *flags,
        "--batch-size=4",
        f"--save-dir={tmp_path / 'one'}",
        "--max-update=12",
    )
    expected = [float(x) for x in losses(alone.stdout + alone.stderr)]
    assert [float(x) for x in losses(with_two)] == pytest.approx(expected, abs=2e-3)

    one = torch.load(tmp_path / "one" / "checkpoint_last.pt", weights_only=True)["model"]
    two = torch.load(tmp_path / "two" / "checkpoint_last.pt", weights_only=True)["model"]
    assert one.keys() == two.keys()
    for name, value in one.items():
        if ".memory." not in name:
            torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-5, msg=name)
    states = "decoder.memory.version_1.states"
    of_first_worker = one[states][:, :, :2]
    torch.testing.assert_close(two[states], of_first_worker, rtol=1e-3, atol=1e-4)

    resumed = two_workers(*shared, "--max-update", "14")
    assert "memory: of the first worker" in resumed
    assert len(losses(resumed)) == 2
