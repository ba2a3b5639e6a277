"""Whoever saves the tensors of a mixing saves what is needed to load it, or is refused.

Whoever loads them is told.
"""

import ast
import copy
import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from safetensors.torch import load_model, save_model
from torch import nn
from torch.nn.utils import parametrize, prune

from mixhead_plugin import nn as mixed_nn
from mixhead_plugin.parts import is_of_a_part
from tests.hf.models import CONFIG, build, hf, shake, transformers, whole


def pair():
    """Return an encoder and a decoder."""
    encoder = transformers.BertModel(transformers.BertConfig(**CONFIG))
    decoder = transformers.BertConfig(**CONFIG, is_decoder=True, add_cross_attention=True)
    return encoder, transformers.BertLMHeadModel(decoder)


def test_a_model_that_is_mixed_inside_alone_is_not_saved(tmp_path):
    inner = build("BertForMaskedLM")[0]
    hf.mix(inner.bert, "position-wise")
    encoder, decoder = pair()
    composed = transformers.EncoderDecoderModel(
        encoder=hf.mix(encoder, "position-wise"), decoder=decoder
    )
    for model, inside in ((inner, "bert"), (composed, "encoder")):
        problem = (
            rf"^{type(model).__name__}: is mixed inside alone \({inside}\..*; mix the outermost "
            r"model$"
        )
        with pytest.raises(ValueError, match=problem):
            model.save_pretrained(tmp_path)
    inner.bert.save_pretrained(tmp_path)
    hf.load(tmp_path)


@torch.no_grad()
def test_a_composed_model_is_mixed_saved_and_loaded_as_a_whole_or_its_parts_alone(tmp_path):
    encoder, decoder = pair()
    model = transformers.EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    inputs = dict.fromkeys(("input_ids", "decoder_input_ids"), torch.randint(3, 31, (2, 5)))
    expected = shake(hf.mix(model, "position-wise"))(**inputs).logits
    model.save_pretrained(tmp_path / "whole")
    torch.testing.assert_close(hf.load(tmp_path / "whole")(**inputs).logits, expected)
    model.encoder.save_pretrained(tmp_path / "part")
    found = hf.load(tmp_path / "part")(inputs["input_ids"])[0]
    torch.testing.assert_close(found, model.encoder(inputs["input_ids"])[0])


def clip():
    """Return a model of two towers, and texts."""
    text = dict(CONFIG, projection_dim=8)
    vision = dict(text, num_hidden_layers=1)
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return transformers.CLIPModel(config).eval(), torch.randint(3, 31, (2, 5))


@torch.no_grad()
def test_a_class_with_some_of_the_attentions_is_loaded_from_the_folder_of_all(tmp_path):
    model, ids = clip()
    shake(hf.mix(model, "position-wise")).save_pretrained(tmp_path / "towers")
    text = hf.load(tmp_path / "towers", transformers.CLIPTextModel)
    torch.testing.assert_close(text(ids)[0], model.text_model(ids)[0])

    model, _ = build("BartForConditionalGeneration", head_mixing="position-wise")
    model.save_pretrained(tmp_path / "bart")
    decoder = hf.load(tmp_path / "bart", transformers.BartForCausalLM).model.decoder
    # The folder has one embedding for both, which transformers gives to the encoder.
    x = torch.randn(2, 5, 32).double()
    expected = model.model.decoder(inputs_embeds=x)[0]
    torch.testing.assert_close(decoder(inputs_embeds=x)[0], expected)


PRUNED_AS_A_PART = (
    "is a part of a pruned model, and its own config does not tell which heads of its layers are "
    "gone; the outermost model must be saved"
)


@pytest.mark.parametrize("is_mixed", [True, False], ids=["mixed", "plain"])
def test_a_part_of_a_pruned_model_is_not_saved_without_the_numbers_of_the_heads(is_mixed, tmp_path):
    model, _ = clip()
    if is_mixed:
        hf.mix(model, "position-wise")
    hf.prune(model, {0: [1]})  # of the text
    with pytest.raises(ValueError) as refused:
        model.text_model.save_pretrained(tmp_path)
    assert str(refused.value) == f"CLIPTextModel: {PRUNED_AS_A_PART}"
    with pytest.raises(ValueError, match=r"^CLIPTextModel: is pruned, and must stay as it is$"):
        hf.unmix(model.text_model)
    model.vision_model.save_pretrained(tmp_path)
    hf.load(tmp_path)


# Encoder and decoder of BART have the config of the whole model. Layer 1 is the second one of the
# encoder, and layer 3 the decoder's first one to the encoder.
@torch.no_grad()
@pytest.mark.parametrize(
    "heads, refused",
    [
        ({1: [0]}, ["decoder"]),
        ({3: [0]}, ["encoder", "decoder"]),
        ({1: [0], 3: [0]}, ["encoder", "decoder"]),
    ],
    ids=["in the encoder", "in the decoder", "in both"],
)
def test_a_part_of_a_pruned_model_is_saved_only_if_its_layers_have_the_numbers_in_the_config(
    heads, refused, tmp_path
):
    model, inputs = build("BartForConditionalGeneration")
    whole = hf.prune(model, heads).model
    for name in refused:
        part = whole.get_submodule(name)
        with pytest.raises(ValueError) as error:
            part.save_pretrained(tmp_path / "part")
        assert str(error.value) == f"{type(part).__name__}: {PRUNED_AS_A_PART}"
    assert not (tmp_path / "part").exists()

    whole.save_pretrained(tmp_path / "whole")
    found = hf.load(tmp_path / "whole")(**inputs)[0]
    torch.testing.assert_close(found, whole(**inputs)[0])


@torch.no_grad()
def test_an_encoder_that_was_pruned_alone_is_saved_and_loaded(tmp_path):
    model, inputs = build("BartForConditionalGeneration")
    encoder = hf.prune(model, {1: [0]}).model.encoder
    # as a config that was read from a file, in which the layers are texts
    encoder.config = type(encoder.config).from_dict(json.loads(encoder.config.to_json_string()))
    encoder.save_pretrained(tmp_path)
    again = hf.load(tmp_path, type(encoder))
    ids = inputs["input_ids"]
    torch.testing.assert_close(again(ids)[0], encoder(ids)[0])


def test_tensors_of_another_mixing_than_that_of_the_config_are_refused(tmp_path):
    build("BertForMaskedLM", head_mixing="position-wise")[0].save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("position-wise", "none"))
    with pytest.raises(ValueError) as error:
        hf.load(tmp_path)
    tensor = "bert.encoder.layer.0.attention.self.head_mixing.bias"
    assert str(error.value) == (
        f"{tmp_path}: has a tensor {tensor} that nothing takes; its config is of another mixing"
    )


def from_a_folder(config, folder, **settings):
    config.save_pretrained(folder)
    loaded = transformers.AutoConfig.from_pretrained(folder)
    return transformers.AutoModel.from_config(loaded, **settings)


# How a user makes a new model from the config of a mixed one.
WAYS = {
    "class": lambda config, folder: transformers.BertModel(config),
    "from_config": lambda config, folder: transformers.AutoModel.from_config(config),
    "eager": lambda config, folder: transformers.AutoModel.from_config(
        copy.deepcopy(config), attn_implementation="eager"
    ),
    "folder": from_a_folder,
    "folder, eager": lambda config, folder: from_a_folder(
        config, folder, attn_implementation="eager", experts_implementation="eager"
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_new_model_from_the_config_of_a_mixed_one_is_refused(way, tmp_path):
    encoder, decoder = pair()
    config = hf.mix(encoder, "position-wise").config
    problem = (
        r"^BertModel: its config is for mixed heads, load this model by mixhead_plugin\.hf\.load, "
        r"or make a new one from a plain config and call hf\.mix$"
    )
    with pytest.raises(ValueError, match=problem):
        WAYS[way](config, tmp_path)
    composed = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        config, decoder.config
    )
    with pytest.raises(ValueError, match=problem):
        transformers.EncoderDecoderModel(composed)
    hf.unmix(encoder)
    transformers.BertModel(encoder.config)


def as_bin(model, folder, size):
    """Write the tensors of a model as transformers did before safetensors.

    `size` is that of a shard.
    """
    model.config.save_pretrained(folder)
    state = model.state_dict()
    if size == "1GB":
        torch.save(state, folder / "pytorch_model.bin")
        return
    for name, tensor in state.items():
        torch.save({name: tensor}, folder / f"{name}.bin")
    index = {"metadata": {}, "weight_map": {name: f"{name}.bin" for name in state}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


FORMATS = {
    "safetensors": lambda model, folder, size: model.save_pretrained(folder, max_shard_size=size),
    "fp16": lambda model, folder, size: model.save_pretrained(
        folder, max_shard_size=size, variant="fp16"
    ),
    "bin": as_bin,
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", ["1GB", "8KB"], ids=["one file", "shards"])
def test_tensors_without_an_entry_in_the_config_are_named(size, kind, tmp_path):
    model, _ = build("BertForMaskedLM", head_mixing="position-wise")
    FORMATS[kind](model, tmp_path, size)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != hf.MIXHEAD})
    )
    problem = (
        r"no entry mixhead; but it has bert\..*\.head_mixing\.\w+: "
        r"it was saved by a model around the mixed one"
    )
    with pytest.raises(ValueError, match=problem):
        hf.load(tmp_path, variant="fp16" if kind == "fp16" else None)


def test_tensors_of_a_module_around_a_mixed_model_are_not_loaded_without_the_mixing(tmp_path):
    encoder, _ = pair()
    plain = nn.Sequential(copy.deepcopy(encoder))
    around = nn.Sequential(hf.mix(encoder, "position-wise"))
    path = tmp_path / "model.safetensors"
    save_model(around, path)  # as the Trainer does, without a config
    with pytest.raises(RuntimeError, match=r"Unexpected key.*\n?.*0\.encoder.*head_mixing\.bias"):
        load_model(plain, path)
    with pytest.raises(
        ValueError, match=r"has no config\.json; but it has 0\.encoder.*head_mixing\."
    ):
        hf.load(tmp_path)


@torch.no_grad()
def test_a_state_dict_tells_of_the_variant(tmp_path):
    """This variant has no tensors by which it could be told."""
    model, inputs = build("LlamaForCausalLM", normalizer="l2")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    same, _ = build("LlamaForCausalLM", normalizer="l2")
    same.load_state_dict(state)
    torch.testing.assert_close(same(**inputs).logits, model(**inputs).logits)

    other, _ = build("LlamaForCausalLM", normalizer="sigsoftmax")
    with pytest.raises(
        RuntimeError, match="self_attn was saved with normalizer l2, this module has"
    ):
        other.load_state_dict(state)
    plain, _ = build("LlamaForCausalLM")
    around = nn.Sequential(model).state_dict()
    for taking, given in ((plain, state), (nn.Sequential(plain), around)):
        with pytest.raises(RuntimeError) as error:
            taking.load_state_dict(given)
        assert str(error.value) == (
            "LlamaForCausalLM: the state dict has mixed heads in model.layers.0.self_attn, the "
            "model has not; call hf.mix in the same way before"
        )
    # A mixed model can start from a plain one, and `unmix` leaves a plain one.
    same.load_state_dict(plain.state_dict())
    unmixed = hf.unmix(hf.mix(build("LlamaForCausalLM")[0], "position-wise"))
    plain.load_state_dict(unmixed.state_dict())


def with_head_of_torch():
    """Return a model of torch around one of transformers, in float64."""
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    return nn.ModuleDict({"bert": build("BertForMaskedLM")[0], "head": attention}).double()


def test_a_state_dict_of_both_doors_is_loaded_where_the_inner_model_is_mixed():
    model = with_head_of_torch()
    hf.mix(model["bert"], "position-wise")
    mixed_nn.mix(model, "position-independent")
    state = shake(model).state_dict()

    again = with_head_of_torch()
    with pytest.raises(ValueError) as refused:
        mixed_nn.load(again, state)
    assert str(refused.value) == (
        "bert.bert.encoder.layer.0.attention.self: is of a model of transformers, must be mixed by "
        "mixhead_plugin.hf.mix before"
    )
    hf.mix(again["bert"], "position-wise")
    loaded = mixed_nn.load(again, state).state_dict()
    torch.testing.assert_close(dict(loaded), dict(state))

    another = with_head_of_torch()
    hf.mix(another["bert"], "position-independent")
    with pytest.raises(RuntimeError, match="was saved with head_mixing position-wise, this module"):
        mixed_nn.load(another, state)


def test_a_trainer_does_not_go_on_from_another_variant(tmp_path):
    """Its checkpoint is a file of safetensors, which has no metadata, beside a config."""

    def trainer(**variant):
        model, _ = build("LlamaForCausalLM", **variant)
        settings = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
        return transformers.Trainer(model, settings)

    folder = str(tmp_path / "checkpoint-1")
    trainer(normalizer="l2").model.save_pretrained(folder)
    for variant, own in (({}, "softmax"), ({"normalizer": "sigsoftmax"}, "sigsoftmax")):
        with pytest.raises(ValueError) as refused:
            trainer(**variant).train(resume_from_checkpoint=folder)
        assert str(refused.value) == (
            f"{folder}: was saved with normalizer l2, this model has {own}; "
            "the model must be mixed in the same way"
        )
    trainer(normalizer="l2")._load_from_checkpoint(folder)

    trainer().model.save_pretrained(folder)
    trainer(normalizer="l2")._load_from_checkpoint(folder)


def test_from_pretrained_says_what_to_do_and_heads_are_not_split(tmp_path):
    model, _ = build("BertForMaskedLM", head_mixing="position-wise")
    model.save_pretrained(tmp_path)
    for attention in ({}, {"attn_implementation": "eager"}):
        with pytest.raises(
            ValueError, match=r"mixed heads, load this model by mixhead_plugin\.hf\.load"
        ):
            type(model).from_pretrained(tmp_path, **attention)
    for split in ({"tp_plan": "auto"}, {"distributed_config": SimpleNamespace(tp_plan="auto")}):
        with pytest.raises(
            ValueError, match=r"^tp_plan: must be left out; heads that are split between processes"
        ):
            hf.load(tmp_path, **split)


@torch.no_grad()
def test_a_plain_config_given_by_hand_does_not_lose_the_mixing(tmp_path):
    """A variant without tensors, as this one, would leave no trace."""
    model, inputs = build("BertForMaskedLM", normalizer="l2")
    model.save_pretrained(tmp_path)
    plain = transformers.BertConfig(**CONFIG)
    problem = (
        f"BertForMaskedLM: {tmp_path} has mixed heads, but the given config has not; load this "
        "model by mixhead_plugin.hf.load"
    )
    for cls in (transformers.BertForMaskedLM, transformers.AutoModelForMaskedLM):
        with pytest.raises(ValueError) as error:
            cls.from_pretrained(tmp_path, config=plain)
        assert str(error.value) == problem
    loaded = hf.load(tmp_path, config=plain, dtype=torch.float64)
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)

    build("BertForMaskedLM")[0].save_pretrained(tmp_path / "plain")
    transformers.BertForMaskedLM.from_pretrained(tmp_path / "plain", config=plain)


@torch.no_grad()
@pytest.mark.parametrize("copied", [lambda state: state, dict], ids=["metadata", "tensors alone"])
def test_a_state_dict_given_to_from_pretrained_does_not_lose_the_mixing(copied):
    model, _ = build("BertForMaskedLM", head_mixing="position-wise")
    state = copied(model.state_dict())
    with pytest.raises(
        ValueError, match=r"^BertForMaskedLM: the given state_dict has mixed heads in bert\."
    ) as error:
        transformers.BertForMaskedLM.from_pretrained(
            None, config=transformers.BertConfig(**CONFIG), state_dict=state
        )
    assert str(error.value).endswith(
        "the model has not; make a plain model, call hf.mix in the same way, and load_state_dict"
    )


@torch.no_grad()
@pytest.mark.parametrize("auto", ["AutoModelForMaskedLM", "AutoModel"])
def test_auto_classes_load_a_folder_whose_one_file_of_code_the_user_trusts(auto, tmp_path):
    model, inputs = build("BertForMaskedLM", head_mixing="position-wise")
    model.save_pretrained(tmp_path / "folder")
    imports = ast.parse((tmp_path / "folder" / "modeling_mixhead.py").read_text()).body[1:]
    assert [ast.unparse(line) for line in imports] == ["from mixhead_plugin.hf.auto import *"]
    load = getattr(transformers, auto).from_pretrained
    for untrusted in ({}, {"trust_remote_code": False}):
        with pytest.raises(ValueError, match=r"mixed heads, load this model by mixhead_plugin\.hf"):
            load(tmp_path / "folder", **untrusted)

    settings = dict(trust_remote_code=True, output_hidden_states=True, dtype=torch.float64)
    loaded = load(tmp_path / "folder", **settings)
    expected = model if auto == "AutoModelForMaskedLM" else model.bert
    assert type(loaded) is type(expected)
    assert loaded.config.output_hidden_states
    torch.testing.assert_close(loaded(**inputs)[0], expected(**inputs)[0])

    loaded.save_pretrained(save_directory=tmp_path / "again")
    transformers.AutoModel.from_pretrained(tmp_path / "again", trust_remote_code=True)

    config = transformers.AutoConfig.from_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match=r"mixed heads, load this model by mixhead_plugin\.hf"):
        getattr(transformers, auto).from_config(config, trust_remote_code=True)


def test_an_unmixed_model_is_saved_without_the_file_and_others_code_is_left_alone(tmp_path):
    encoder, _ = pair()
    hf.mix(encoder, "position-wise").save_pretrained(tmp_path / "mixed")
    hf.unmix(encoder).save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "modeling_mixhead.py").exists()
    assert "auto_map" not in json.loads((tmp_path / "plain" / "config.json").read_text())

    own = {"AutoModel": "modeling_own.OwnModel"}
    encoder.config.auto_map = own
    hf.mix(encoder, "position-wise").save_pretrained(tmp_path / "own")
    assert not (tmp_path / "own" / "modeling_mixhead.py").exists()
    assert json.loads((tmp_path / "own" / "config.json").read_text())["auto_map"] == own


def float32_beside_bfloat16():
    """Return a model in bfloat16, whose mixing has numbers that bfloat16 would round."""
    model, inputs = build("BertForMaskedLM")
    hf.mix(model.bfloat16(), "position-wise")
    for parameter in hf.mixing_parameters(model).values():
        parameter.data = parameter.data.float()
    return shake(model), inputs


# Who loads a folder.
LOADERS = {
    "hf.load": lambda folder, **settings: hf.load(folder, **settings),
    "another class": lambda folder, **settings: hf.load(folder, transformers.BertModel, **settings),
    "AutoModelForMaskedLM": lambda folder, **settings: (
        transformers.AutoModelForMaskedLM.from_pretrained(
            folder, trust_remote_code=True, **settings
        )
    ),
    "AutoModel": lambda folder, **settings: transformers.AutoModel.from_pretrained(
        folder, trust_remote_code=True, **settings
    ),
}


@pytest.mark.filterwarnings("ignore:.*was mixed in torch.bfloat16")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_mixing_that_was_saved_in_float32_is_not_rounded(loader, dtype, tmp_path):
    model, _ = float32_beside_bfloat16()
    model.save_pretrained(tmp_path)
    settings = {} if dtype is None else {"dtype": dtype}
    loaded = LOADERS[loader](tmp_path, **settings)
    assert loaded.dtype == (dtype or torch.bfloat16)

    inside = getattr(loaded, "bert", loaded)
    for name, parameter in hf.mixing_parameters(model.bert).items():
        assert torch.equal(inside.get_parameter(name), parameter), name


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*was mixed in torch.bfloat16")
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("size", ["1GB", "8KB"], ids=["one file", "shards"])
def test_a_mixing_in_float32_is_not_rounded_whatever_file_it_lies_in(size, kind, tmp_path):
    model, inputs = float32_beside_bfloat16()
    FORMATS[kind](model, tmp_path, size)
    loaded = hf.load(tmp_path, type(model))
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.filterwarnings("ignore:.*was mixed in torch.bfloat16")
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32], ids=str)
def test_a_mixing_that_was_saved_in_the_dtype_of_its_model_gets_the_one_that_is_asked_for(
    saved, tmp_path
):
    model, _ = build("BertForMaskedLM")
    shake(hf.mix(model.to(saved), "position-wise")).save_pretrained(tmp_path)
    for settings, dtype in (
        ({}, saved),
        ({"dtype": torch.float16}, torch.float16),
        ({"dtype": torch.float32}, torch.float32),
    ):
        parameters = hf.mixing_parameters(hf.load(tmp_path, **settings)).values()
        assert {parameter.dtype for parameter in parameters} == {dtype}


def test_a_config_that_names_no_class_needs_one(tmp_path):
    model, inputs = build("BertForMaskedLM", head_mixing="position-wise")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"its config names no class in architectures; give the class as cls$"
    ):
        hf.load(tmp_path)
    with pytest.raises(
        ValueError, match=r"^cls is the class AutoModel: must be the class of a model, as BertFor"
    ):
        hf.load(tmp_path, transformers.AutoModel)
    loaded = hf.load(tmp_path, type(model))
    torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)


def test_a_class_that_mixes_where_it_is_made_is_loaded(tmp_path):
    class Own(transformers.BertForMaskedLM):
        def __init__(self, config):
            super().__init__(config)
            hf.mix(self, "position-wise")

    model = shake(Own(transformers.BertConfig(**CONFIG))).eval()
    inputs = {"input_ids": torch.randint(3, 31, (2, 5))}
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(hf.load(tmp_path, Own)(**inputs).logits, model(**inputs).logits)


@pytest.fixture
def empty_is_nan():
    """Let torch fill memory that it does not initialise with NaN, so that nobody can read it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def that_mixes(**variant):
    """Return a class of one's own that mixes where it is made."""

    class Own(transformers.BertForMaskedLM):
        def __init__(self, config):
            super().__init__(config)
            hf.mix(self, **variant)

    return Own


def parts_of(model):
    return {name: tensor for name, tensor in model.state_dict().items() if is_of_a_part(name)}


@pytest.mark.parametrize(
    "variant",
    [
        {"head_mixing": "position-wise", "feature_mixing": "heads", "attention_gate": "element"},
        {"head_mixing": "differential", "score_mixing": "position-independent"},
        {"head_mixing": "average", "attention_sink": "learned"},
    ],
    ids=str,
)
def test_a_class_that_mixes_where_it_is_made_starts_what_its_folder_lacks(
    variant, empty_is_nan, tmp_path
):
    plain = transformers.BertForMaskedLM(transformers.BertConfig(**CONFIG))
    plain.save_pretrained(tmp_path)
    loaded = that_mixes(**variant).from_pretrained(tmp_path)
    torch.testing.assert_close(parts_of(loaded), parts_of(hf.mix(plain, **variant)))


@pytest.mark.parametrize("head_mixing", ["random", "low-rank"])
def test_what_starts_at_random_where_a_folder_lacks_it_differs_between_layers(
    head_mixing, empty_is_nan, tmp_path
):
    transformers.BertForMaskedLM(transformers.BertConfig(**CONFIG)).save_pretrained(tmp_path)
    numbers = torch.random.get_rng_state()
    loaded = that_mixes(head_mixing=head_mixing).from_pretrained(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), numbers)
    first, second = (each.attention.self.head_mixing for each in loaded.bert.encoder.layer)
    for name, tensor in first.state_dict().items():
        assert tensor.isfinite().all()
        assert not tensor.any() or not torch.equal(tensor, second.state_dict()[name])


class OwnModel(transformers.PreTrainedModel):
    """A model of one's own with an attention of `nn`."""

    config_class = transformers.BertConfig
    head_mixing = "none"

    def __init__(self, config):
        super().__init__(config)
        self.attention = mixed_nn.MixedAttention(32, 4, head_mixing=self.head_mixing)
        self.post_init()


class OwnMixedModel(OwnModel):
    head_mixing = "position-wise"


def test_a_model_of_ones_own_starts_what_its_folder_lacks(empty_is_nan, tmp_path):
    config = transformers.BertConfig(**CONFIG)
    OwnModel(config).save_pretrained(tmp_path / "plain")
    loaded = OwnMixedModel.from_pretrained(tmp_path / "plain").attention.head_mixing
    assert torch.equal(loaded.bias, torch.eye(4))
    assert not loaded.query_weight.any()

    # What the folder has stays as it was trained.
    model = shake(OwnMixedModel(config))
    state = model.state_dict()
    model.save_pretrained(tmp_path / "mixed")
    torch.testing.assert_close(
        OwnMixedModel.from_pretrained(tmp_path / "mixed").state_dict(), state
    )
    del state["attention.head_mixing.query_weight"]
    half = OwnMixedModel.from_pretrained(None, config=config, state_dict=state)
    assert torch.equal(half.attention.head_mixing.bias, state["attention.head_mixing.bias"])
    assert not half.attention.head_mixing.query_weight.any()


def test_the_mixing_of_another_number_of_heads_is_refused(tmp_path):
    build("BertForMaskedLM", head_mixing="position-independent")[0].save_pretrained(tmp_path)
    with pytest.raises(ValueError) as refused:
        hf.load(tmp_path, num_attention_heads=2, ignore_mismatched_sizes=True)
    name = "bert.encoder.layer.0.attention.self.head_mixing.weight"
    assert str(refused.value) == (
        f"{tmp_path}: its {name} is [4, 4], must be [2, 2]; the mixing of other heads cannot be "
        "loaded"
    )
    # Other tensors may have other sizes, as a head for other classes.
    hf.load(tmp_path, vocab_size=7, ignore_mismatched_sizes=True)


class Softmax(nn.Module):
    def forward(self, matrix):
        return matrix.softmax(0)

    def right_inverse(self, matrix):
        return matrix.clamp_min(1e-6).log()


# What computes M of tensors of other names, what takes it away again, and one of these names.
COMPUTED = {
    "parametrization": (
        lambda part: parametrize.register_parametrization(part, "weight", Softmax()),
        lambda part: parametrize.remove_parametrizations(part, "weight"),
        "parametrizations.weight.original",
    ),
    "pruning": (
        lambda part: prune.l1_unstructured(part, "weight", 1),
        lambda part: prune.remove(part, "weight"),
        "weight_mask",
    ),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_a_mixing_of_tensors_of_other_names_is_not_saved(kind, tmp_path):
    change, undo, tensor = COMPUTED[kind]
    model, inputs = build("BertForMaskedLM", head_mixing="position-independent")
    part = model.bert.encoder.layer[1].attention.self.head_mixing
    change(part)
    with pytest.raises(ValueError) as refused:
        model.save_pretrained(tmp_path)
    assert str(refused.value) == (
        "BertForMaskedLM: bert.encoder.layer.1.attention.self.head_mixing has a tensor "
        f"{tensor}, as of a parametrization or of pruning, which hf.load could not read; that "
        "must be removed before the model is saved"
    )
    undo(part)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(hf.load(tmp_path)(**inputs).logits, model(**inputs).logits)


@torch.no_grad()
def test_offloaded_models_are_weighed_and_refused_where_a_change_would_be_lost():
    device = torch.device("cpu")
    model, inputs = build("LlamaForCausalLM", feature_mixing="shared", normalizer="softmax")
    plain, _ = build("LlamaForCausalLM")
    batches = [whole(model, inputs)]

    def loss(model, batch):
        return model(**batch).logits.square().sum()

    expected = hf.importance(model, batches, loss)
    outputs = model(**inputs).logits
    cpu_offload(model, device)
    torch.testing.assert_close(hf.importance(model, batches, loss), expected)
    for function, each in (
        (lambda: hf.unmix(model), "unmixed"),
        (lambda: hf.fold(model), "unmixed"),
        (lambda: hf.prune(model, {0: [0, 1]}), "pruned"),
        (lambda: hf.mix(cpu_offload(copy.deepcopy(plain), device), "position-wise"), "mixed"),
    ):
        with pytest.raises(
            ValueError, match=rf"is offloaded; must be {each} before it is offloaded$"
        ):
            function()
    torch.testing.assert_close(model(**inputs).logits, outputs)
