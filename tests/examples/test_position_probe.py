"""examples/position_probe shows which attentions can see positions.

It looks at random weights and after training.
"""

import contextlib
import io
import json

import pytest
import torch
from position_probe.probe import KINDS, PROBED, Probe, Setting, random_spread
from position_probe.run import main
from torch import nn

SMALL = (
    "--n 4 --seeds 1 --steps 70 --jobs 1 --relative-position rotary --attentions softmax swish-l2"
).split()
BLIND = ("softmax", "sigsoftmax")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return what run.py leaves, once for all."""
    output = tmp_path_factory.mktemp("position_probe")
    threads = torch.get_num_threads()
    with contextlib.redirect_stdout(io.StringIO()):
        main([*SMALL, "--output", str(output)])
    torch.set_num_threads(threads)
    assert (output / "position_probe.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((output / "results.json").read_text())


@pytest.mark.parametrize(
    "kind, position", [(kind, position) for kind in KINDS for position in KINDS[kind].positions]
)
def test_weights_that_sum_to_1_make_all_places_equal_and_no_others_do(kind, position):
    for name in PROBED:
        if KINDS[kind].causal and name == "end-marker":
            continue
        found = random_spread(Setting(kind, name, position, n=5, seed=3))
        assert found < 1e-13 if name in BLIND else found > 1e-4, (name, found)


def test_a_marker_that_comes_later_helps_no_causal_model():
    assert random_spread(Setting("decoder", "end-marker", "rotary", n=5, seed=0)) < 1e-13
    assert random_spread(Setting("encoder", "end-marker", "rotary", n=5, seed=0)) > 1e-4


def test_no_gradient_leads_l2_away_from_equal_biases():
    def slope(name):
        probe = Probe(Setting("encoder", name, "t5", n=6, seed=0)).double()
        biases = [p for path, p in probe.named_parameters() if "relative_position" in path]
        # what it begins with
        assert len(biases) == 2 and all(bias.abs().max() > 0.1 for bias in biases)
        for bias in biases:
            nn.init.zeros_(bias)
        seen = torch.randn(6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        loss = (probe.features([6])[0] * seen).sum()
        return max(float(grad.abs().max()) for grad in torch.autograd.grad(loss, biases))

    assert slope("l2") < 1e-12
    assert slope("unnormalized") > 1e-4


@pytest.mark.slow
def test_softmax_says_one_number_and_swish_l2_learns(outcome):
    assert outcome["against_theory"] == []
    rows = {(row["model"], row["attention"]): row for row in outcome["rows"]}
    for kind in ("encoder", "decoder"):
        softmax = rows[kind, "softmax"]
        learned = rows[kind, "swish-l2"]
        every = [answer for row in softmax["answers"].values() for answer in row]
        assert max(every) - min(every) < 0.002 and softmax["spread_trained"][0] < 1e-13
        assert learned["error"][0] < 0.6 * softmax["error"][0]
        assert learned["answers"]["4"][0] + 1.5 < learned["answers"]["4"][-1]
        assert learned["flags"] == "--attention-normalizer swish-l2 --relative-position rotary"
        assert list(softmax["error_of_longer"]) == ["6", "8", "16"]
