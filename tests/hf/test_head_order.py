"""Gradients tell whether head h comes from the h-th part of some features."""

import itertools

import pytest
import torch
from torch import nn

from tests.hf.models import hf

HEADS = 5
SIZE = 4

NORMS = {
    "none": nn.Identity(),
    "of lengths": nn.RMSNorm(HEADS * SIZE),
    "of lengths and means": nn.LayerNorm(HEADS * SIZE),
}


def by_part(features):
    return features.unflatten(0, (HEADS, SIZE))


def given():
    torch.manual_seed(0)
    return torch.randn(HEADS * SIZE, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("norm", NORMS)
def test_any_two_heads_that_changed_places_are_seen_behind_a_norm_over_all(norm):
    features = given()
    heads = by_part(NORMS[norm].double()(features))
    assert hf.head_order.in_order(heads, features, by_part)
    for i, j in itertools.combinations(range(HEADS), 2):
        order = list(range(HEADS))
        order[i] = j
        order[j] = i
        assert not hf.head_order.in_order(heads[order], features, by_part), (i, j)


def test_heads_that_come_from_elsewhere_or_are_not_finite_are_in_no_order():
    features = given()
    assert not hf.head_order.in_order(by_part(given()), features, by_part)
    assert not hf.head_order.in_order(by_part(features) * torch.nan, features, by_part)
