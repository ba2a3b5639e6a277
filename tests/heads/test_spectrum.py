"""Test how many dimensions matrices have."""

import math

import numpy as np
import pytest
import torch

from mixhead_plugin.heads.spectrum import (
    cumulative,
    effective_rank,
    log_spectrum,
    rank_over_heads,
    singular_values,
)


def test_the_definitions_at_known_singular_values():
    values = torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(
        cumulative(values), torch.tensor([0.75, 1.0, 1.0], dtype=torch.float64)
    )
    expected = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert effective_rank(values).item() == pytest.approx(expected)
    assert effective_rank(torch.zeros(3)).isnan()


def test_singular_values_are_those_of_numpy():
    matrices = torch.rand(3, 4, 6, 5)
    np.testing.assert_allclose(
        singular_values(matrices),
        np.linalg.svd(matrices.double().numpy(), compute_uv=False),
        atol=1e-12,
    )


def test_the_log_of_softmax_has_as_many_dimensions_as_queries_and_a_mixture_has_more():
    heads = (torch.randn(2, 12, 3).double() @ torch.randn(2, 3, 9).double()).softmax(-1)
    (first, second), mixture = log_spectrum(heads), log_spectrum(heads.mean(0, keepdim=True))[0]
    assert (singular_values(heads) > 1e-4).all()  # the rank of P itself shows nothing
    for values in (first, second):
        assert values[0] == 1 and (values[:3] > 1e-3).all() and (values[3:] < 1e-12).all()
    # rows without their mean have no ninth
    assert (mixture[3:8] > 1e-4).all() and mixture[8] < 1e-12


def test_weights_without_a_logarithm_are_left_out():
    whole = torch.rand(5, 4).softmax(-1)
    found = log_spectrum(torch.stack([whole, whole.tril(), -whole]))
    torch.testing.assert_close(found[:1], log_spectrum(whole[None]))
    assert found[1:].isnan().all()


def test_the_rank_over_heads_is_that_of_one_token():
    alike = torch.rand(1, 1, 4).expand(3, 1, 4)
    apart = torch.eye(4)[:3, None]
    ranks = rank_over_heads(torch.cat([alike, apart], 1))  # [H, 2, Nk]
    torch.testing.assert_close(ranks, torch.tensor([1.0, 3.0]).double(), rtol=0, atol=1e-5)
