"""examples/wikitext2/orthogonality.py, which measures what the sweep's table says."""

import sys

import pytest
import torch
from wikitext2 import orthogonality

from tests.commands import LM_SIZES, train


@pytest.fixture(scope="module")
def checkpoint(text_data, tmp_path_factory):
    save = tmp_path_factory.mktemp("mixed")
    flags = ["--task", "language_modeling", "--tokens-per-sample", "16", "--head-mixing", "position-independent"]
    train(text_data, "mixhead_transformer_lm", save, *LM_SIZES, *flags, updates=1)
    return save / "checkpoint_last.pt"


def test_it_is_the_mean_over_the_attentions(checkpoint, text_data, tmp_path, monkeypatch, capsys):
    state = torch.load(checkpoint, weights_only=True)
    for layer, factor in ((0, 2.0), (1, 1.0)):
        state["model"][f"decoder.layers.{layer}.self_attn.head_mixing.weight"] = factor * torch.eye(4)
    torch.save(state, tmp_path / "made.pt")
    monkeypatch.setattr(sys, "argv", ["orthogonality", str(text_data), str(tmp_path / "made.pt")])
    orthogonality.main()
    assert capsys.readouterr().out == f"{tmp_path}/made.pt\t18.000000\n"  # (4 * (4 - 1)^2 + 0) / 2
