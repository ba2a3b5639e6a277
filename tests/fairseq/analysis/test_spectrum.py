"""Test singular values, effective ranks and the command that reports them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mixhead_plugin.fairseq.analysis import loading
from mixhead_plugin.fairseq.analysis.loading import batches, load
from mixhead_plugin.fairseq.analysis.spectrum import windows
from mixhead_plugin.heads.spectrum import NOTE
from tests.helpers import task


def test_windows_are_the_beginnings_of_sentences_that_are_long_enough_on_both_sides(monkeypatch):
    def batch(source, target):
        source = torch.tensor([source])
        target = torch.tensor([target])
        lengths = torch.tensor([source.shape[1]])
        return {
            "net_input": {
                "src_tokens": source,
                "src_lengths": lengths,
                "prev_output_tokens": target,
            }
        }

    long = batch([4, 5, 6, 7], [2, 8, 9]), batch([1, 9, 8, 7], [2, 4, 5, 6])
    # 1 is padding
    short = batch([4, 5], [2, 8, 9, 7]), batch([4, 5, 6], [2, 8]), batch([4, 5, 6, 7], [2, 8, 1, 1])
    monkeypatch.setattr(loading, "batches", lambda *args, **settings: iter([*short, *long]))
    words = task().source_dictionary
    loaded = SimpleNamespace(task=SimpleNamespace(source_dictionary=words, target_dictionary=words))
    found = list(windows(loaded, "valid", 3))
    assert [{name: x.tolist() for name, x in window.items()} for window in found] == [
        {"src_tokens": [[4, 5, 6]], "prev_output_tokens": [[2, 8, 9]], "src_lengths": [3]},
        {"src_tokens": [[9, 8, 7]], "prev_output_tokens": [[2, 4, 5]], "src_lengths": [3]},
    ]


def by_hand(path, length):
    """Return curves and ranks [layers, ...] of weights, with NumPy.

    The weights are those that fairseq's own call returns.
    """
    loaded = load(path, cpu=True)
    pad = loaded.task.source_dictionary.pad()
    curves = []
    ranks = []
    for batch in batches(loaded):
        for tokens in batch["net_input"]["src_tokens"]:
            if tokens.ne(pad).sum() < length:
                continue
            weights = []
            with torch.no_grad():
                _, extra = loaded.model.decoder.extract_features(tokens[None, :length], None)
                for layer, states in zip(loaded.model.decoder.layers, extra["inner_states"]):
                    states = (
                        layer.self_attn_layer_norm(states) if layer.normalize_before else states
                    )
                    mask = torch.full((length, length), -math.inf).triu(1)
                    settings = dict(
                        key=states, value=states, attn_mask=mask, need_head_weights=True
                    )
                    weights.append(layer.self_attn(states, **settings)[1][:, 0].double())
            values = np.linalg.svd(torch.stack(weights).numpy(), compute_uv=False)  # [layers, H, n]
            shares = values / values.sum(-1, keepdims=True)
            curves.append(np.cumsum(shares, -1).mean(1))
            ranks.append(np.exp(-(shares * np.log(shares)).sum(-1)))
    return np.mean(curves, 0), np.mean(ranks, 0), len(curves)


def test_the_numbers_are_those_of_the_returned_weights(
    lm_checkpoint, fairseq_lm_checkpoint, numbers
):
    length = 7
    paths = {"mixhead_lm": lm_checkpoint, "fairseq_lm": fairseq_lm_checkpoint}
    found, printed = numbers("spectrum", *paths.values(), "--length", length, "--windows", 1000)
    assert found["length"] == length
    assert list(found["models"]) == ["mixhead_lm", "mixhead_lm, before mixing", "fairseq_lm"]
    for name, path in paths.items():
        curves, ranks, number = by_hand(path, length)
        model = found["models"][name]
        assert model["windows"] == number > 1
        assert list(model["places"]) == ["decoder-self"]
        site = model["places"]["decoder-self"]
        np.testing.assert_allclose(
            [p["cumulative"] for p in site["layers"].values()], curves, rtol=1e-5
        )
        np.testing.assert_allclose(
            [p["effective_rank"] for p in site["layers"].values()], ranks, rtol=1e-4
        )
        np.testing.assert_allclose(site["mean_cumulative"], curves.mean(0), rtol=1e-5)
        assert site["mean_effective_rank"] == pytest.approx(ranks.mean(), rel=1e-4)
        assert (
            f"{name}: decoder-self: mean effective rank {ranks.mean():.2f} of {length}, windows: "
            f"{number}" in printed
        )


def test_source_heads_stand_beside_the_mixed_ones(translation_checkpoint, numbers, numbers_alone):
    found, printed = numbers("spectrum", translation_checkpoint)
    models = found["models"]
    assert {name: list(model["places"]) for name, model in models.items()} == {
        "mixhead_translation": ["encoder-self", "decoder-self", "cross"],
        "mixhead_translation, before mixing": ["decoder-self", "cross"],  # only the decoder mixes
    }
    mixed, source = (model["places"]["cross"]["mean_effective_rank"] for model in models.values())
    assert mixed != pytest.approx(source, rel=1e-3)
    assert (
        f"mixhead_translation, before mixing: cross: mean effective rank {source:.2f} of 4"
        in printed
    )
    assert NOTE in printed and found["note"] == NOTE
    assert numbers_alone == ["spectrum", "effective_rank", "log_and_heads"]
