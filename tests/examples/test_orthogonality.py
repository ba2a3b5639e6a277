"""examples/wikitext2/orthogonality.py measures the penalty of the sweep's table."""

import sys

import pytest
import torch
from wikitext2 import orthogonality

from tests.commands import LM_SIZES, PLUGIN, TRAINING
from tests.helpers import run_here


@pytest.fixture
def checkpoint(text_data, tmp_path):
    flags = [*LM_SIZES, *TRAINING, "--user-dir", PLUGIN, "--task", "language_modeling", "--tokens-per-sample", "16"]
    flags += ["--arch", "mixhead_transformer_lm", "--head-mixing", "position-independent", "--max-update", "1"]
    run_here("fairseq-train", text_data, *flags, "--save-dir", tmp_path)
    return tmp_path / "checkpoint_last.pt"


def test_it_is_the_mean_over_the_attentions(checkpoint, text_data, tmp_path, monkeypatch, capsys):
    state = torch.load(checkpoint, weights_only=True)
    for layer, factor in ((0, 2.0), (1, 1.0)):
        state["model"][f"decoder.layers.{layer}.self_attn.head_mixing.weight"] = factor * torch.eye(4)
    torch.save(state, tmp_path / "made.pt")
    monkeypatch.setattr(sys, "argv", ["orthogonality", str(text_data), str(tmp_path / "made.pt")])
    orthogonality.main()
    assert capsys.readouterr().out == f"{tmp_path}/made.pt\t18.000000\n"  # (4 * (4 - 1)^2 + 0) / 2
