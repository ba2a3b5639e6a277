"""examples/nearest_neighbour draws points on the sphere.

One full-rank head finds the nearest one.
"""

import pytest
import torch
from nearest_neighbour.run import DIMENSION, TASK, Model, draw, measure
from synthetic import Setting, run


def test_the_target_is_the_nearest_point():
    points, queries, nearest = draw(16, torch.Generator().manual_seed(0))
    for row in (points, queries):
        torch.testing.assert_close(row.norm(dim=-1), torch.ones(row.shape[:2]))
    for some, ask, target in zip(points[:4], queries[:4], nearest[:4]):
        for query, found in zip(ask, target):
            best = min(some, key=lambda point: float((point - query).square().sum()))
            assert torch.equal(best, found)


def test_one_head_of_full_rank_suffices():
    """With W_Q W_K = a large multiple of the identity, softmax is the maximum."""
    model = Model("softmax", DIMENSION, DIMENSION)
    one = torch.eye(DIMENSION)
    scales = {"q_proj": 1e4, "k_proj": 1.0, "v_proj": 1.0, "out_proj": 1.0}
    model.attention.load_state_dict(
        {f"{name}.weight": scale * one for name, scale in scales.items()}
    )
    with torch.no_grad():
        assert (
            measure(model, draw(16, torch.Generator().manual_seed(2)))["mean squared error"] < 0.01
        )


@pytest.mark.slow
def test_a_full_head_learns_more_than_small_heads_and_these_more_than_uniform_weights():
    heads = [("softmax", 16), ("softmax", 2), ("uniform", 2)]
    errors = [
        run(TASK, Setting(attention, size, 16, 0.03, 1.0, 120, 1))["mean squared error"]
        for attention, size in heads
    ]
    assert errors[0] + 0.1 < errors[1] < errors[2] - 0.05 and errors[2] == pytest.approx(
        0.93, abs=0.05
    ), errors
