"""Products have few cases by default and all of them with --all, with ids that can be read."""

import itertools

import pytest
import torch

from tests import covering, ids

AXES = {"impl": ["a", "b", "c"], "dtype": [1, 2], "causal": [False, True], "size": [3, 4, 5, 6]}


def of_default_suite(cases):
    return [case.values for case in cases if not case.marks]


@pytest.mark.parametrize("choose", [covering.pairwise, covering.diagonal, covering.origin])
def test_the_cases_without_slow_ones_are_those_of_the_product_that_are_not_slow(choose):
    few = covering.cases(AXES, choose, with_slow=False)
    whole = covering.cases(AXES, choose, with_slow=True)
    assert [case.values for case in few] == of_default_suite(few) == of_default_suite(whole)
    assert [case.values for case in whole] == list(itertools.product(*AXES.values()))


def test_every_pair_of_values_of_two_axes_meets():
    rows = of_default_suite(covering.cases(AXES, covering.pairwise, with_slow=False))
    assert len(rows) < 24  # of 48
    for first, second in itertools.combinations(range(len(AXES)), 2):
        met = {(row[first], row[second]) for row in rows}
        left = list(AXES.values())[first]
        right = list(AXES.values())[second]
        assert met == set(itertools.product(left, right))


@pytest.mark.parametrize(
    "value, expected",
    [
        (torch.bfloat16, "bfloat16"),
        ((3, 4), "3 4"),
        ({"kdim": 12, "bias": False}, "kdim=12 bias=False"),
        ({}, "nothing"),
        (False, "causal=False"),
        (torch.zeros(2, 3), "tensor of 2 3"),
        (torch.relu, "relu"),
    ],
    ids=["dtype", "tuple", "dict", "empty dict", "bool", "tensor", "function"],
)
def test_a_value_has_an_id_that_says_what_it_is(value, expected):
    assert ids.id_of(value, "causal") == expected


def test_a_long_id_is_cut():
    assert ids.id_of(["flag"] * 99, "flags") == f"{'flag ' * 12}..."
