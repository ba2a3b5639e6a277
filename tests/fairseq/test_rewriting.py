"""The checkpoint of a changed model keeps nothing that belongs to the former parameters."""

import torch

from mixhead_plugin.fairseq import rewriting


def test_the_state_of_the_optimizer_and_moving_averages_are_left_out(tmp_path):
    former = {"weight": torch.zeros(3)}
    state = {
        "args": {"arch": "old"},
        "cfg": {"model": {"_name": "old"}},
        "model": former,
        "last_optimizer_state": {"state": former},
        "ema_fp32_params": former,
        "optimizer_history": [{"num_updates": 7}],
        "extra_state": {"ema": former, "train_iterator": {"epoch": 2}},
    }
    out = tmp_path / "out.pt"
    rewriting.write(state, {"model": {"_name": "new"}}, {"weight": torch.ones(2)}, str(out))

    written = torch.load(out, weights_only=True)
    assert written.pop("model")["weight"].tolist() == [1, 1]
    assert written == {
        "args": None,
        "cfg": {"model": {"_name": "new"}},
        "optimizer_history": [{"num_updates": 7}],
        "extra_state": {"train_iterator": {"epoch": 2}},
    }
