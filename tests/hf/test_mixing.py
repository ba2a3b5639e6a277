"""Models of `transformers` are mixed, saved, loaded and unmixed; docs/huggingface.md trains one."""

import copy
import inspect
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, BertForMaskedLM, CLIPConfig, CLIPModel

import mixhead_plugin.nn as torch_door
from tests.attention_equations import COMBINATIONS, SOME_NORMALIZERS, variant
from tests.covering import each_once
from tests.hf.models import FEW, GENERATING, MODELS, build, hf, shake, whole

SCORES = {"output_scores": True, "return_dict_in_generate": True}


# ---- what stays the same -----------------------------------------------------------------------


def logits_and_gradients(model, inputs, names, visible):
    """Return the logits at visible tokens, and the gradient of each named parameter.

    Args:
        inputs: the keywords of one call
        names: the parameters
        visible: a bool for each token [B, N]; logits of hidden ones mean nothing
    """
    logits = model(**inputs).logits
    # Logits of a decoder belong to other tokens, and those of an image to none.
    if not model.config.is_encoder_decoder and "pixel_values" not in inputs:
        logits = logits[visible]
    logits.square().mean().backward()
    return logits, {name: model.get_parameter(name).grad for name in names}


@each_once(
    name=MODELS,
    mixing=["position-wise", "position-independent", "low-rank"],
    padded=[[], [0, 1], [5, 6], [6]],
)
def test_before_training_the_model_is_the_same_and_unmixing_gives_it_back(name, mixing, padded):
    model, inputs = build(name)
    inputs["attention_mask"][1, padded] = 0
    visible = inputs["attention_mask"] == 1
    inputs = whole(model, inputs)

    # A model of the same config, which `mix` must leave to the other one.
    mixed = type(model)(model.config).double().eval()
    mixed.load_state_dict(model.state_dict())
    hf.mix(mixed, mixing)

    names = [name for name, _ in model.named_parameters()]
    found = logits_and_gradients(copy.deepcopy(mixed), inputs, names, visible)
    expected = logits_and_gradients(copy.deepcopy(model), inputs, names, visible)
    torch.testing.assert_close(found, expected)

    assert hf.unmix(mixed).config.to_dict() == model.config.to_dict()
    assert mixed.config._attn_implementation == model.config._attn_implementation
    assert torch.equal(mixed(**inputs).logits, model(**inputs).logits)


def two_towers():
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    text = dict(sizes, vocab_size=9, max_position_embeddings=8, bos_token_id=1, eos_token_id=2)
    vision = dict(sizes, image_size=8, patch_size=4)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision))


def implementations(model):
    """Return the attention of transformers that a model with two towers, and each tower, has."""
    configs = [model.config, model.text_model.config, model.vision_model.config]
    return [config._attn_implementation for config in configs]


def test_unmixing_gives_each_tower_the_attention_that_it_had():
    model = two_towers()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    before = implementations(model)
    hf.unmix(hf.mix(model, "position-wise"))
    assert implementations(model) == before == ["sdpa", "eager", "sdpa"]


@pytest.mark.parametrize(
    "asked, expected",
    [
        (None, ["sdpa", "sdpa", "sdpa"]),
        ("eager", ["eager", "eager", "eager"]),
        ({"text_config": "eager"}, ["sdpa", "eager", "sdpa"]),
    ],
)
def test_unmixing_gives_each_tower_the_attention_that_it_was_loaded_with(asked, expected, tmp_path):
    hf.mix(two_towers(), "position-wise").save_pretrained(tmp_path)
    model = hf.load(tmp_path, attn_implementation=asked)
    assert implementations(hf.unmix(model)) == expected


@each_once(name=GENERATING, mixing=COMBINATIONS, beams=[1, 3], normalizer=SOME_NORMALIZERS)
def test_generating_with_a_cache_is_the_full_pass_of_the_saved_model(
    name, mixing, beams, normalizer, tmp_path
):
    model, inputs = build(name, **variant(normalizer, mixing))
    model.save_pretrained(tmp_path)
    inputs["attention_mask"][1, :2] = 0
    inputs |= SCORES | {"max_new_tokens": 5, "min_new_tokens": 5, "num_beams": beams}
    cached = model.generate(**inputs)
    full = hf.load(tmp_path).generate(**inputs, use_cache=False)
    assert torch.equal(cached.sequences, full.sequences)
    torch.testing.assert_close(cached.scores, full.scores, rtol=1e-5, atol=1e-5)


def test_the_rest_of_a_static_cache_is_hidden():
    model, inputs = build("LlamaForCausalLM", head_mixing="position-wise")
    inputs |= SCORES | {"max_new_tokens": 3}
    found = model.generate(**inputs, cache_implementation="static")
    expected = model.generate(**inputs)
    torch.testing.assert_close(found.scores, expected.scores)


@each_once(name=FEW, variant=[{"feature_mixing": kind} for kind in ("heads", "shared", "output")])
def test_a_folded_model_is_plain_and_has_the_same_outputs(name, variant):
    model, inputs = build(name, **variant)
    inputs = whole(model, inputs)
    expected = model(**inputs).logits
    folded = hf.fold(model)
    torch.testing.assert_close(folded(**inputs).logits, expected)

    plain, _ = build(name)
    assert folded.config.to_dict() == plain.config.to_dict()
    assert folded.state_dict().keys() == plain.state_dict().keys()


@torch.no_grad()
@pytest.mark.parametrize("features", ["heads", "shared", "output"])
def test_offloaded_feature_mixing_comes_back_for_its_call(features):
    model, inputs = build("LlamaForCausalLM", feature_mixing=features)
    expected = shake(model)(**inputs).logits
    offloaded = cpu_offload(model, torch.device("cpu"))
    torch.testing.assert_close(offloaded(**inputs).logits, expected)


@torch.no_grad()
def test_the_parts_of_gpt2s_one_projection_are_mixed_apart():
    model, inputs = build("GPT2LMHeadModel")
    mixed = shake(hf.mix(copy.deepcopy(model), feature_mixing="shared"))
    for ours, plain in zip(mixed.transformer.h, model.transformer.h):
        matrices = ours.attn.feature_mixing.matrices()  # of queries, keys and values
        for tensor in (plain.attn.c_attn.weight, plain.attn.c_attn.bias):  # [..., 3 * H * D]
            for features, matrix in zip(tensor.chunk(3, -1), matrices):
                heads = features.unflatten(-1, (4, 8))  # [..., H, D]
                features.copy_((heads @ matrix).flatten(-2))
    torch.testing.assert_close(mixed(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(
    "variant, tensor",
    [
        ({"head_mixing": "position-wise", "mixing_start": "random"}, "bias"),
        ({"head_mixing": "low-rank"}, "left_weight"),
    ],
    ids=["random", "low-rank"],
)
def test_random_starts_of_layers_differ_and_are_saved(variant, tensor, tmp_path):
    def starts(model):
        return [layer.self_attn.head_mixing.get_parameter(tensor) for layer in model.model.layers]

    model = hf.mix(build("LlamaForCausalLM")[0], **variant)
    first, second = starts(model)
    assert not torch.equal(first, second)
    model.save_pretrained(tmp_path)
    assert torch.equal(starts(hf.load(tmp_path))[1], second)


def test_a_mixing_that_half_precision_would_not_train_is_warned_of(tmp_path):
    """tests/parts/test_half_precision.py has the parts; here are the places that warn."""
    model, _ = build("LlamaForCausalLM")
    told = "^LlamaForCausalLM: was mixed in torch.bfloat16, where steps below 0.002"
    with pytest.warns(UserWarning, match=told) as warned:
        mixed = hf.mix(copy.deepcopy(model).bfloat16(), "position-wise")
    assert len(warned) == 1
    assert warned[0].filename == __file__

    mixed.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.mix(copy.deepcopy(model).bfloat16(), normalizer="l2")
        with torch.autocast("cpu", torch.bfloat16):
            hf.mix(copy.deepcopy(model).float(), "position-wise")
        # What is loaded is often only used.
        hf.load(tmp_path, dtype=torch.bfloat16)


def test_a_mixed_model_is_pickled_with_its_class():
    model, _ = build("BertForMaskedLM", head_mixing="position-wise")
    assert type(pickle.loads(pickle.dumps(model))) is type(model)


# ---- what is refused ---------------------------------------------------------------------------


def test_an_attention_implementation_that_would_lose_the_mixing_is_refused():
    model, inputs = build("BertForMaskedLM", head_mixing="position-wise")
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError) as error:
        model(**inputs)
    assert str(error.value) == (
        "attn_implementation sdpa: lost the mixing, must be mixhead or eager"
    )
    # Here one layer alone is asked for another implementation, behind the model's back.
    model.bert.encoder.layer[0].attention.self.config._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError) as error:
        model(**inputs)
    assert str(error.value) == (
        "BertSelfAttention: lost the mixing, its attention must go through the AttentionInterface"
    )


def mixed_bert():
    return build("BertForMaskedLM", head_mixing="position-wise")[0]


def replicated():
    """Call an attention as torch's DataParallel does, on a copy without parameters."""
    model, _ = build("LlamaForCausalLM", head_mixing="position-wise")
    return model.model.layers[0].self_attn._replicate_for_data_parallel()()


def wrapped():
    """Return a model with a part of the name that torch's FSDP gives to what it wraps."""
    model, _ = build("BertForMaskedLM")
    model.head = type("FSDPModule", (torch.nn.Identity,), {"__module__": "torch.distributed"})()
    return model


def dispatched():
    """Return a model whose attention has a forward of its own, as accelerate puts there."""
    model, _ = build("BertForMaskedLM")
    attention = model.bert.encoder.layer[0].attention.self
    attention.forward = attention.forward
    return model


T5_HAS_ITS_OWN = "must be left out, the model has its own"
# The message, and the call that is refused with it.
REFUSED = {
    "BertForMaskedLM: is mixed already; must be unmixed first": lambda: hf.mix(
        mixed_bert(), "position-wise"
    ),
    "TransformerEncoderLayer: is no model of transformers; the functions of mixhead_plugin.nn take "
    "other models of torch": lambda: hf.mix(
        torch.nn.TransformerEncoderLayer(8, 2), "position-wise"
    ),
    "head: is in FSDPModule, which would not share the gradients of new parameters; must be mixed "
    "before": lambda: hf.mix(wrapped(), "position-wise"),
    "bert.encoder.layer.0.attention.self: has a forward of its own, as device_map and accelerate "
    "put there; must be mixed before": lambda: hf.mix(dispatched(), "position-wise"),
    f"relative_position: {T5_HAS_ITS_OWN}": lambda: hf.mix(
        build("T5Model")[0], relative_position="t5"
    ),
    f"relative_gain: {T5_HAS_ITS_OWN}": lambda: hf.mix(build("T5Model")[0], relative_gain=2),
    f"head_dim: {T5_HAS_ITS_OWN}": lambda: hf.mix(build("T5Model")[0], head_dim=4),
    f"value_head_dim: {T5_HAS_ITS_OWN}": lambda: hf.mix(build("T5Model")[0], value_head_dim=4),
    "Gemma2Attention: softcap cannot be used with mixed heads": lambda: hf.mix(
        build("Gemma2ForCausalLM")[0], "position-wise"
    ),
    "BloomForCausalLM: has no attention that goes through the AttentionInterface and whose "
    "projections are known; for other names of projections, hf.LAYOUTS needs a row "
    "(docs/huggingface.md)": (lambda: hf.mix(build("BloomForCausalLM")[0], "position-wise")),
    "a mixed model in torch's DataParallel: start a process for each GPU, as torchrun does": (
        replicated
    ),
    "BertForMaskedLM: without head_mixing its outputs would change": lambda: hf.unmix(mixed_bert()),
    "T5Model: without normalizer l2 its outputs would change": lambda: hf.unmix(
        build("T5Model", normalizer="l2")[0]
    ),
    "BertForMaskedLM: is a model of transformers, must be unmixed by mixhead_plugin.hf.unmix": (
        lambda: torch_door.unmix(mixed_bert())
    ),
    "BertForMaskedLM: is a model of transformers, must be given to the functions of "
    "mixhead_plugin.hf": lambda: torch_door.ablate(mixed_bert(), {0: [1]}),
    "T5Model: has no mixing": lambda: hf.unmix(build("T5Model")[0]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_mixed_or_unmixed_is_refused_in_one_line(message):
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert str(error.value) == message


PARAMETRIZATIONS = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "older weight_norm": torch.nn.utils.weight_norm,
}


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_projections_whose_weights_are_computed_are_mixed_but_neither_folded_nor_pruned(name):
    def parametrized(**variant):
        model, inputs = build("LlamaForCausalLM", **variant)
        for projection in ("q_proj", "o_proj"):
            PARAMETRIZATIONS[name](model.model.layers[0].self_attn.get_submodule(projection))
        return model, inputs

    model, inputs = parametrized()
    before = model(**inputs).logits
    torch.testing.assert_close(hf.mix(model, "position-wise")(**inputs).logits, before)
    shake(model)(**inputs).logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())

    plain, _ = parametrized()
    mixed, _ = parametrized(feature_mixing="shared")
    before = mixed(**inputs).logits
    for refused, what in (
        (lambda: hf.prune(plain, {0: [0, 1]}), "pruned"),
        (lambda: hf.fold(mixed), "folded"),
    ):
        with pytest.raises(ValueError) as error:
            refused()
        assert str(error.value) == (
            "LlamaForCausalLM: model.layers.0.self_attn.q_proj.weight is computed in each call, as "
            f"by weight_norm; must be {what} before that is added"
        )
    assert torch.equal(mixed(**inputs).logits, before)


FUNCTIONS = [name for name in hf.__all__ if inspect.isfunction(getattr(hf, name))]
# Each of them, called with a model.
OF_A_MODEL = {
    "mix": lambda model: hf.mix(model, "average"),
    "unmix": hf.unmix,
    "fold": hf.fold,
    "ablate": lambda model: hf.ablate(model, {0: [0]}),
    "importance": lambda model: hf.importance(model, [torch.ones(1)], torch.sum),
    "attentions": lambda model: hf.attentions(model, {}),
    "prune": lambda model: hf.prune(model, {0: [0]}),
    "view": lambda model: hf.view(model, None, "text", "page.html"),
    "parameter_groups": lambda model: hf.parameter_groups(model, 0.1),
    "mixing_parameters": hf.mixing_parameters,
    "load": hf.load,
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_class_in_place_of_a_model_is_refused(function):
    with pytest.raises(ValueError) as error:
        OF_A_MODEL[function](BertForMaskedLM)
    wanted = "a model of transformers"
    name = "model"
    if function in ("parameter_groups", "mixing_parameters"):  # of both doors
        wanted = "a module of torch"
    elif function == "load":
        name = "folder"
        wanted = "a folder, or a name on the hub"
    assert str(error.value) == f"{name} is the class BertForMaskedLM: must be {wanted}"


@pytest.mark.parametrize("function", ["unmix", "fold", "attentions", "prune", "view"])
def test_what_reads_a_config_refuses_a_module_around_a_model(function):
    model = torch.nn.Sequential(mixed_bert())
    with pytest.raises(ValueError) as error:
        OF_A_MODEL[function](model)
    assert str(error.value) == "model is a Sequential: must be a model of transformers"


def test_asking_for_nothing_is_refused_with_a_list_of_what_there_is():
    with pytest.raises(ValueError) as error:
        hf.mix(build("T5Model")[0])
    told = str(error.value)
    assert told.startswith(
        "head_mixing: must be given, as 'position-wise' or 'position-independent', or another of "
        "normalizer, score_mixing,"
    )


def test_a_model_that_cannot_be_folded_keeps_its_tensors():
    model, _ = build("BertForMaskedLM", head_mixing="position-wise", feature_mixing="shared")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError) as error:
        hf.fold(model)
    assert str(error.value) == "BertForMaskedLM: without head_mixing its outputs would change"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_that_cannot_be_mixed_stays_and_no_call_leaves_activations_behind():
    """An activation that a module still holds could not be copied."""
    model, _ = build(
        "MarianMTModel", {"d_model": 24, "hidden_size": 24, "decoder_attention_heads": 3}
    )
    with pytest.raises(ValueError) as error:
        hf.mix(model, "differential")
    assert str(error.value) == "num_heads 3: must be a multiple of 2 with differential mixing"

    hf.mix(model, "position-wise")
    attention = model.model.encoder.layers[0].self_attn
    attention.k_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2, dtype=torch.long))
    attention.q_proj(torch.ones(1, 24).double())
    copy.deepcopy(model)


# ---- what is refused when a model is loaded ----------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    """The folder of a mixed model."""
    mixed_bert().save_pretrained(tmp_path)
    return tmp_path


def test_a_saved_model_tells_that_nothing_is_missing(saved):
    _, info = hf.load(saved, output_loading_info=True)
    assert info["missing_keys"] == set()


def test_from_pretrained_names_the_function_that_loads_a_mixed_model(saved):
    with pytest.raises(ValueError) as error:
        type(mixed_bert()).from_pretrained(saved, attn_implementation="eager")
    assert str(error.value) == (
        "BertForMaskedLM: its config is for mixed heads, load this model by "
        "mixhead_plugin.hf.load, or make a new one from a plain config and call hf.mix"
    )


def test_a_folder_without_the_tensors_of_the_mixing_is_refused(saved):
    path = saved / "model.safetensors"
    kept = {
        name: value for name, value in load_file(path).items() if not name.endswith("mixing.bias")
    }
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(ValueError) as error:
        hf.load(saved)
    missing = "bert.encoder.layer.0.attention.self.head_mixing.bias"
    assert str(error.value) == f"{saved}: has no tensor for {missing}; 2 are missing"


def plain_model(folder):
    build("GPT2LMHeadModel")[0].save_pretrained(folder)


def checkpoints(folder):
    mixed_bert().save_pretrained(folder / "checkpoint-7")


def adapter(folder):
    (folder / "adapter_config.json").write_text("{}")


# What lies in a folder, and the message.
NO_FOLDERS = {
    plain_model: "its config has no entry mixhead; load it by from_pretrained",
    checkpoints: "has no config.json; must be what save_pretrained wrote, as checkpoint-7 in it",
    adapter: "has no config.json; load its base by hf.load, and then the adapter by "
    "PeftModel.from_pretrained",
    Path.touch: "has no config.json; must be what save_pretrained wrote",
    Path.rmdir: "is no folder; must be one that save_pretrained wrote, or a name on the hub",
}


@pytest.mark.parametrize("made", NO_FOLDERS, ids=lambda made: made.__name__)
def test_a_folder_of_something_else_is_refused(made, tmp_path):
    made(tmp_path)
    with pytest.raises(ValueError) as error:
        hf.load(tmp_path)
    assert str(error.value) == f"{tmp_path}: {NO_FOLDERS[made]}"


@pytest.mark.parametrize(
    "cls, given",
    [
        (AutoModelForMaskedLM, " is the class AutoModelForMaskedLM"),
        ("position-wise", " 'position-wise'"),
    ],
    ids=["class", "text"],
)
def test_what_makes_no_model_is_refused(cls, given, saved):
    with pytest.raises(ValueError) as error:
        hf.load(saved, cls)
    assert str(error.value) == f"cls{given}: must be the class of a model, as BertForMaskedLM"


def test_a_class_that_transformers_lacks_must_be_given(saved):
    config = saved / "config.json"
    config.write_text(config.read_text().replace("BertForMaskedLM", "Own"))
    with pytest.raises(ValueError) as error:
        hf.load(saved)
    assert str(error.value) == f"{saved}: transformers has no class Own; give the class as cls"
