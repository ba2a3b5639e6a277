"""Exported programs and ONNX files compute the same at other sizes than those of the example."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from mixhead_plugin.nn import MixedAttention
from tests.hf.models import FEW, build

BATCH = Dim("batch")
LENGTH = Dim("length", max=64)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask):
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits


class Attention(nn.Module):
    def __init__(self, **variant):
        super().__init__()
        self.attention = MixedAttention(8, 2, batch_first=True, **variant)

    def forward(self, x, hidden):
        out, weights = self.attention(x, x, x, key_padding_mask=hidden, is_causal=True)
        return torch.cat([out, weights], -1)


SIZES = [(2, 20), (3, 7)]  # batch and length of the example, and of the other call


def visible(batch, length):
    """Return a bool for each token [B, N], which leaves out the last two of each sentence."""
    return torch.arange(length).expand(batch, -1) < length - 2


def case(name):
    """Return a module, and its arguments in the two sizes."""
    if name == "MixedAttention":
        module = Attention(
            head_mixing="position-wise",
            normalizer="l2",
            attention_sink="learned",
            relative_position="t5",
        )
        calls = [(torch.randn(*size, 8), ~visible(*size)) for size in SIZES]
        return module.eval(), *calls

    model, _ = build(name, head_mixing="position-wise")
    calls = [(torch.randint(3, 31, size), visible(*size).long()) for size in SIZES]
    return Logits(model.float()), *calls


MODELS = FEW[:3]
SLOW_MODELS = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", ["MixedAttention", *SLOW_MODELS])
def test_exported_programs_serve_other_sizes(name):
    module, example, other = case(name)
    program = torch.export.export(module, example, dynamic_shapes=({0: BATCH, 1: LENGTH},) * 2)
    torch.testing.assert_close(program.module()(*other), module(*other))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MixedAttention", *MODELS])
def test_onnxruntime_computes_the_same(name, tmp_path):
    pytest.importorskip("onnxscript", reason="pip install onnx onnxscript onnxruntime")
    runtime = pytest.importorskip("onnxruntime", reason="pip install onnx onnxscript onnxruntime")
    module, example, other = case(name)
    shapes = ({0: BATCH, 1: LENGTH},) * 2
    program = torch.onnx.export(module, example, dynamo=True, dynamic_shapes=shapes, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    given = {entry.name: x.numpy() for entry, x in zip(session.get_inputs(), other)}
    (found,) = session.run(None, given)
    torch.testing.assert_close(torch.from_numpy(found), module(*other), rtol=1e-4, atol=1e-5)
