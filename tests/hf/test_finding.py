"""Attentions that go through the AttentionInterface are found without a row, in every tower.

Towers that cannot be mixed are named.
"""

import functools
import json
import warnings

import pytest
import torch

from tests.hf.models import CONFIG, build, hf, shake, transformers


def llava():
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    text = dict(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=8, patch_size=4),
        text_config=transformers.LlamaConfig(**text),
        image_token_index=45,
        vision_feature_layer=-1,
    )
    images = torch.full((2, 4), 45), torch.randint(3, 40, (2, 5))
    inputs = dict(input_ids=torch.cat(images, 1), pixel_values=torch.randn(2, 3, 8, 8))
    return transformers.LlavaForConditionalGeneration(config).eval(), inputs


@torch.no_grad()
def test_all_towers_are_mixed_saved_and_loaded(tmp_path):
    model, inputs = llava()
    expected = model(**inputs).logits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.mix(model, "position-independent")
    assert model.config.mixhead_attentions == ["CLIPAttention", "LlamaAttention"]
    torch.testing.assert_close(model(**inputs).logits, expected)
    expected = shake(model)(**inputs).logits
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(hf.load(tmp_path)(**inputs).logits, expected)


@torch.no_grad()
def test_a_tower_that_the_user_leaves_out_stays_as_it_is_and_loading_needs_no_word(tmp_path):
    model, inputs = llava()
    expected = model(**inputs).logits
    vision = model.model.vision_tower
    implementation = vision.config._attn_implementation
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(hf.LAYOUTS, "CLIPAttention", None)
        hf.mix(model, "position-wise")
    torch.testing.assert_close(model(**inputs).logits, expected)
    assert vision.config._attn_implementation == implementation
    expected = shake(model)(**inputs).logits
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(hf.load(tmp_path)(**inputs).logits, expected)


@pytest.mark.filterwarnings("ignore:CLIPAttention. the order of its heads could not be checked")
def test_heads_of_a_tower_that_cannot_be_mixed_are_seen_beside_the_mixed_ones(monkeypatch):
    model, inputs = llava()
    vision = model.model.vision_tower
    cls = type(vision.encoder.layers[0].self_attn)
    forward = cls.forward

    @functools.wraps(forward)
    def only_in_a_layer(self, hidden_states, *args, **kwargs):
        assert args or "attention_mask" in kwargs
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(cls, "forward", only_in_a_layer)
    expected = hf.attentions(model, inputs)
    with pytest.warns(UserWarning, match="was mixed without 1 CLIPAttention") as said:
        hf.mix(model, "position-independent")
    assert said[0].filename == __file__
    before = vision.config._attn_implementation
    found = hf.attentions(model, inputs)
    assert vision.config._attn_implementation == before != "eager"
    assert len(expected) == 2
    for layer, heads in expected.items():
        torch.testing.assert_close(found[layer].mixed, heads.mixed)


def test_a_tower_that_computes_its_attention_itself_is_named():
    vision = dict(CONFIG, num_channels=3)
    model, _ = build("GitModel", {"vision_config": vision})
    with pytest.warns(UserWarning) as said:
        hf.mix(model, "position-wise")
    assert [str(each.message) for each in said] == [
        "GitModel: was mixed without 2 GitSelfAttention, as encoder.layer.0.attention.self; it "
        "does not go through the AttentionInterface, or its projections are not known"
    ]


def test_a_module_that_computes_an_attention_is_named_whatever_it_is_called():
    config = transformers.Aimv2VisionConfig(**CONFIG)
    with pytest.warns(UserWarning) as said:
        hf.mix(transformers.Aimv2VisionModel(config), "position-wise")
    assert [str(each.message) for each in said] == [
        "Aimv2VisionModel: was mixed without 1 Aimv2AttentionPoolingHead, as head; it does not go "
        "through the AttentionInterface, or its projections are not known"
    ]


def test_attentions_with_one_config_are_mixed_together_or_not_at_all(monkeypatch):
    monkeypatch.setitem(hf.LAYOUTS, "BertCrossAttention", None)
    config = transformers.BertConfig(**CONFIG, is_decoder=True, add_cross_attention=True)
    model = transformers.BertLMHeadModel(config)
    problem = (
        "^BertCrossAttention: its projections are not known; "
        "it must be mixed with BertSelfAttention, which has the same config$"
    )
    with pytest.raises(ValueError, match=problem):
        hf.mix(model, "position-wise")
    assert not hf.mixing_parameters(model)


def test_a_file_of_a_user_s_row_is_not_loaded_without_it(tmp_path, monkeypatch):
    hf.mix(llava()[0], normalizer="l2").save_pretrained(tmp_path)
    monkeypatch.setitem(hf.LAYOUTS, "CLIPAttention", None)
    problem = r"^CLIPAttention: its projections are not known; add its row to hf\.LAYOUTS$"
    with pytest.raises(ValueError, match=problem):
        hf.load(tmp_path)


@torch.no_grad()
def test_a_folder_of_before_the_default_row_mixes_what_was_mixed_then(tmp_path):
    model, inputs = llava()
    hf.LAYOUTS["CLIPAttention"] = None
    try:
        expected = shake(hf.mix(model, "position-wise"))(**inputs).logits
    finally:
        del hf.LAYOUTS["CLIPAttention"]
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("mixhead_attentions", None)
    for inner in config.values():
        if isinstance(inner, dict):
            inner.pop("mixhead_attentions", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.testing.assert_close(hf.load(tmp_path)(**inputs).logits, expected)
