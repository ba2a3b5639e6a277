"""Files that were written before the package had a folder for each door still load.

`tests/checkpoints/criterions/<criterion>` holds what `train` wrote after two updates, and the
losses of the next two. The folders `nn` and `hf` hold a mixed module and a mixed model, with the
outputs that they gave.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mixhead_plugin.nn import MixedAttention
from tests.commands import BERT, PLUGIN, TRAINING, logged
from tests.helpers import run_here
from tests.robustness.tasks import BERT_TASKS, TASKS

FOLDER = Path(__file__).parents[1] / "checkpoints"
VARIANT = {
    "head_mixing": "position-wise",
    "attention_gate": "head",
    "relative_position": "t5",
    "feature_mixing": "output",
}


# For each criterion the fixture of its data, and the flags of its training.
TRAININGS = {**TASKS, **BERT_TASKS}


def train(criterion, data, save, updates):
    """Train with a criterion of the plugin, or of examples/bert, until `updates`.

    Go on from the last checkpoint if there is one.
    """
    user_dir = BERT if criterion in BERT_TASKS else PLUGIN
    _, flags_of_task = TRAININGS[criterion]
    flags = [
        f"--user-dir={user_dir}",
        f"--criterion=orthogonal_{criterion}",
        "--orthogonal-weight=0.1",
    ]
    flags += [*flags_of_task, *TRAINING, "--ddp-backend", "legacy_ddp"]
    flags += ["--disable-validation", "--save-dir", save, "--max-update", updates]
    return run_here("fairseq-train", data, *flags)


@pytest.mark.parametrize("criterion", TRAININGS)
def test_a_training_goes_on_from_an_earlier_checkpoint(criterion, request, tmp_path):
    fixture, _ = TRAININGS[criterion]
    data = request.getfixturevalue(fixture)
    earlier = FOLDER / "criterions" / criterion
    shutil.copy(earlier / "checkpoint_last.pt", tmp_path)

    log = train(criterion, data, tmp_path, updates=4)

    expected = json.loads((earlier / "losses.json").read_text())
    found = {update["num_updates"]: float(update["loss"]) for update in logged(log)}
    assert found == pytest.approx(expected, rel=2e-3)


def test_an_earlier_state_dict_of_torch_gives_its_outputs():
    attention = MixedAttention(16, 4, **VARIANT).eval()
    saved = torch.load(FOLDER / "nn" / "attention.pt")
    attention.load_state_dict(saved["state_dict"])
    # Another CPU adds up in another order.
    torch.testing.assert_close(attention(*3 * (saved["input"],))[0], saved["output"])


def test_an_earlier_folder_of_transformers_gives_its_outputs():
    hf = pytest.importorskip("mixhead_plugin.hf")
    model = hf.load(FOLDER / "hf").eval()
    expected = json.loads((FOLDER / "hf" / "expected.json").read_text())
    logits = model(torch.tensor(expected["tokens"])).logits[0, -1]
    torch.testing.assert_close(logits, torch.tensor(expected["logits"]), atol=2e-5, rtol=0)
