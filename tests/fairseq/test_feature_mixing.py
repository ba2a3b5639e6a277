"""Test what mixes features of heads, beyond the equations.

test_attention.py has these for whole attentions.
"""

from unittest import mock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.overrides import TorchFunctionMode

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.criterions.penalties import PENALTIES, RegularizedPass
from mixhead_plugin.ops import fused
from mixhead_plugin.parts.feature_mixing import FEATURE_MIXINGS, MixingOfHeads
from mixhead_plugin.parts.kinds import AttentionSizes
from mixhead_plugin.parts.plain_linear import is_plain
from tests.attention_equations import E, H, definition, future
from tests.covering import each_once
from tests.helpers import shake

NAMES = [name for name, kind in FEATURE_MIXINGS.items() if kind.build]


def build(name, **options):
    torch.manual_seed(2)
    module = MixheadAttention(E, H, self_attention=True, feature_mixing=name, **options)
    return shake(module).double()


@each_once(
    name=NAMES,
    options=[{}, {"head_dim": 6}, {"bias": False}, {"q_noise": 1e-9, "qn_block_size": 4}],
)
def test_many_tokens_mix_weights_and_torchs_kernel_computes_the_equations(name, options):
    module = build(name, **options)
    x = torch.randn(9, 4, E, dtype=torch.float64)  # more tokens than E
    masks = {"attn_mask": future(9, torch.float64), "need_weights": False}
    with mock.patch.object(fused, "fused_attention", side_effect=fused.fused_attention) as kernel:
        out, _ = module(x, x, x, **masks)
    assert kernel.call_count == 1

    expected, _ = definition(module, x, x, future(9).bool())
    torch.testing.assert_close(out, expected)
    parameters = list(module.parameters())
    found = torch.autograd.grad(out.square().sum(), parameters)
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    torch.testing.assert_close(found, wanted)

    # as of an adapter, without a weight of its own
    module.q_proj = torch.nn.Sequential(module.q_proj)
    torch.testing.assert_close(module(x, x, x, **masks)[0], out)


@pytest.mark.parametrize("name", NAMES)
def test_the_orthogonal_penalty_acts_on_every_matrix_of_features_and_on_m(name):
    module = build(name)
    assert PENALTIES["orthogonal"].acts_on(module)

    module = build(name, head_mixing="position-independent")
    x = torch.randn(5, 2, E, dtype=torch.float64)
    real = torch.ones(2, 5, dtype=torch.bool)
    with RegularizedPass(module, {"orthogonal": 1.0}, {"encoder": real}) as regularized:
        module(x, x, x)

    part = module.feature_mixing
    if name == "output":
        matrices = [torch.eye(H) + part.left @ part.right.T]
    else:
        matrices = [part.query, part.key, part.value]
    expected = 0
    for matrix in (module.head_mixing.weight, *matrices):
        identity = torch.eye(len(matrix))
        expected = expected + (matrix.T @ matrix - identity).square().sum()
    torch.testing.assert_close(regularized.values["orthogonal"], expected)


@pytest.mark.parametrize(
    "name, mixed_features, matrices",
    [("heads", "k", {"key"}), ("shared", "qv", {"query", "value"})],
)
def test_only_the_features_to_mix_have_a_matrix(name, mixed_features, matrices):
    part = build(name, mixed_features=mixed_features).feature_mixing
    assert {name for name, _ in part.named_parameters()} == matrices


# ---- projections that are no plain nn.Linear ---------------------------------------------------


class Traced(torch.Tensor):
    """A tensor of a type of its own, as those of quantised weights are."""


def patched(linear):
    original = linear.forward
    linear.forward = lambda x: original(x) + 1


def with_a_module_inside(linear):
    linear.add_module("lora", torch.nn.Linear(1, 1))


def with_a_hook_before(linear):
    linear.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],))


def with_a_hook_behind(linear):
    linear.register_forward_hook(lambda module, inputs, output: 2 * output)


def with_a_hook_of_gradients(linear):
    linear.register_full_backward_hook(lambda module, d_inputs, d_outputs: (2 * d_inputs[0],))


def with_a_hook_before_gradients(linear):
    linear.register_full_backward_pre_hook(lambda module, d_outputs: (2 * d_outputs[0],))


def with_a_weight_of_another_type(linear):
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Traced))


def with_a_parametrization(linear):
    torch.nn.utils.parametrizations.weight_norm(linear)


def with_a_hook_of_all_modules(linear):
    def twice(module, inputs, output):
        return 2 * output if type(module) is torch.nn.Linear else None

    return register_module_forward_hook(twice)


def with_a_mode(linear):
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            is_its_product = func is torch.nn.functional.linear and args[1] is linear.weight
            return 2 * output if is_its_product else output

        def remove(self):
            self.__exit__(None, None, None)

    return Doubling().__enter__()


def with_a_hook_of_all_modules_gradients(linear):
    def twice(module, d_inputs, d_outputs):
        if type(module) is not torch.nn.Linear:
            return None
        return tuple(None if d_input is None else 2 * d_input for d_input in d_inputs)

    return register_module_full_backward_hook(twice)


# What a call of the projection does beside its weight and bias. Hooks of all modules, and modes,
# return a handle, by which the test removes them again.
NOT_PLAIN = [
    patched,
    with_a_module_inside,
    with_a_hook_before,
    with_a_hook_behind,
    with_a_hook_of_gradients,
    with_a_hook_before_gradients,
    with_a_weight_of_another_type,
    with_a_parametrization,
    with_a_hook_of_all_modules,
    with_a_hook_of_all_modules_gradients,
    with_a_mode,
]


@pytest.mark.parametrize("change", NOT_PLAIN)
def test_a_projection_that_is_not_plain_is_called(change):
    """For few tokens it always is; many tokens are computed alike then."""
    torch.manual_seed(4)
    mixing = MixingOfHeads(AttentionSizes(2, 3, 2, 3, 5))
    torch.nn.init.normal_(mixing.query)
    linear = torch.nn.Linear(5, 6)
    x = torch.randn(30, 5, requires_grad=True)

    def outcome(parts):
        out = torch.cat([mixing.project(linear, part, "query") for part in parts])
        return out, torch.autograd.grad(out.square().sum(), x)

    assert is_plain(linear)
    handle = change(linear)
    try:
        assert not is_plain(linear)
        torch.testing.assert_close(outcome([x]), outcome(x.split(3)))
    finally:
        if handle is not None:
            handle.remove()
