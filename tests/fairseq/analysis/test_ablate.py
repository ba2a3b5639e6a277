"""Test the ablation of single heads."""

import pytest
import torch

from mixhead_plugin.fairseq.analysis.ablate import EXPERIMENTS, ablations
from mixhead_plugin.fairseq.analysis.heads import all_heads, attentions, without
from mixhead_plugin.fairseq.analysis.loading import batches, load
from mixhead_plugin.fairseq.attention import HeadGates, MixheadAttention


def passing(gates):
    return [1.0] * 4 if gates is None else gates.tolist()


def test_each_head_goes_once_and_stays_alone_once():
    found = {
        "mixed": MixheadAttention(8, 4, head_mixing="average", self_attention=True),
        "plain": MixheadAttention(8, 4, self_attention=True),
    }
    seen = []

    def score():
        seen.append([(passing(a.gates.source), passing(a.gates.mixed)) for a in found.values()])
        return {"loss": float(len(seen))}

    measured = {experiment: ablations(found, experiment, score) for experiment in EXPERIMENTS}
    heads = all_heads(found)
    assert len(seen) == len(EXPERIMENTS) * len(heads) == 24
    ones, eye = [1.0] * 4, torch.eye(4)
    for i, head in enumerate(heads):
        for experiment, gates in (("single", (1 - eye)[head.index]), ("only", eye[head.index])):
            expected = {name: {"source": ones, "mixed": ones} for name in found}
            expected[head.attention][head.kind] = gates.tolist()
            number = i + (len(heads) if experiment == "only" else 0)
            assert seen[number] == [(e["source"], e["mixed"]) for e in expected.values()]
            assert measured[experiment]["loss"][head.attention][head.kind][head.index] == number + 1
    assert all(attention.gates is None for attention in found.values())


@pytest.mark.parametrize("fails", [False, True])
def test_the_gates_that_were_there_come_back(fails):
    attention = MixheadAttention(8, 2, self_attention=True)
    attention.gates = before = HeadGates(mixed=torch.tensor([0.5, 2.0]))
    try:
        with without({"a": attention}, all_heads({"a": attention})):
            assert attention.gates is not before
            assert not fails, "out of memory"
    except AssertionError:
        assert fails
    assert attention.gates is before


def test_the_losses_are_those_of_the_model_without_the_head_s_part_of_out_proj(
    numbers, fairseq_lm_checkpoint
):
    content, out = numbers("ablate", fairseq_lm_checkpoint)
    assert f"baseline: loss (base 2) {content['baseline']['loss']:.4f}" in out

    loaded = load(fairseq_lm_checkpoint)
    samples = list(batches(loaded))

    def loss_without(columns):
        weight = attentions(loaded.model)["decoder.layers.1.self_attn"].out_proj.weight.data
        whole = weight.clone()
        weight[:, columns] = 0
        with torch.no_grad():
            loss, size = map(
                sum, zip(*(loaded.criterion(loaded.model, sample)[:2] for sample in samples))
            )
        weight.copy_(whole)
        return float(loss) / size / torch.log(torch.tensor(2.0)).item()

    assert content["baseline"]["loss"] == pytest.approx(loss_without([]), rel=1e-5)
    second = content["single"]["loss"][1]
    assert (second["name"], second["place"], second["layer"]) == (
        "decoder.layers.1.self_attn",
        "decoder-self",
        1,
    )
    assert second["mixed"][2] == pytest.approx(loss_without([8, 9, 10, 11]), rel=1e-5)
    alone = content["only"]["loss"][1]["mixed"][2]
    assert alone == pytest.approx(
        loss_without([i for i in range(16) if i not in (8, 9, 10, 11)]), rel=1e-5
    )


def test_two_sets_are_compared_by_the_scores_without_each_head(
    numbers, lm_checkpoint, numbers_alone
):
    """Figure 4 of the sixteen-heads essay."""
    content, out = numbers("ablate", lm_checkpoint, "--subset", "valid,test", "--limit", 2)
    first, second = content["sets"]
    assert (first["subset"], second["subset"]) == ("valid", "test")
    assert first["baseline"]["loss"] != second["baseline"]["loss"]
    for experiment in EXPERIMENTS:
        for kind in ("source", "mixed"):
            sets = [
                torch.tensor([layer[kind] for layer in each[experiment]["loss"]])
                for each in (first, second)
            ]
            expected = torch.corrcoef(torch.stack([scores.flatten().double() for scores in sets]))[
                0, 1
            ]
            r = content["pearson"][experiment]["loss"][kind]
            assert r == pytest.approx(float(expected), abs=1e-4)
            words = f"{kind} heads, loss (base 2) {EXPERIMENTS[experiment]}, valid and test"
            assert f"Pearson's r of the {words}: {r:.3f}" in out
    usual = [f"ablate-{experiment}-loss" for experiment in EXPERIMENTS]
    second_set = [f"{name}-2" for name in usual]
    correlations = [f"{name}-correlation" for name in usual]
    assert numbers_alone == [*usual, *second_set, *correlations]


def test_more_than_two_sets_are_refused(analysis, lm_checkpoint):
    for subset in ("valid,test,train", "valid,valid"):
        status, _, errors = analysis("ablate", lm_checkpoint, "--subset", subset)
        message = f"--subset {subset}: must be one set, or two different ones"
        assert status == 1
        assert errors.endswith(f"error: {message}\n")
