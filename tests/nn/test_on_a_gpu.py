"""`MixedAttention` and mixed models on a GPU, beside the same in float64 on a CPU."""

import os

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mixhead_plugin.nn import MixedAttention, mix
from mixhead_plugin.ops import NORMALIZERS
from mixhead_plugin.parts import PARTS
from tests.covering import each_once

pytestmark = pytest.mark.gpu

WIDTH = 256
HEADS = 8
SENTENCES = 4
LENGTH = 96

# Every normalizer without mixing and with B, and every value of every other part.
VARIANTS = [{"normalizer": name} for name in NORMALIZERS]
VARIANTS += [{"normalizer": name, "head_mixing": "position-wise"} for name in NORMALIZERS]
for part, table in PARTS.items():
    VARIANTS += [{part: name} for name in table]


def module(variant, **settings):
    """Return a module whose parameters have all left their start."""
    torch.manual_seed(1)
    made = MixedAttention(WIDTH, HEADS, batch_first=True, **variant, **settings)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return made


def masks(name, device, dtype):
    """Return what hides keys, or adds to scores, by the keywords of a call."""
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)
    padding = torch.zeros(SENTENCES, LENGTH, dtype=torch.bool, device=device)
    padding[1, 60:] = True
    added = torch.linspace(-2, 2, LENGTH**2, device=device).to(dtype).view(LENGTH, LENGTH)
    return {
        "none": {},
        "causal": {"attn_mask": future, "is_causal": True},
        "padding": {"key_padding_mask": padding},
        "causal, padding": {"attn_mask": future, "key_padding_mask": padding},
        "added": {"attn_mask": added},
    }[name]


def results(made, x, d_output, mask, device, dtype):
    """Return the output and all gradients, in float64 on the CPU, by name."""
    made = made.to(device, dtype)
    x = x.to(device, dtype).requires_grad_()
    output = made(x, x, x, need_weights=False, **masks(mask, device, dtype))[0]
    parameters = dict(made.named_parameters())
    tensors = [x, *parameters.values()]
    gradients = torch.autograd.grad(
        output, tensors, d_output.to(output), allow_unused=True, materialize_grads=True
    )
    names = ["output", "x", *parameters]
    return {name: value.double().cpu() for name, value in zip(names, [output, *gradients])}


@each_once(
    variant=VARIANTS,
    mask=["none", "causal", "padding", "causal, padding", "added"],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
)
def test_a_module_that_was_moved_computes_as_on_the_cpu(variant, mask, dtype):
    """Allow four times the error of the formula in the same dtype, and some roundings."""
    x = torch.randn(SENTENCES, LENGTH, WIDTH, dtype=torch.float64)
    d_output = torch.randn_like(x)
    exact = results(module(variant), x, d_output, mask, "cpu", torch.float64)
    formula = module(variant, impl="reference")
    rounded = results(formula, x, d_output, mask, "cpu", dtype)
    found = results(module(variant), x, d_output, mask, "cuda", dtype)
    few_roundings = 8 * torch.finfo(dtype).eps
    for name, right in exact.items():
        allowed = 4 * (rounded[name] - right).norm() + few_roundings * (1 + right.norm())
        assert (found[name] - right).norm() <= allowed, name


def mixed_encoder(mixing):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 512, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(50, WIDTH), encoder, nn.Linear(WIDTH, 50))
    return mix(model, mixing).to("cuda")


@pytest.mark.parametrize("mixing", ["position-independent", "position-wise", "low-rank"])
def test_a_compiled_model_has_the_same_loss_and_gradients(mixing):
    model = mixed_encoder(mixing)
    tokens = torch.randint(50, (4, 64), device="cuda")

    def loss_and_gradients(called):
        loss = F.cross_entropy(called(tokens).flatten(0, 1), tokens.flatten())
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    expected = loss_and_gradients(model)
    found = loss_and_gradients(torch.compile(model, fullgraph=True))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 2e-3 * theirs.norm() + 1e-5


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("mixing", ["none", "position-independent", "position-wise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_deterministic_trainings_are_equal(mixing, dtype, deterministic):
    def trained():
        made = module({"head_mixing": mixing}, dropout=0.1).to("cuda", dtype)
        optimizer = torch.optim.SGD(made.parameters(), 0.1)
        torch.manual_seed(2)
        for _ in range(5):
            x = torch.randn(SENTENCES, LENGTH, WIDTH, device="cuda", dtype=dtype)
            future = masks("causal", "cuda", dtype)
            made(x, x, x, need_weights=False, **future)[0].float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(made.parameters())

    for one, other in zip(trained(), trained(), strict=True):
        assert torch.equal(one, other)
