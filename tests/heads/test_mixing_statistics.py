"""Test how far matrices are from the identity and from orthogonality."""

import pytest
import torch

from mixhead_plugin.heads.mixing_statistics import as_json, distances, of_matrix


def test_distances_are_frobenius_norms():
    mixing = torch.tensor(
        [[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 1.0]]]
    )
    torch.testing.assert_close(
        distances(mixing), torch.tensor([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]])
    )
    identity, orthogonal = distances(2 * torch.eye(4)[:, :3])  # rectangular
    assert identity.isnan() and orthogonal.item() == pytest.approx(3 * 3**0.5)


def test_the_site_of_an_attention_is_its_place_in_a_file():
    entry = as_json(of_matrix("decoder.layers.1.encoder_attn", "average", torch.full((2, 2), 0.5)))
    assert list(entry) == [
        "place",
        "layer",
        "head_mixing",
        "mixing",
        "from_identity",
        "from_orthogonal",
    ]
    assert (entry["place"], entry["layer"]) == ("cross", 1)
