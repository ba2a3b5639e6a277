"""Attentions that would not go on in the same way with fewer heads are not cut."""

import pytest
import torch

from tests.hf.models import build, hf, shake
from tests.hf.patches import rotating


def test_heads_that_are_told_by_their_number_are_not_cut(monkeypatch):
    rotating(monkeypatch, lambda q, k: (q, k * torch.arange(1.0, 1 + k.size(1))[:, None, None]))
    model, _ = build("LlamaForCausalLM")
    problem = "^LlamaAttention: cannot be cut, because its forward needs all heads; ablate them"
    with pytest.raises(ValueError, match=problem):
        hf.prune(model, {0: [0, 1]})


@torch.no_grad()
@pytest.mark.parametrize(
    "name, config, culprit",
    [
        ("Olmo2", {}, "q_norm"),
        ("StableLm", {"qk_layernorm": True}, "its forward"),
    ],
    ids=["norm over all heads", "norm for each head"],
)
def test_an_attention_that_needs_all_heads_is_cut_only_behind_mixing(name, config, culprit):
    model, inputs = build(f"{name}ForCausalLM", config)
    before = model(**inputs).logits
    problem = (
        f"^{name}Attention: cannot be cut, because {culprit} needs all heads; "
        "ablate them, or mix them first$"
    )
    with pytest.raises(ValueError, match=problem):
        hf.prune(model, {0: [0, 1]})
    assert torch.equal(model(**inputs).logits, before)
    shake(hf.mix(model, "position-wise"))
    with hf.ablate(model, {0: [0, 1]}):
        expected = model(**inputs).logits
    torch.testing.assert_close(hf.prune(model, {0: [0, 1]})(**inputs).logits, expected)
