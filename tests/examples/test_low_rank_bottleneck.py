"""examples/low_rank_bottleneck checks theorem 1.

It also fits heads of growing size to random matrices.
"""

import json

import pytest
import torch
from low_rank_bottleneck.fitting import layer_weights
from low_rank_bottleneck.run import main
from low_rank_bottleneck.theorems import checks, construct, scores_of, smallest_error

from mixhead_plugin.ops import NORMALIZERS

SMALL = "--positions 4 --heads 2 --sizes 1 3 --seeds 2 --iterations 6".split()


@pytest.fixture(scope="module")
def matrices():
    """Return X [2, 6, 9] of full row rank and P [2, 3, 6, 6], positive, whose rows sum to 1."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(2, 6, 9, generator=generator, dtype=torch.float64)
    return embedding, torch.randn(2, 3, 6, 6, generator=generator, dtype=torch.float64).softmax(-1)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return the results of run.py, without its pictures."""
    output = tmp_path_factory.mktemp("low_rank_bottleneck")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("low_rank_bottleneck.run.draw", lambda *_: [])
        main([*SMALL, "--output", str(output)])
    torch.set_num_threads(threads)
    return json.loads((output / "results.json").read_text())


def errors(outcome, task, attention):
    rows = [
        row for row in outcome["errors"] if row["task"] == task and row["attention"] == attention
    ]
    return {row["head_size"]: row["mean"] for row in rows}


@pytest.mark.parametrize("positions", [3, 8])
def test_every_check_holds(positions):
    found = checks(positions)
    assert [check.name for check in found if not check.holds] == []
    assert sum("theorem 1" in check.name for check in found) == 6


@pytest.mark.parametrize("normalizer", ["softmax", "sigsoftmax"])
def test_the_scores_are_the_normalizers_inverse(normalizer, matrices):
    weights = NORMALIZERS[normalizer].weights(scores_of(matrices[1], normalizer))
    torch.testing.assert_close(weights, matrices[1])


@pytest.mark.parametrize(
    "normalizer, head_size, exact",
    [
        ("softmax", 4, False),
        ("softmax", 5, True),  # n - 1: a constant in each row is free
        ("sigsoftmax", 5, False),
        ("sigsoftmax", 6, True),
    ],
)
def test_the_construction_is_exact_from_its_size_on(normalizer, head_size, exact, matrices):
    embedding, target = matrices
    query, key = construct(embedding, target, head_size, normalizer)
    assert query.shape == key.shape == (2, 3, 9, head_size)
    worst = (layer_weights(embedding, query, key, normalizer) - target).abs().max()
    assert worst < 1e-12 if exact else worst > 1e-3


def test_no_head_comes_below_the_smallest_error(matrices):
    embedding, target = matrices
    assert (smallest_error(target, 5) == 0).all()
    for head_size in (1, 3, 4):
        least = smallest_error(target, head_size)
        query, key = construct(embedding, target, head_size, "softmax")
        # P moved nearly all the way to what the head can give: the bound has to shrink with the
        # distance.
        reached = layer_weights(embedding, query, key, "softmax")
        for share in (0.0, 0.9, 0.999):
            near = target + share * (reached - target)
            error = torch.linalg.matrix_norm(reached - near)
            assert (smallest_error(near, head_size) > 0).all()
            assert (smallest_error(near, head_size) <= error).all()
        assert (least > 0).all()


@pytest.mark.parametrize("task", ["own", "one"])
def test_errors_end_where_the_theorem_says(task, outcome):
    softmax = errors(outcome, task, "softmax")
    sigsoftmax = errors(outcome, task, "sigsoftmax")
    assert softmax[1] > 0.1 and softmax[3] < 1e-9  # n - 1
    assert sigsoftmax[1] > 0.1 and 1e-6 < sigsoftmax[3] < 0.1
    (fixhead,) = errors(outcome, task, "fixhead").items()
    assert fixhead[0] == 4 and fixhead[1] < 1e-9


def test_two_heads_mixed_come_nearer_to_one_matrix_than_one(outcome):
    assert errors(outcome, "one", "mixhead")[1] < 0.9 * errors(outcome, "one", "softmax")[1]
