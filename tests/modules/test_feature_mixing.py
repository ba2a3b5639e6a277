"""Test what mixes features of heads beyond the equations, which test_attention.py has for whole attentions."""

from unittest import mock

import pytest
import torch

from mixhead_plugin.modules.attention import MixheadAttention
from mixhead_plugin.modules.penalties import PENALTIES, RegularizedPass
from mixhead_plugin.ops import fused
from mixhead_plugin.parts.feature_mixing import FEATURE_MIXINGS
from tests.covering import each_once
from tests.helpers import shake
from tests.modules.definition import E, H, definition, future

ONES = [name for name, kind in FEATURE_MIXINGS.items() if kind.build]


def build(name, **options):
    torch.manual_seed(2)
    return shake(MixheadAttention(E, H, self_attention=True, feature_mixing=name, **options)).double()


@each_once(name=ONES, options=[{}, {"head_dim": 6}, {"bias": False}, {"q_noise": 1e-9, "qn_block_size": 4}])
def test_many_tokens_mix_weights_and_torchs_kernel_computes_the_equations(name, options):
    module, x = build(name, **options), torch.randn(9, 4, E, dtype=torch.float64)  # more than E tokens
    with mock.patch.object(fused, "fused_attention", side_effect=fused.fused_attention) as kernel:
        out = module(x, x, x, attn_mask=future(9, torch.float64), need_weights=False)[0]
    assert kernel.call_count == 1
    expected = definition(module, x, x, future(9).bool())[0]
    torch.testing.assert_close(out, expected)
    parameters = list(module.parameters())
    found, wanted = (torch.autograd.grad(result.square().sum(), parameters) for result in (out, expected))
    torch.testing.assert_close(found, wanted)
    module.q_proj = torch.nn.Sequential(module.q_proj)  # as of an adapter, without a weight of its own
    torch.testing.assert_close(module(x, x, x, attn_mask=future(9, torch.float64), need_weights=False)[0], out)


@pytest.mark.parametrize("name", ONES)
def test_the_orthogonal_penalty_acts_on_every_matrix_of_features_and_on_m(name):
    module, real = build(name, head_mixing="position-independent"), torch.ones(2, 5, dtype=torch.bool)
    assert PENALTIES["orthogonal"].acts_on(build(name))
    with RegularizedPass(module, {"orthogonal": 1.0}, {"encoder": real}) as regularized:
        module(*[torch.randn(5, 2, E, dtype=torch.float64)] * 3)
    part, expected = module.feature_mixing, 0
    features = [torch.eye(H) + part.left @ part.right.T] if name == "output" else [part.query, part.key, part.value]
    for matrix in (module.head_mixing.weight, *features):
        expected = expected + (matrix.T @ matrix - torch.eye(len(matrix))).square().sum()
    torch.testing.assert_close(regularized.values["orthogonal"], expected)


def test_the_features_to_mix_are_those_of_the_option_and_only_they_have_a_matrix():
    for name, features in (("heads", "k"), ("shared", "qv")):
        names = {"q": "query", "k": "key", "v": "value"}
        part = build(name, mixed_features=features).feature_mixing
        assert {key for key, _ in part.named_parameters()} == {names[letter] for letter in features}
    for refused in ({"feature_mixing": "output", "mixed_features": "q"}, {"mixed_features": "k"}):
        with pytest.raises(ValueError, match=r"mixed_features .: .* must be qkv"):
            MixheadAttention(E, H, **refused)
