"""An attention or a mask function that a user has made is refused, because it would be lost."""

import functools

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

from tests.hf.models import build, hf


def with_bias(module, query, key, value, attention_mask, **settings):
    """Attend less to keys that are far, as ALiBi does."""
    offsets = torch.arange(key.size(2)) - torch.arange(query.size(2))[:, None]  # [Nq, Nk]
    bias = offsets.to(query).masked_fill(offsets > 0, -torch.inf)[None, None]
    settings["is_causal"] = False
    return sdpa_attention_forward(module, query, key, value, bias, **settings)


@functools.wraps(sdpa_attention_forward)  # which also takes its name and its module
def around(module, query, *others, **settings):
    return sdpa_attention_forward(module, 2 * query, *others, **settings)


def mask_with_prefix(*args, **settings):
    """Let all queries see the first three keys."""
    settings["mask_function"] = lambda sentence, head, query, key: (key <= query) | (key < 3)
    settings["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **settings)


# What is registered under a name: an attention function, and a mask function.
REFUSED = {
    "own": (with_bias, sdpa_mask, "attention"),
    "wrapped": (around, sdpa_mask, "attention"),
    "sdpa": (with_bias, sdpa_mask, "attention"),
    "eager": (with_bias, sdpa_mask, "attention"),
    "prefix": (sdpa_attention_forward, mask_with_prefix, "mask"),
    "unmasked": (sdpa_attention_forward, None, "mask"),
}


def register(monkeypatch, name, attention, mask):
    monkeypatch.setitem(AttentionInterface._global_mapping, name, attention)
    if mask is not None:
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, mask)


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_a_user_has_made_is_refused_where_it_would_be_lost(name, monkeypatch):
    attention, mask, what = REFUSED[name]
    model, inputs = build("LlamaForCausalLM")
    register(monkeypatch, name, attention, mask)
    model.set_attn_implementation(name)
    before = model(**inputs).logits
    for use in (
        lambda: hf.mix(model, "position-wise"),
        lambda: hf.prune(model, {0: [0, 1]}),
        lambda: hf.attentions(model, inputs),
    ):
        with pytest.raises(ValueError) as refused:
            use()
        assert str(refused.value) == (
            f"LlamaAttention: its {what} function {name} is not one of transformers, and would be "
            "lost; model.set_attn_implementation must choose one that is, such as sdpa"
        )
    assert torch.equal(model(**inputs).logits, before)
    with hf.ablate(model, {0: [1]}):  # needs the output projection alone
        assert not torch.allclose(model(**inputs).logits, before)


@torch.no_grad()
def test_a_table_of_functions_in_the_file_of_a_model_counts(monkeypatch):
    model, _ = build("LlamaForCausalLM")
    own = AttentionInterface()
    own["sdpa"] = with_bias
    monkeypatch.setattr(modeling_llama, hf.finding.INTERFACE, own)
    hf.finding._interface_of.cache_clear()
    with pytest.raises(ValueError, match=r"^LlamaAttention: its attention function sdpa is not"):
        hf.mix(model, "position-wise")
    monkeypatch.undo()
    hf.finding._interface_of.cache_clear()
    hf.mix(model, "position-wise")


@torch.no_grad()
@pytest.mark.parametrize("name", ["other name", "eager", "sdpa", "flex_attention"])
def test_functions_of_transformers_are_mixed_under_any_name(name, monkeypatch):
    model, inputs = build("LlamaForCausalLM")
    register(monkeypatch, "other name", sdpa_attention_forward, sdpa_mask)
    before = model(**inputs).logits
    model.config._attn_implementation_internal = name
    torch.testing.assert_close(hf.mix(model, "position-wise")(**inputs).logits, before)
