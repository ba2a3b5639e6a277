"""Exported programs and ONNX files compute the same at other sizes than those of the example."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from mixhead_plugin.nn import MixedAttention
from tests.hf.models import FEW, build

BATCH, LENGTH = Dim("batch"), Dim("length", max=64)


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


def case(name):
    """Return a module, and its arguments in two sizes."""
    sizes = ((2, 20), (3, 7))
    if name == "MixedAttention":
        variant = dict(
            head_mixing="position-wise",
            normalizer="l2",
            attention_sink="learned",
            relative_position="t5",
        )
        hidden = [torch.arange(n).expand(b, -1) >= n - 2 for b, n in sizes]
        return Attention(**variant).eval(), *((torch.randn(*h.shape, 8), h) for h in hidden)
    masks = [(torch.arange(n).expand(b, -1) < n - 2).long() for b, n in sizes]
    model = build(name, head_mixing="position-wise")[0].float()
    return Logits(model), *((torch.randint(3, 31, mask.shape), mask) for mask in masks)


@pytest.mark.parametrize(
    "name", ["MixedAttention", *(pytest.param(n, marks=pytest.mark.slow) for n in FEW[:3])]
)
def test_exported_programs_serve_other_sizes(name):
    module, example, other = case(name)
    program = torch.export.export(module, example, dynamic_shapes=({0: BATCH, 1: LENGTH},) * 2)
    torch.testing.assert_close(program.module()(*other), module(*other))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MixedAttention", *FEW[:3]])
def test_onnxruntime_computes_the_same(name, tmp_path):
    pytest.importorskip("onnxscript", reason="pip install onnx onnxscript onnxruntime")
    runtime = pytest.importorskip("onnxruntime", reason="pip install onnx onnxscript onnxruntime")
    module, example, other = case(name)
    shapes = ({0: BATCH, 1: LENGTH},) * 2
    program = torch.onnx.export(module, example, dynamo=True, dynamic_shapes=shapes, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    names = [given.name for given in session.get_inputs()]
    (found,) = session.run(None, dict(zip(names, (x.numpy() for x in other))))
    torch.testing.assert_close(torch.from_numpy(found), module(*other), rtol=1e-4, atol=1e-5)
