"""Test pictures of matrices that mix the heads."""

import numpy as np
import torch

from mixhead_plugin.heads.mixing_figures import draw_matrices
from mixhead_plugin.heads.mixing_statistics import LayerMixing


def test_the_picture_shows_what_the_ones_of_the_diagonal_would_hide():
    mixing = torch.eye(3).double() + 0.1 * torch.randn(3, 3).double()
    layers = {
        "cross": [
            LayerMixing("cross", 0, "position-wise", m, 0.0, 0.0, 5, m / 2)
            for m in (mixing, mixing[:, :2])
        ]
    }
    square, whole = (axes.images[0] for axes in draw_matrices(layers).axes[:2])
    np.testing.assert_allclose(square.get_array(), mixing - torch.eye(3))
    np.testing.assert_allclose(whole.get_array(), mixing[:, :2])
    np.testing.assert_allclose(
        draw_matrices(layers, spread=True).axes[0].images[0].get_array(), mixing / 2
    )
