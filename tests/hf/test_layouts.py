"""Rows that do not fit, and attentions whose sizes do not fit, are refused in one line."""

import pytest
import torch

from tests.hf.models import build, hf
from tests.hf.patches import row

SIZES = {
    "keys have 16 features, but values 8": (16, 8),
    "keys have 12 features, must be heads of 8": (12, 12),
    "4 heads of queries do not share 3 heads of keys evenly": (24, 24),
}


@pytest.mark.parametrize("problem", SIZES)
def test_keys_and_values_of_other_sizes_are_refused(problem):
    model, _ = build("LlamaForCausalLM")
    keys, values = SIZES[problem]
    for layer in model.model.layers:
        layer.self_attn.k_proj = torch.nn.Linear(32, keys)
        layer.self_attn.v_proj = torch.nn.Linear(32, values)
    with pytest.raises(ValueError) as error:
        hf.mix(model, "position-wise")
    assert str(error.value) == f"LlamaAttention: cannot be mixed, {problem}"


ROWS = {
    "queries": (
        ("q_prj", "num_attention_heads", "head_dim"),
        {},
        "no projection of queries named q_prj",
    ),
    "head size": (
        (("q_proj",), "num_attention_heads", "size"),
        {},
        "no number head_dim named size",
    ),
    "heads": ((("q_proj",), "n", "head_dim"), {}, "no number heads named n"),
    "keys": (
        ("q_proj", "num_attention_heads", "head_dim", "k"),
        {},
        "no projection of keys named k",
    ),
    "output": (
        (("q_proj",), "num_attention_heads", "head_dim"),
        {"output": ("dense",)},
        "no projection of output named dense",
    ),
}


@pytest.mark.parametrize("wrong", ROWS)
def test_names_that_an_attention_does_not_have_are_told_as_a_fault_of_the_row(wrong, monkeypatch):
    fields, others, problem = ROWS[wrong]
    row(monkeypatch, "Llama", *fields, **others)
    model, _ = build("LlamaForCausalLM")
    for refused in (
        lambda: hf.mix(model, "position-wise"),
        lambda: hf.ablate(model, {0: [1]}),
        lambda: hf.prune(model, {0: [0, 1]}),
    ):
        with pytest.raises(
            ValueError,
            match=f"^LlamaAttention: does not fit its row of hf.LAYOUTS, it has {problem}$",
        ):
            refused()


A_ROW = "must be an hf.Layout, or None to leave the class as it is"
NAMES = "must be the name of an attribute, or several in a tuple"
# What stands in the table by the name of the class, and the message.
NO_ROWS = {
    "dict": ({"queries": "q_proj"}, f" is a dict: {A_ROW}"),
    "tuple": (("q_proj", "num_heads", "head_dim"), f" is a tuple: {A_ROW}"),
    "text": ("q_proj", f" 'q_proj': {A_ROW}"),
    "number of heads": (hf.Layout("q_proj", 4, "head_dim"), f": has heads 4, {NAMES}"),
    "no name": (hf.Layout((), "num_heads", "head_dim"), f": has queries (), {NAMES}"),
    "left out": (
        hf.Layout("q_proj", "num_heads", "head_dim", output=None),
        f": has output None, {NAMES}",
    ),
}


@pytest.mark.parametrize("what", NO_ROWS)
def test_what_is_no_row_is_refused_in_one_line(what, monkeypatch):
    row, message = NO_ROWS[what]
    monkeypatch.setitem(hf.LAYOUTS, "LlamaAttention", row)
    with pytest.raises(ValueError) as error:
        hf.mix(build("LlamaForCausalLM")[0], "average")
    assert str(error.value) == f"hf.LAYOUTS['LlamaAttention']{message}"


def test_a_class_in_place_of_its_name_has_no_row(monkeypatch):
    model, _ = build("LlamaForCausalLM")
    monkeypatch.setitem(hf.LAYOUTS, type(model.model.layers[0].self_attn), None)
    with pytest.raises(ValueError, match=r"LlamaAttention'>, must be the name of a class$"):
        hf.mix(model, "average")


def test_attentions_with_one_packed_projection_and_no_config_are_refused(monkeypatch):
    names = ("query_key_value",)
    row(monkeypatch, "Bloom", names, "num_heads", "head_dim", names, names, ("dense",))
    model, _ = build("BloomForCausalLM")
    with pytest.raises(
        ValueError, match=r"^BloomAttention: has no config to choose its attention by; a later"
    ):
        hf.mix(model, "position-wise")


def test_attentions_of_older_versions_that_choose_no_implementation_are_refused():
    model, _ = build("T5ForConditionalGeneration")
    del model.decoder.block[0].layer[0].SelfAttention.config
    with pytest.raises(
        ValueError,
        match=r"^T5Attention: has no config to choose its attention by; a later transformers",
    ):
        hf.mix(model, "position-wise")
    assert not hf.mixing_parameters(model)
