"""Test the command that shows the matrices which mix the heads."""

import numpy as np
import pytest
import torch

from mixhead_plugin.fairseq.analysis.adapter import attentions_of
from mixhead_plugin.fairseq.analysis.loading import batches, load
from tests.commands import LM_SIZES, SIZES


def test_a_constant_mixing_is_the_one_of_the_checkpoint(
    translation_checkpoint, numbers, numbers_alone
):
    content, printed = numbers("mixing", translation_checkpoint)
    found = content["attentions"]
    state = torch.load(translation_checkpoint)["model"]
    weights = {
        key[: -len(".head_mixing.weight")]: m
        for key, m in state.items()
        if key.endswith("head_mixing.weight")
    }
    assert sorted(found) == sorted(weights) and len(weights) == 4  # of the decoder alone
    for name, weight in weights.items():
        matrix = weight.double().numpy()
        np.testing.assert_allclose(found[name]["mixing"], matrix)
        assert found[name]["from_identity"] == pytest.approx(np.linalg.norm(matrix - np.eye(4)))
        assert found[name]["from_orthogonal"] == pytest.approx(
            np.linalg.norm(matrix.T @ matrix - np.eye(4))
        )
    assert "cross 1: M 4x4, from identity" in printed
    assert numbers_alone == ["mixing"]


def by_hand(loaded):
    """Return for each attention the real tokens [T] and M [T, H, H].

    M is computed from the projected queries, as q . W + B.
    """
    modules = {each.name: each.module for each in attentions_of(loaded.model)}
    found = {name: ([], []) for name in modules}
    queries = {}
    for name, attention in modules.items():
        attention.q_proj.register_forward_hook(
            lambda *call, name=name: queries.update({name: call[2]})
        )
    pad = loaded.task.source_dictionary.pad()
    for batch in batches(loaded):
        with torch.no_grad():
            loaded.model(**batch["net_input"])
        for name, attention in modules.items():
            source = batch["net_input"]["src_tokens"]  # [B, N]
            tokens = (
                batch["net_input"].get("prev_output_tokens", source)
                if name.startswith("decoder")
                else source
            )
            # [B, N, H, D]
            heads = queries[name].unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
            mixing = heads @ attention.head_mixing.query_weight + attention.head_mixing.bias
            found[name][0].append(tokens[tokens != pad])
            found[name][1].append(mixing[tokens != pad].detach().double())
    return {
        name: (torch.cat(tokens).numpy(), torch.cat(mixing).numpy())
        for name, (tokens, mixing) in found.items()
    }


# windows of a language model are padded here
@pytest.mark.parametrize("translation", [True, False])
def test_a_mixing_by_position_averages_real_tokens(
    translation, request, write_checkpoint, numbers, numbers_alone
):
    if translation:
        path = write_checkpoint(
            "B", request.getfixturevalue("translation_data"), "mixhead_transformer", *SIZES
        )
    else:
        path = request.getfixturevalue("lm_checkpoint")
    found = numbers("mixing", path)[0]["attentions"]
    loaded = load(path, cpu=True)
    expected = by_hand(loaded)
    assert list(found) == list(expected) and len(found) == (6 if translation else 2)
    for name, (tokens, mixing) in expected.items():
        entry = found[name]
        identity = np.linalg.norm(mixing - np.eye(4), axis=(1, 2))
        orthogonal = np.linalg.norm(mixing.transpose(0, 2, 1) @ mixing - np.eye(4), axis=(1, 2))
        assert entry["tokens"] == len(tokens)
        np.testing.assert_allclose(entry["mixing"], mixing.mean(0), rtol=1e-4, atol=1e-5)
        assert entry["from_identity"] == pytest.approx(identity.mean(), rel=1e-4)
        assert entry["from_orthogonal"] == pytest.approx(orthogonal.mean(), rel=1e-4)
        np.testing.assert_allclose(entry["spread"], mixing.std(0), rtol=1e-3, atol=1e-5)
    assert numbers_alone == ["mixing", "mixing_spread"]


def test_heads_of_other_numbers_in_each_layer(write_checkpoint, text_data, numbers):
    flags = ["--task", "language_modeling", "--tokens-per-sample", 16, *LM_SIZES, "--head-dim", 4]
    flags += ["--heads-per-layer", "decoder-self=3:2,4:4", "--head-mixing", "position-wise"]
    path = write_checkpoint("pruned", text_data, "mixhead_transformer_lm", *flags)
    content, printed = numbers("mixing", path)
    assert "decoder-self 0: M 3x2, rectangular, from orthogonal" in printed
    first, second = content["attentions"].values()
    assert np.shape(first["mixing"]) == (3, 2) and np.shape(second["mixing"]) == (4, 4)
    assert first["from_identity"] is None and second["from_identity"] > 0
    assert first["from_orthogonal"] > 0
    models = numbers("spectrum", path)[0]["models"]
    for name, numbers in {"pruned": [2, 4], "pruned, before mixing": [3, 4]}.items():
        layers = models[name]["places"]["decoder-self"]["layers"]
        assert [len(layer["effective_rank"]) for layer in layers.values()] == numbers


def test_a_model_that_mixes_nothing_is_refused(fairseq_translation_checkpoint, analysis, tmp_path):
    status, _, errors = analysis("mixing", fairseq_translation_checkpoint, "--output", tmp_path)
    assert status == 1
    assert "--head-mixing none" in errors and errors.count("\n") == 1
