"""Test the command that weighs heads; tests/heads/test_adapters.py has the definition."""

from argparse import Namespace

import pytest
import torch

from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.fairseq.analysis.importance import weigh
from mixhead_plugin.fairseq.analysis.loading import batches, load
from mixhead_plugin.heads.choosing import Head


def by_differences(loaded, head):
    """Return the importance of a head by central differences of the loss of the training."""
    loaded.model.double()
    (attention,) = (each for each in attentions_of(loaded.model) if each.name == head.attention)
    # large, because fairseq's criterions compute in float32 whatever the model does
    step = 1e-2
    slopes = []
    for sentence in batches(loaded, batch_size=1):
        losses = []
        for value in (1 + step, 1 - step):
            factors = torch.ones(attention.heads[head.stage], 1, dtype=torch.float64)
            factors[head.number] = value
            gate = attention.gate(head.stage, lambda rows, factors=factors: rows * factors)
            with torch.no_grad():
                loss, *_ = loaded.criterion(loaded.model, sentence)
            gate.remove()
            losses.append(float(loss))
        above, below = losses
        slopes.append(abs(above - below) / (2 * step))
    return sum(slopes) / len(slopes)


def test_every_head_is_weighed_by_the_loss_of_the_training(numbers, translation_checkpoint):
    found, out = numbers("importance", translation_checkpoint, "--batch-size", 4, "--cpu")
    (content,) = found["sets"]
    assert (content["subset"], content["sentences"]) == ("valid", 15)
    read = {entry["name"]: entry for entry in content["attentions"]}
    assert len(read) == 6  # two layers of the encoder, and two of the decoder with two each
    for name, entry in read.items():
        stages = ["mixed"]  # --attention-scope decoder
        if name.startswith("decoder"):
            stages = ["source", "mixed"]
        assert [stage for stage in ("source", "mixed") if stage in entry] == stages
        for stage in stages:
            assert len(entry[stage]) == 4
            assert min(entry[stage]) > 0

    loaded = load(translation_checkpoint, cpu=True)
    for head in (
        Head("encoder.layers.0.self_attn", "mixed", 3),
        Head("decoder.layers.1.encoder_attn", "source", 2),
    ):
        weight = read[head.attention][head.stage][head.number]
        assert weight == pytest.approx(by_differences(loaded, head), rel=5e-3)
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
