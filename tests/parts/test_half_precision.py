"""Parts stay in float32 beside a model in half precision, so that training moves them."""

import copy

import pytest
import torch

from mixhead_plugin.nn import MixedAttention, mixing_parameters
from mixhead_plugin.parts import PARTS

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
