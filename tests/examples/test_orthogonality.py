"""examples/wikitext2/orthogonality.py measures the penalty of the sweep's table."""

import sys

import torch
from wikitext2 import orthogonality


def test_it_is_the_mean_over_the_attentions(
    text_checkpoint, text_data, tmp_path, monkeypatch, capsys
):
    state = torch.load(text_checkpoint, weights_only=True)
    for layer, factor in ((0, 2.0), (1, 1.0)):
        mixing = f"decoder.layers.{layer}.self_attn.head_mixing"
        state["model"][f"{mixing}.bias"] = factor * torch.eye(4)
        state["model"][f"{mixing}.query_weight"].zero_()
    torch.save(state, tmp_path / "made.pt")
    monkeypatch.setattr(sys, "argv", ["orthogonality", str(text_data), str(tmp_path / "made.pt")])
    orthogonality.main()
    assert capsys.readouterr().out == f"{tmp_path}/made.pt\t18.000000\n"  # (4 * (4 - 1)^2 + 0) / 2
