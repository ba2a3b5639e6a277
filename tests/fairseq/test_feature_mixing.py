"""Test what mixes features of heads beyond the equations, which test_attention.py has for whole
attentions.
"""

from unittest import mock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.criterions.penalties import PENALTIES, RegularizedPass
from mixhead_plugin.ops import fused
from mixhead_plugin.parts.feature_mixing import FEATURE_MIXINGS, FeatureMixing, is_plain
from mixhead_plugin.parts.kinds import AttentionSizes
from tests.covering import each_once
from tests.fairseq.definition import E, H, definition, future
from tests.helpers import shake

ONES = [name for name, kind in FEATURE_MIXINGS.items() if kind.build]


def build(name, **options):
    torch.manual_seed(2)
    return shake(
        MixheadAttention(E, H, self_attention=True, feature_mixing=name, **options)
    ).double()


@each_once(
    name=ONES, options=[{}, {"head_dim": 6}, {"bias": False}, {"q_noise": 1e-9, "qn_block_size": 4}]
)
def test_many_tokens_mix_weights_and_torchs_kernel_computes_the_equations(name, options):
    # more than E tokens
    module, x = build(name, **options), torch.randn(9, 4, E, dtype=torch.float64)
    with mock.patch.object(fused, "fused_attention", side_effect=fused.fused_attention) as kernel:
        out = module(x, x, x, attn_mask=future(9, torch.float64), need_weights=False)[0]
    assert kernel.call_count == 1
    expected = definition(module, x, x, future(9).bool())[0]
    torch.testing.assert_close(out, expected)
    parameters = list(module.parameters())
    found, wanted = (
        torch.autograd.grad(result.square().sum(), parameters) for result in (out, expected)
    )
    torch.testing.assert_close(found, wanted)
    # as of an adapter, without a weight of its own
    module.q_proj = torch.nn.Sequential(module.q_proj)
    torch.testing.assert_close(
        module(x, x, x, attn_mask=future(9, torch.float64), need_weights=False)[0], out
    )


@pytest.mark.parametrize("name", ONES)
def test_the_orthogonal_penalty_acts_on_every_matrix_of_features_and_on_m(name):
    module, real = (
        build(name, head_mixing="position-independent"),
        torch.ones(2, 5, dtype=torch.bool),
    )
    assert PENALTIES["orthogonal"].acts_on(build(name))
    with RegularizedPass(module, {"orthogonal": 1.0}, {"encoder": real}) as regularized:
        module(*[torch.randn(5, 2, E, dtype=torch.float64)] * 3)
    part, expected = module.feature_mixing, 0
    features = (
        [torch.eye(H) + part.left @ part.right.T]
        if name == "output"
        else [part.query, part.key, part.value]
    )
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


class Traced(torch.Tensor):
    """A tensor of a type of its own, as those of quantised weights are."""


def patch(linear):
    original = linear.forward
    linear.forward = lambda x: original(x) + 1


def doubled(x):
    return x if x is None else 2 * x


# What a call of the projection does beside its weight and bias; each is removed again where it is
# not the module's own.
NOT_PLAIN = {
    "a patched forward": patch,
    "a module inside": lambda linear: linear.add_module("lora", torch.nn.Linear(1, 1)),
    "a hook before": lambda linear: linear.register_forward_pre_hook(lambda module, x: (2 * x[0],)),
    "a hook behind": lambda linear: linear.register_forward_hook(lambda module, x, out: 2 * out),
    "a hook of gradients": lambda linear: linear.register_full_backward_hook(
        lambda *_: (2 * _[1][0],)
    ),
    "a hook of gradients before": lambda linear: linear.register_full_backward_pre_hook(
        lambda *_: (2 * _[1][0],)
    ),
    "a weight of another type": lambda linear: setattr(
        linear, "weight", torch.nn.Parameter(linear.weight.detach().as_subclass(Traced))
    ),
    "a parametrization": lambda linear: torch.nn.utils.parametrizations.weight_norm(linear),
    "a hook of all modules": lambda _: register_module_forward_hook(
        lambda module, x, out: 2 * out if type(module) is torch.nn.Linear else None
    ),
    "a hook of all modules' gradients": lambda _: register_module_full_backward_hook(
        lambda module, d_in, d_out: (
            tuple(map(doubled, d_in)) if type(module) is torch.nn.Linear else None
        )
    ),
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_a_projection_that_is_not_plain_is_called(what):
    """For few tokens it always is; many tokens are computed alike then."""
    torch.manual_seed(4)
    mixing = FeatureMixing(AttentionSizes(2, 3, 2, 3, 5), of_heads=True)
    torch.nn.init.normal_(mixing.query)
    linear, x = torch.nn.Linear(5, 6), torch.randn(30, 5, requires_grad=True)
    assert is_plain(linear)
    handle = NOT_PLAIN[what](linear)
    try:
        assert not is_plain(linear)
        outcomes = []
        for parts in ([x], x.split(3)):
            out = torch.cat([mixing.project(linear, part, "query") for part in parts])
            outcomes.append((out, torch.autograd.grad(out.square().sum(), x)[0]))
        torch.testing.assert_close(*outcomes)
    finally:
        if "all modules" in what:
            handle.remove()
