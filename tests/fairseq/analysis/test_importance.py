"""Test the command that weighs heads; tests/heads/test_adapters.py has the definition."""

from argparse import Namespace

import pytest
import torch

from mixhead_plugin.fairseq.analysis.importance import weigh
from mixhead_plugin.fairseq.analysis.loading import load


def test_every_head_is_weighed_by_the_loss_of_the_training(numbers, translation_checkpoint):
    found, out = numbers("importance", translation_checkpoint, "--batch-size", 4, "--cpu")
    (content,) = found["sets"]
    assert (content["subset"], content["sentences"]) == ("valid", 15)

    loaded = load(translation_checkpoint, cpu=True)
    args = Namespace(subset="valid", max_tokens=None, batch_size=4, limit=None)
    expected, _ = weigh(args, loaded, "valid")
    read = {entry["name"]: entry for entry in content["attentions"]}
    assert set(expected["encoder.layers.0.self_attn"]) == {"mixed"}  # --attention-scope decoder
    assert set(expected["decoder.layers.1.encoder_attn"]) == {"source", "mixed"}
    for name, by_stage in expected.items():
        for stage, weights in by_stage.items():
            assert (weights > 0).all()
            found = torch.tensor(read[name][stage], dtype=torch.float64)
            torch.testing.assert_close(found, weights)
    assert "encoder-self 0 " in out and "cross 1, source heads" in out


def test_two_sets_are_compared(numbers, lm_checkpoint, numbers_alone):
    content, out = numbers(
        "importance", lm_checkpoint, "--subset", "valid,test", "--normalize", "layer"
    )
    assert [s["label"] for s in content["sets"]] == ["valid", "test"]
    points = []
    for found in content["sets"]:
        layers = [torch.tensor(entry["mixed"]) for entry in found["attentions"]]
        points.append(torch.cat([layer / layer.norm() for layer in layers]))
    assert content["pearson"]["mixed"] == pytest.approx(
        float(torch.corrcoef(torch.stack(points))[0, 1]), abs=1e-5
    )
    assert f"Pearson's r of the mixed heads: {content['pearson']['mixed']:.3f}" in out
    assert numbers_alone == ["importance", "importance-2", "importance-correlation"]


def test_activation_checkpointing_does_not_hide_the_gradients(fairseq_lm_checkpoint):
    args = Namespace(subset="valid", max_tokens=None, batch_size=None, limit=2)
    plain, recomputing = (
        weigh(args, load(fairseq_lm_checkpoint, overrides={"checkpoint_activations": on}), "valid")[
            0
        ]
        for on in (False, True)
    )
    for name, by_stage in plain.items():
        torch.testing.assert_close(recomputing[name]["mixed"], by_stage["mixed"])
