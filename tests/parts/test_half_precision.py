"""Parts stay in float32 beside a model in half precision, so that training moves them."""

import copy
import warnings

import pytest
import torch

from mixhead_plugin.nn import MixedAttention, mixing_parameters
from mixhead_plugin.parts import PARTS, keep_float32, warn_of_half_precision

E, H = 16, 4
HALF = [torch.bfloat16, torch.float16]

TRAINED = {"relative_gain": {"relative_gain": 3}}
for _option, _table in PARTS.items():
    for _value, _kind in _table.items():
        if _kind.trained:
            TRAINED[f"{_option} {_value}"] = {_option: _value}


def keep_parts_in_float32(module, dtype):
    """Return a copy in another dtype, but for its parts, as docs/python.md does."""
    module = copy.deepcopy(module)
    parts = {name: each.data for name, each in mixing_parameters(module).items()}
    module.to(dtype)
    for name, parameter in mixing_parameters(module).items():
        parameter.data = parts[name]
    return module


def built(name):
    """Return a module whose parts are away from their start, but have the 1s that they start at."""
    module = MixedAttention(E, H, batch_first=True, **TRAINED[name])
    for parameter in mixing_parameters(module).values():
        noise = 0.3 * torch.randn(parameter.shape)
        parameter.data += noise.masked_fill(parameter == 1, 0)
    return module


def called(module, x):
    return module(x, x, x, need_weights=False)[0]


# With more tokens than features a feature mixing acts on weights, not on features.
@pytest.mark.parametrize("length", [5, 20])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_a_part_in_float32_computes_and_trains_beside_half_precision(name, dtype, length):
    module = keep_parts_in_float32(built(name), dtype)
    x = torch.randn(2, length, E, dtype=dtype)
    found = called(module, x)
    assert found.dtype == dtype

    exact = called(copy.deepcopy(module).double(), x.double())
    error = torch.linalg.norm(found - exact) / torch.linalg.norm(exact)
    assert 0 < error < torch.finfo(dtype).eps

    parts = mixing_parameters(module)
    before = {name: parameter.detach().clone() for name, parameter in parts.items()}
    optimizer = torch.optim.AdamW(parts.values(), lr=1e-3, weight_decay=0.0)
    found.float().square().sum().backward()
    optimizer.step()
    for name, parameter in parts.items():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.any()
        moved = parameter != before[name]
        # distances that no pair of tokens has are not trained
        assert torch.equal(moved, parameter.grad != 0)
        assert moved[before[name] == 1].all()


# ---- the warning -------------------------------------------------------------------------------


def told(module):
    """Return the warnings about a module."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_half_precision(module)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("dtype, lost", [(torch.bfloat16, 0.002), (torch.float16, 0.0002)])
@pytest.mark.parametrize("direction", [1.0, -1.0], ids=["down", "up"])
def test_smaller_steps_than_the_warning_says_are_lost(dtype, lost, direction):
    module = MixedAttention(E, H, head_mixing="position-independent", dtype=dtype)
    (message,) = told(module)
    assert message == (
        f"MixedAttention: was mixed in {dtype}, where steps below {lost}, as AdamW usually takes, "
        "do not move the 1s of head_mixing; to train it, make the model in float32 and use "
        "torch.autocast, or make only mixing_parameters(model) float32"
    )

    weight = module.head_mixing.weight
    before = weight.detach().clone()
    weight.grad = torch.full_like(weight, direction)
    torch.optim.AdamW([weight], lr=0.9 * lost, weight_decay=0.0).step()
    assert torch.equal(weight.diagonal(), before.diagonal())
    assert (weight != before).sum() == H * H - H  # what starts at 0 moves


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
def test_only_what_starts_at_1_in_half_precision_is_warned_of(name, dtype):
    module = MixedAttention(E, H, **TRAINED[name], dtype=dtype)
    starts_at_1 = any((parameter == 1).any() for parameter in mixing_parameters(module).values())
    assert bool(told(module)) == (starts_at_1 and dtype in HALF)


def test_one_warning_names_all_parts_of_a_model():
    variant = {"head_mixing": "position-wise", "score_mixing": "position-wise"}
    layers = [MixedAttention(E, H, **variant, feature_mixing="heads") for _ in range(2)]
    model = torch.nn.Sequential(*layers).bfloat16()
    (message,) = told(model)
    assert "the 1s of head_mixing, score_mixing, feature_mixing;" in message
    assert told(model.to("meta")) == []


# ---- what was saved in float32 -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", TRAINED)
def test_a_part_that_was_saved_in_float32_is_loaded_without_rounding(name, dtype):
    saved = keep_parts_in_float32(built(name), dtype).state_dict()
    # The names of the model begin in another way.
    model = torch.nn.ModuleDict({"layer": MixedAttention(E, H, **TRAINED[name], dtype=dtype)})
    keep_float32(model, saved)
    model["layer"].load_state_dict(saved)
    for key, tensor in model["layer"].state_dict().items():
        assert tensor.dtype == saved[key].dtype, key
        assert torch.equal(tensor, saved[key]), key


@pytest.mark.parametrize(
    "saved, parts, own, expected",
    [
        # the model was saved in half precision, its parts in float32
        (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float16, torch.float32),
        (torch.bfloat16, torch.float64, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float64, torch.float64),
        # all in one dtype: that of the new model holds
        (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_a_part_has_the_dtype_of_its_model_but_where_float32_would_be_rounded_to_half(
    saved, parts, own, expected
):
    variant = {"head_mixing": "position-wise"}
    former = MixedAttention(E, H, **variant, dtype=saved)
    former.head_mixing.to(parts)
    model = MixedAttention(E, H, **variant, dtype=own)
    keep_float32(model, former.state_dict())
    assert {each.dtype for each in mixing_parameters(model).values()} == {expected}
    assert model.q_proj.weight.dtype == own


def test_what_is_no_tensor_is_left_out():
    model = MixedAttention(E, H, head_mixing="position-wise", dtype=torch.bfloat16)
    saved = MixedAttention(E, H, head_mixing="position-wise", dtype=torch.bfloat16).state_dict()
    saved["head_mixing.bias"] = saved["head_mixing.bias"].float()
    keep_float32(model, {"_extra_state": {"steps": 3}, "none._extra_state": None, **saved})
    assert model.head_mixing.bias.dtype == torch.float32


def test_each_tensor_of_a_part_keeps_float32_for_itself():
    model = MixedAttention(E, H, head_mixing="position-wise", dtype=torch.bfloat16)
    saved = model.state_dict()
    saved["head_mixing.bias"] = saved["head_mixing.bias"].float()
    keep_float32(model, saved)
    assert model.head_mixing.bias.dtype == torch.float32
    assert model.head_mixing.query_weight.dtype == torch.bfloat16
