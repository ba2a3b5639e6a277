"""Models of `transformers` are mixed, saved, loaded and unmixed; docs/huggingface.md trains one."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.covering import each_once
from tests.hf.models import CONFIG, GENERATING, MODELS, build, hf, transformers, whole
from tests.modules.definition import MIXINGS, NORMALIZERS, variant


@each_once(name=MODELS, mixing=["position-wise", "position-independent", "low-rank"], padded=[[], [0, 1], [5, 6], [6]])
def test_before_training_the_model_is_the_same_and_unmixing_gives_it_back(name, mixing, padded):
    model, inputs = build(name)
    inputs["attention_mask"][1, padded] = 0
    visible, inputs = inputs["attention_mask"] == 1, whole(model, inputs)
    mixed, found = type(model)(model.config).double().eval(), []
    mixed.load_state_dict(model.state_dict())
    hf.mix(mixed, mixing)  # leaves the config of the other model alone
    for each in (copy.deepcopy(mixed), copy.deepcopy(model)):
        logits = each(**inputs).logits
        logits = logits if model.config.is_encoder_decoder or "pixel_values" in inputs else logits[visible]
        logits.square().mean().backward()
        found += [(logits, {name: each.get_parameter(name).grad for name, _ in model.named_parameters()})]
    torch.testing.assert_close(*found)
    assert hf.unmix(mixed).config.to_dict() == model.config.to_dict()
    assert mixed.config._attn_implementation == model.config._attn_implementation
    assert torch.equal(mixed(**inputs).logits, model(**inputs).logits)  # its config was not changed


@each_once(name=GENERATING, mixing=MIXINGS, beams=[1, 3], normalizer=NORMALIZERS)
def test_generating_with_a_cache_is_the_full_pass_of_the_saved_model(name, mixing, beams, normalizer, tmp_path):
    model, inputs = build(name, **variant(normalizer, mixing))
    model.save_pretrained(tmp_path)
    inputs["attention_mask"][1, :2] = 0
    inputs |= dict(
        max_new_tokens=5, min_new_tokens=5, num_beams=beams, output_scores=True, return_dict_in_generate=True
    )
    cached, full = model.generate(**inputs), hf.load(tmp_path).generate(**inputs, use_cache=False)
    assert torch.equal(cached.sequences, full.sequences)
    torch.testing.assert_close(cached.scores, full.scores, rtol=1e-5, atol=1e-5)


def test_the_rest_of_a_static_cache_is_hidden():
    model, inputs = build("LlamaForCausalLM", head_mixing="position-wise")
    inputs |= dict(max_new_tokens=3, output_scores=True, return_dict_in_generate=True)
    found, expected = (model.generate(**inputs, cache_implementation=kind).scores for kind in ("static", None))
    torch.testing.assert_close(found, expected)


@each_once(
    name=["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"],
    variant=[{"feature_mixing": "heads"}, {"feature_mixing": "shared"}, {"feature_mixing": "output"}],
)
def test_a_folded_model_is_plain_and_has_the_same_outputs(name, variant):
    model, inputs = build(name, **variant)
    inputs |= {"decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else {}
    expected, plain = model(**inputs).logits, build(name)[0]
    start = {key: x.clone() for key, x in model.state_dict().items()}
    folded = hf.fold(model)
    torch.testing.assert_close(folded(**inputs).logits, expected)
    assert folded.config.to_dict() == plain.config.to_dict() and folded.state_dict().keys() == plain.state_dict().keys()
    assert any(not torch.equal(x, start[key]) for key, x in folded.state_dict().items())


def test_rotary_models_mix_by_the_query_before_rotation():
    model, inputs = build("LlamaForCausalLM", head_mixing="position-wise")
    far = model(**inputs, position_ids=torch.arange(9, 16)[None]).logits  # as without mixing, only distances count
    torch.testing.assert_close(far, model(**inputs).logits)


def test_what_would_lose_the_mixing_or_cannot_work_is_refused(tmp_path):
    model, inputs = build("BertForMaskedLM", head_mixing="position-wise")
    model.save_pretrained(tmp_path)
    shared = type(model)(copy.deepcopy(model).config)
    with pytest.raises(RuntimeError, match=r"hf\.load"):
        shared(**inputs)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="sdpa: lost the mixing"):
        model(**inputs)
    assert hf.load(tmp_path, output_loading_info=True)[1]["missing_keys"] == set()
    path = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "mixing.bias" not in k}, path, {"format": "pt"})
    build("GPT2LMHeadModel")[0].save_pretrained(tmp_path / "unmixed")
    odd = transformers.MarianMTModel(
        transformers.MarianConfig(**CONFIG | {"d_model": 24, "hidden_size": 24, "decoder_attention_heads": 3})
    )
    for refused, message in (
        (lambda: hf.mix(odd, "differential"), "num_heads 3: must be a multiple of 2"),
        (lambda: hf.load(tmp_path / "unmixed"), "no entry mixhead"),
        (lambda: hf.load(tmp_path), "2 are missing"),
        (lambda: type(model).from_pretrained(tmp_path, attn_implementation="eager"), r"hf\.load"),
        (lambda: hf.unmix(model), "without head_mixing"),
        (lambda: hf.fold(model), "without head_mixing"),
        (lambda: hf.unmix(build("T5Model")[0]), "no mixing"),
        (lambda: hf.mix(model), "already"),
        (lambda: hf.mix(build("T5Model")[0], relative_position="t5"), "relative_position: must"),
        (lambda: hf.mix(build("T5Model")[0]), "nothing is asked for.*; head_mixing: none, position"),
        (lambda: hf.mix(build("GPTNeoXForCausalLM")[0]), r"hf\.LAYOUTS: BertSelfAttention.*docs/huggingface\.md"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    hf.mix(odd, "position-wise")  # the refusal changed nothing
    odd.model.encoder.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        odd(torch.ones(1, 2, dtype=torch.long))
    copy.deepcopy(odd)  # an interrupted call leaves no activations behind
