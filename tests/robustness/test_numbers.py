"""Train until numbers overflow: they are refused before they are saved."""

from pathlib import Path

import pytest
import torch

from mixhead_plugin.errors import OptionError
from mixhead_plugin.ops import NORMALIZERS
from tests.commands import LM_SIZES, PLUGIN, TRAINING, train
from tests.helpers import run_here

LM = ["--task", "language_modeling", "--tokens-per-sample", "16", *LM_SIZES, "--dropout", "0"]


def assert_finite(folder):
    """Return the names of the checkpoints, all of which must have finite weights."""
    names = set()
    for path in Path(folder).glob("checkpoint*.pt"):
        state = torch.load(path, weights_only=True)
        assert all(value.isfinite().all() for value in state["model"].values()), path
        names.add(path.name)
    return names


@pytest.mark.parametrize(
    "normalizer",
    [
        name if name == "unnormalized" else pytest.param(name, marks=pytest.mark.slow)
        for name in NORMALIZERS
    ],
)
def test_a_training_that_diverges_saves_finite_weights_alone(normalizer, text_data, tmp_path):
    flags = [*LM, "--attention-normalizer", normalizer, "--head-mixing", "position-wise"]
    flags += ["--save-interval-updates", "1", "--lr", "1e18"]
    result = train(text_data, "mixhead_transformer_lm", tmp_path, *flags, updates=4, check=False)
    names = assert_finite(tmp_path)
    # The first update is saved, because its weights are large but finite.
    assert names == {"checkpoint_last.pt"}
    last = result.stderr.strip().splitlines()[-1]
    if result.returncode != 0 and not last.startswith(
        "fairseq-train: error: the model has NaN or infinite parameters after update "
    ):
        assert last == "FloatingPointError: gradients are Nan/Inf", result.stderr[-2000:]
        # fairseq's NanDetector names the module
        assert "detected in output of" in result.stdout + result.stderr
    if normalizer == "unnormalized":  # exp of scores of thousands
        assert last == "FloatingPointError: gradients are Nan/Inf"


def test_a_training_ends_before_it_saves_weights_that_overflow(text_data, tmp_path):
    data = [text_data, "--user-dir", PLUGIN, "--arch", "mixhead_transformer_lm", *LM, *TRAINING]
    flags = ["--head-mixing", "position-wise", "--save-interval-updates", "1"]
    end = ["--lr", "1e39", "--max-update", "4", "--save-dir", tmp_path]
    problem = "^the model has NaN or infinite parameters after update 1, the first is "
    with pytest.raises(OptionError, match=problem):
        run_here("fairseq-train", *data, *flags, *end)
    assert not list(tmp_path.glob("*.pt"))
