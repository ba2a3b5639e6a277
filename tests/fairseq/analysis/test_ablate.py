"""Test the command that scores a model without single heads."""

import pytest
import torch

from mixhead_plugin.fairseq.analysis.loading import batches, load
from mixhead_plugin.heads.ablation import EXPERIMENTS


def test_the_losses_are_those_of_the_model_without_the_head_s_part_of_out_proj(
    numbers, fairseq_lm_checkpoint
):
    content, out = numbers("ablate", fairseq_lm_checkpoint)
    assert f"baseline: loss (base 2) {content['baseline']['loss']:.4f}" in out

    loaded = load(fairseq_lm_checkpoint)
    samples = list(batches(loaded))

    def loss_without(columns):
        weight = loaded.model.decoder.layers[1].self_attn.out_proj.weight.data
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
        for stage in ("source", "mixed"):
            losses = []  # of both sets, one number for each head
            for each in (first, second):
                by_layer = [layer[stage] for layer in each[experiment]["loss"]]
                losses.append(torch.tensor(by_layer).flatten().double())
            expected = torch.corrcoef(torch.stack(losses))[0, 1]
            r = content["pearson"][experiment]["loss"][stage]
            assert r == pytest.approx(float(expected), abs=1e-4)
            words = f"{stage} heads, loss (base 2) {EXPERIMENTS[experiment].words}, valid and test"
            assert f"Pearson's r of the {words}: {r:.3f}" in out
    usual = [f"ablate-{experiment}-loss" for experiment in EXPERIMENTS]
    second_set = [f"{name}-2" for name in usual]
    correlations = [f"{name}-correlation" for name in usual]
    assert numbers_alone == [*usual, *second_set, *correlations]


def test_a_model_without_heads_is_refused_before_it_is_scored(
    analysis, write_checkpoint, text_data, tmp_path
):
    flags = "--task language_modeling --tokens-per-sample 16 --decoder-layers 1".split()
    sizes = ["--decoder-embed-dim", 16, "--decoder-kernel-size-list", "[3]"]
    checkpoint = write_checkpoint("convolutions", text_data, "lightconv_lm", *flags, *sizes)
    status, printed, errors = analysis("ablate", checkpoint, "--output", tmp_path)
    assert (status, printed) == (1, "")
    assert "model LightConvLanguageModel: has no multi-head attention; must be" in errors
