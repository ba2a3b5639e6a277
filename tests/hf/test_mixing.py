"""Models of `transformers` are mixed, saved, loaded and unmixed; docs/huggingface.md trains one."""

import copy
import pickle

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from tests.covering import each_once
from tests.fairseq.definition import MIXINGS, NORMALIZERS, variant
from tests.hf.models import FEW, GENERATING, MODELS, build, hf, shake, whole

SCORES = dict(output_scores=True, return_dict_in_generate=True)


@each_once(
    name=MODELS,
    mixing=["position-wise", "position-independent", "low-rank"],
    padded=[[], [0, 1], [5, 6], [6]],
)
def test_before_training_the_model_is_the_same_and_unmixing_gives_it_back(name, mixing, padded):
    model, inputs = build(name)
    inputs["attention_mask"][1, padded] = 0
    visible, inputs = inputs["attention_mask"] == 1, whole(model, inputs)
    mixed, found = type(model)(model.config).double().eval(), []
    mixed.load_state_dict(model.state_dict())
    hf.mix(mixed, mixing)  # leaves the config of the other model alone
    for each in (copy.deepcopy(mixed), copy.deepcopy(model)):
        logits = each(**inputs).logits
        logits = (
            logits
            if model.config.is_encoder_decoder or "pixel_values" in inputs
            else logits[visible]
        )
        logits.square().mean().backward()
        found += [
            (logits, {name: each.get_parameter(name).grad for name, _ in model.named_parameters()})
        ]
    torch.testing.assert_close(*found)
    assert hf.unmix(mixed).config.to_dict() == model.config.to_dict()
    assert mixed.config._attn_implementation == model.config._attn_implementation
    assert torch.equal(mixed(**inputs).logits, model(**inputs).logits)  # its config was not changed


@each_once(name=GENERATING, mixing=MIXINGS, beams=[1, 3], normalizer=NORMALIZERS)
def test_generating_with_a_cache_is_the_full_pass_of_the_saved_model(
    name, mixing, beams, normalizer, tmp_path
):
    model, inputs = build(name, **variant(normalizer, mixing))
    model.save_pretrained(tmp_path)
    inputs["attention_mask"][1, :2] = 0
    inputs |= SCORES | dict(max_new_tokens=5, min_new_tokens=5, num_beams=beams)
    cached, full = model.generate(**inputs), hf.load(tmp_path).generate(**inputs, use_cache=False)
    assert torch.equal(cached.sequences, full.sequences)
    torch.testing.assert_close(cached.scores, full.scores, rtol=1e-5, atol=1e-5)


def test_the_rest_of_a_static_cache_is_hidden():
    model, inputs = build("LlamaForCausalLM", head_mixing="position-wise")
    inputs |= SCORES | dict(max_new_tokens=3)
    found, expected = (
        model.generate(**inputs, cache_implementation=kind).scores for kind in ("static", None)
    )
    torch.testing.assert_close(found, expected)


@each_once(name=FEW, variant=[{"feature_mixing": kind} for kind in ("heads", "shared", "output")])
def test_a_folded_model_is_plain_and_has_the_same_outputs(name, variant):
    model, inputs = build(name, **variant)
    inputs |= {"decoder_input_ids": inputs["input_ids"]} if model.config.is_encoder_decoder else {}
    expected, plain = model(**inputs).logits, build(name)[0]
    folded = hf.fold(model)
    torch.testing.assert_close(folded(**inputs).logits, expected)
    assert (
        folded.config.to_dict() == plain.config.to_dict()
        and folded.state_dict().keys() == plain.state_dict().keys()
    )


@torch.no_grad()
@pytest.mark.parametrize("features", ["heads", "shared", "output"])
def test_offloaded_feature_mixing_comes_back_for_its_call(features):
    model, inputs = build("LlamaForCausalLM", feature_mixing=features)
    expected = shake(model)(**inputs).logits
    torch.testing.assert_close(cpu_offload(model, torch.device("cpu"))(**inputs).logits, expected)


@torch.no_grad()
def test_the_parts_of_gpt2s_one_projection_are_mixed_apart():
    model, inputs = build("GPT2LMHeadModel")
    mixed = shake(hf.mix(copy.deepcopy(model), feature_mixing="shared"))
    for ours, plain in zip(mixed.transformer.h, model.transformer.h):
        for tensor in (plain.attn.c_attn.weight, plain.attn.c_attn.bias):
            for features, matrix in zip(tensor.chunk(3, -1), ours.attn.feature_mixing.matrices()):
                features.copy_((features.unflatten(-1, (4, 8)) @ matrix).flatten(-2))
    torch.testing.assert_close(mixed(**inputs).logits, model(**inputs).logits)


def test_what_would_lose_the_mixing_or_cannot_work_is_refused(tmp_path):
    model, inputs = build("BertForMaskedLM", head_mixing="position-wise")
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="sdpa: lost the mixing"):
        model(**inputs)
    model.bert.encoder.layer[0].attention.self.config._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match="must go through the AttentionInterface"):
        model(**inputs)
    copied, _ = build("LlamaForCausalLM", head_mixing="position-wise")
    loaded, info = hf.load(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == set() and type(pickle.loads(pickle.dumps(loaded))) is type(model)
    path = tmp_path / "model.safetensors"
    save_file(
        {k: v for k, v in load_file(path).items() if "mixing.bias" not in k}, path, {"format": "pt"}
    )
    build("GPT2LMHeadModel")[0].save_pretrained(tmp_path / "unmixed")
    odd, _ = build(
        "MarianMTModel", {"d_model": 24, "hidden_size": 24, "decoder_attention_heads": 3}
    )
    for refused, message in (
        (lambda: hf.mix(odd, "differential"), "num_heads 3: must be a multiple of 2"),
        (lambda: hf.load(tmp_path / "unmixed"), "no entry mixhead"),
        (lambda: hf.load(tmp_path), "2 are missing"),
        (
            lambda: hf.load(tmp_path, AutoModelForMaskedLM),
            "cls AutoModelForMaskedLM: must be the class of a model",
        ),
        (lambda: type(model).from_pretrained(tmp_path, attn_implementation="eager"), r"hf\.load"),
        (
            lambda: hf.mix(build("Gemma2ForCausalLM")[0], "position-wise"),
            "^Gemma2Attention: softcap cannot be used with mixed heads$",
        ),
        (
            lambda: copied.model.layers[0].self_attn._replicate_for_data_parallel()(),
            "DataParallel: start a process",
        ),
        (lambda: hf.unmix(model), "without head_mixing"),
        (lambda: hf.unmix(build("T5Model", normalizer="l2")[0]), "without normalizer l2"),
        (lambda: hf.fold(model), "without head_mixing"),
        (lambda: hf.unmix(build("T5Model")[0]), "no mixing"),
        (lambda: hf.mix(model), "already"),
        (lambda: hf.mix(build("T5Model")[0], relative_position="t5"), "relative_position: must"),
        (lambda: hf.mix(build("T5Model")[0], relative_gain=2), "relative_gain: must be left out"),
        (lambda: hf.mix(build("T5Model")[0], head_dim=4), "head_dim: must be left out, the model"),
        (
            lambda: hf.mix(build("T5Model")[0]),
            "nothing is asked for.*; head_mixing: none, position",
        ),
        (
            lambda: hf.mix(build("BloomForCausalLM")[0], "position-wise"),
            r"^BloomForCausalLM: has no attention that goes through the AttentionInterface "
            r"and whose projections are known; docs/huggingface\.md says how to add a row to "
            r"hf\.LAYOUTS$",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    both = build("BertForMaskedLM", head_mixing="position-wise", feature_mixing="shared")[0]
    before = copy.deepcopy(both.state_dict())
    with pytest.raises(ValueError, match="without head_mixing"):
        hf.fold(both)
    assert all(torch.equal(value, before[name]) for name, value in both.state_dict().items())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace(type(model).__name__, "Own"))
    with pytest.raises(ValueError, match="must be the class of a model, as Own"):
        hf.load(tmp_path)
    hf.mix(odd, "position-wise")  # the refusal changed nothing
    odd.model.encoder.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        odd(torch.ones(1, 2, dtype=torch.long))
    odd.model.encoder.layers[0].self_attn.q_proj(torch.ones(1, 24).double())
    # neither an interrupted call nor one of a projection leaves activations behind
    copy.deepcopy(odd)


@pytest.mark.parametrize(
    "variant, tensor",
    [
        ({"head_mixing": "position-wise", "mixing_start": "random"}, "bias"),
        ({"head_mixing": "low-rank"}, "left_weight"),
    ],
    ids=["random", "low-rank"],
)
def test_random_starts_of_layers_differ_and_are_saved(variant, tensor, tmp_path):
    model = hf.mix(build("LlamaForCausalLM")[0], **variant)
    first, second = (
        layer.self_attn.head_mixing.get_parameter(tensor) for layer in model.model.layers
    )
    assert not torch.equal(first, second)
    model.save_pretrained(tmp_path)
    loaded = hf.load(tmp_path).model.layers[1].self_attn.head_mixing.get_parameter(tensor)
    assert torch.equal(loaded, second)
