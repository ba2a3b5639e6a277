"""Adapters of PEFT change the queries that mixings read.

An adapter is not saved without the mixing.
"""

import copy
import json
import subprocess
import sys
import types

import pytest
import torch

from mixhead_plugin.hf import peft_guards
from mixhead_plugin.nn import MixedAttention
from mixhead_plugin.nn import mix as nn_mix
from tests.hf.models import FEW, QUERIES, build, hf, shake, whole
from tests.nn.calling import Model as Calling
from tests.nn.calling import inputs as calling_inputs

peft = pytest.importorskip("peft")


def adapt(model, **options):
    """Return a model with a low-rank adapter of its queries.

    All that is trained is away from its start.
    """
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=QUERIES, **options))
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter) * parameter.requires_grad
    return model


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("name", FEW)
def test_mixings_read_adapted_queries_and_adapters_keep_the_mixing(name, tmp_path):
    base, inputs = build(name, head_mixing="position-wise")
    inputs = whole(base, inputs)
    adapted = adapt(copy.deepcopy(base))
    with torch.no_grad():
        found = adapted(**inputs).logits
        assert not torch.allclose(found, base(**inputs).logits)
        with pytest.raises(ValueError, match=r"modules_to_save=\['head_mixing'\]"):
            adapted.save_pretrained(tmp_path)
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
        torch.testing.assert_close(hf.load(tmp_path / "merged")(**inputs).logits, found)

        adapted = adapt(copy.deepcopy(base), modules_to_save=[*hf.PARTS])
        found = adapted(**inputs).logits
        adapted.save_pretrained(tmp_path)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
        torch.testing.assert_close(loaded(**inputs).logits, found)
        loaded.merge_and_unload().save_pretrained(tmp_path / "trained")
        torch.testing.assert_close(hf.load(tmp_path / "trained")(**inputs).logits, found)
    for change in (lambda model: hf.mix(model, "average"), lambda model: hf.prune(model, {0: [0]})):
        with pytest.raises(ValueError, match="has adapters; must be"):
            change(adapt(build(name)[0]))


LORA = dict(target_modules=["q_proj"], init_lora_weights=False)
LANGUAGE = dict(task_type="CAUSAL_LM", num_virtual_tokens=2)
KINDS = {
    "LoRA": lambda **kept: peft.LoraConfig(**LORA, **kept),
    "IA3": lambda **kept: peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], **kept),
    "prompt tuning": lambda **kept: peft.PromptTuningConfig(**LANGUAGE, **kept),
    "prefix tuning": lambda **kept: peft.PrefixTuningConfig(**LANGUAGE, **kept),
    "p-tuning": lambda **kept: peft.PromptEncoderConfig(**LANGUAGE, encoder_hidden_size=8, **kept),
}
REFUSED = (
    r"^adapter: must have modules_to_save=\['feature_mixing', 'head_mixing'\], or it would lose "
    r"the mixing"
)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapter_is_saved_with_the_mixing_or_not_at_all(kind, tmp_path):
    base, inputs = build("LlamaForCausalLM", head_mixing="position-wise", feature_mixing="shared")
    adapted = peft.get_peft_model(copy.deepcopy(base), KINDS[kind]())
    for save in (
        lambda: adapted.save_pretrained(tmp_path),
        lambda: adapted.save_pretrained(tmp_path, state_dict=adapted.state_dict()),
        lambda: peft.get_peft_model_state_dict(adapted),
    ):
        with pytest.raises(ValueError, match=REFUSED) as refused:
            save()
        can_be_merged = hasattr(adapted.base_model, "merge_and_unload")
        assert ("merge_and_unload" in str(refused.value)) == can_be_merged
    kept = ["head_mixing", "feature_mixing"]
    adapted = peft.get_peft_model(copy.deepcopy(base), KINDS[kind](modules_to_save=kept))
    expected = shake(adapted)(**inputs).logits
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
    torch.testing.assert_close(loaded(**inputs).logits, expected)
    for other, lost in ((None, kept[::-1]), ("feature_mixing", kept[:1])):
        plain, _ = build("LlamaForCausalLM", **({} if other is None else {other: "shared"}))
        names = list(plain.state_dict())
        with pytest.raises(ValueError, match=rf"^adapter: was trained on a base with {lost[0]} "):
            peft.PeftModel.from_pretrained(plain, tmp_path)
        assert list(plain.state_dict()) == names
        with pytest.raises(
            ValueError, match=rf"^adapter: has tensors of \['{lost[0]}'.*, which its base lacks"
        ):
            plain.load_adapter(
                peft_config=KINDS[kind](modules_to_save=kept),
                adapter_state_dict=peft.get_peft_model_state_dict(adapted),
            )


@torch.no_grad()
def test_adapters_are_merged_unmerged_and_added_by_transformers(tmp_path):
    base, inputs = build("LlamaForCausalLM", head_mixing="position-wise", feature_mixing="shared")
    adapted = peft.get_peft_model(copy.deepcopy(base), KINDS["LoRA"]())
    expected = adapted(**inputs).logits
    adapted.merge_adapter()
    torch.testing.assert_close(adapted(**inputs).logits, expected)
    adapted.unmerge_adapter()
    torch.testing.assert_close(adapted(**inputs).logits, expected)
    with adapted.disable_adapter():
        torch.testing.assert_close(adapted(**inputs).logits, base(**inputs).logits)
    for change, problem in ((hf.unmix, "unmixed after"), (hf.fold, "folded after")):
        with pytest.raises(
            ValueError, match=rf"^PeftModel: has adapters; must be {problem} they are merged$"
        ):
            change(adapted)
    base.add_adapter(KINDS["LoRA"]())
    with pytest.raises(ValueError, match=REFUSED):
        base.save_pretrained(tmp_path)


# ---- what an adapter tells of its base ---------------------------------------------------------

BASES = {
    "this one has softmax": {},
    "this one has sigsoftmax": {"normalizer": "sigsoftmax"},
}


@torch.no_grad()
def test_an_adapter_tells_by_which_variant_its_base_was_mixed(tmp_path):
    """This variant has no tensors by which it could be told."""
    base, inputs = build("LlamaForCausalLM", normalizer="l2")
    adapted = peft.get_peft_model(copy.deepcopy(base), KINDS["LoRA"]())
    expected = adapted(**inputs).logits
    adapted.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["mixhead"]["normalizer"] == (
        "l2"
    )
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(loaded(**inputs).logits, expected)

    for other, variant in BASES.items():
        problem = (
            f"adapter: was trained on a base with normalizer l2, {other}; the base must be mixed "
            "in the same way"
        )
        for load in (
            lambda base: peft.PeftModel.from_pretrained(base, tmp_path),
            lambda base: base.load_adapter(str(tmp_path)),
        ):
            with pytest.raises(ValueError) as error:
                load(build("LlamaForCausalLM", **variant)[0])
            assert str(error.value) == problem


@torch.no_grad()
def test_an_adapter_that_transformers_was_refused_leaves_the_base_as_it_was(tmp_path):
    mixed, inputs = build("LlamaForCausalLM", normalizer="l2")
    adapt(mixed).save_pretrained(tmp_path)
    base, _ = build("LlamaForCausalLM")
    expected = base(**inputs).logits
    with pytest.raises(ValueError, match=r"^adapter: was trained on a base with normalizer l2"):
        base.load_adapter(str(tmp_path))
    torch.testing.assert_close(base(**inputs).logits, expected)


@torch.no_grad()
def test_an_adapter_that_peft_was_refused_leaves_the_base_and_its_other_adapters(tmp_path):
    mixed, inputs = build("LlamaForCausalLM", normalizer="l2")
    adapt(mixed).save_pretrained(tmp_path)
    base, _ = build("LlamaForCausalLM")
    names = list(base.state_dict())
    refused = r"^adapter: was trained on a base with normalizer l2"
    for given in ({}, {"config": peft.PeftConfig.from_pretrained(tmp_path)}):
        with pytest.raises(ValueError, match=refused):
            peft.PeftModel.from_pretrained(base, tmp_path, **given)
        assert list(base.state_dict()) == names

    adapted = adapt(base)
    expected = adapted(**inputs).logits
    with pytest.raises(ValueError, match=refused):
        adapted.load_adapter(tmp_path, "second")
    assert [*adapted.peft_config] == ["default"]
    torch.testing.assert_close(adapted(**inputs).logits, expected)


@torch.no_grad()
def test_a_config_that_is_given_need_not_be_in_the_folder(tmp_path):
    base, inputs = build("LlamaForCausalLM", normalizer="l2")
    adapted = adapt(copy.deepcopy(base))
    expected = adapted(**inputs).logits
    adapted.save_pretrained(tmp_path)
    config = peft.PeftConfig.from_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path, config=config)
    torch.testing.assert_close(loaded(**inputs).logits, expected)


# Kinds of adapters that merge modules_to_save.
MERGED = {
    "LoRA": lambda **kept: peft.LoraConfig(**LORA, **kept),
    "DoRA": lambda **kept: peft.LoraConfig(**LORA, use_dora=True, **kept),
    "AdaLoRA": lambda **kept: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9, **kept),
}


@torch.no_grad()
@pytest.mark.parametrize("kind", MERGED)
def test_kinds_of_lora_are_merged_with_a_mixing_that_was_trained(kind, tmp_path):
    base, inputs = build("LlamaForCausalLM", head_mixing="position-wise")
    adapted = peft.get_peft_model(base, MERGED[kind](modules_to_save=["head_mixing"]))
    for parameter in adapted.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
    expected = adapted(**inputs).logits
    adapted.merge_and_unload().save_pretrained(tmp_path)
    torch.testing.assert_close(hf.load(tmp_path)(**inputs).logits, expected)


@torch.no_grad()
def test_a_merge_that_leaves_the_mixing_wrapped_is_not_saved(tmp_path):
    base, _ = build("LlamaForCausalLM", head_mixing="position-wise")
    config = peft.LNTuningConfig(
        target_modules=["input_layernorm"], modules_to_save=["head_mixing"]
    )
    merged = peft.get_peft_model(base, config).merge_and_unload()
    with pytest.raises(ValueError) as refused:
        merged.save_pretrained(tmp_path / "merged")
    assert str(refused.value) == (
        "LlamaForCausalLM: model.layers.0.self_attn.head_mixing is in modules_to_save of PEFT "
        "still, which hf.load could not read; the adapter must be saved, or merged by a kind that "
        "merges modules_to_save, as LoRA"
    )
    assert not (tmp_path / "merged").exists()


@torch.no_grad()
def test_merging_is_promised_only_where_nothing_else_is_saved(tmp_path):
    """Beside modules_to_save, IA3 for example ends in an AttributeError of PEFT."""
    base, _ = build("LlamaForCausalLM", head_mixing="position-wise", feature_mixing="shared")
    adapted = peft.get_peft_model(base, KINDS["IA3"](modules_to_save=["head_mixing"]))
    with pytest.raises(ValueError) as refused:
        adapted.save_pretrained(tmp_path)
    assert str(refused.value) == (
        "adapter: must have modules_to_save=['feature_mixing', 'head_mixing'], or it would lose "
        "the mixing"
    )


@torch.no_grad()
def test_an_adapter_of_a_plain_base_tells_nothing(tmp_path):
    base, _ = build("LlamaForCausalLM")
    config = KINDS["LoRA"]()
    # The same config has served a mixed base before.
    mixed, _ = build("LlamaForCausalLM", normalizer="l2")
    peft.get_peft_model(mixed, config).save_pretrained(tmp_path)
    peft.get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path)
    assert "mixhead" not in json.loads((tmp_path / "adapter_config.json").read_text())
    peft.PeftModel.from_pretrained(base, tmp_path)


def torchs(**variants):
    """Return two attentions of torch, which the other door has mixed, each by its variant."""
    torch.manual_seed(0)
    layers = {name: torch.nn.ModuleList([torch.nn.MultiheadAttention(8, 2)]) for name in "ab"}
    for name, variant in variants.items():
        nn_mix(layers[name], **variant)
    return torch.nn.ModuleDict(layers)


def adapted_torchs(kept=None, **variants):
    config = peft.LoraConfig(target_modules=["out_proj", "q_proj"], modules_to_save=kept)
    return peft.get_peft_model(torchs(**variants), config)


# What is mixed, and what an adapter must save of it.
PARTS_OF_TORCHS = {
    "head_mixing": {"head_mixing": "position-wise"},
    "relative_gain": {"relative_gain": 2},
}


@pytest.mark.parametrize("part", PARTS_OF_TORCHS)
def test_an_adapter_keeps_the_mixing_of_attentions_of_torch_that_the_other_door_has_mixed(
    part, tmp_path
):
    variant = PARTS_OF_TORCHS[part]
    with pytest.raises(ValueError) as refused:
        adapted_torchs(b=variant).save_pretrained(tmp_path)
    assert str(refused.value) == (
        f"adapter: must have modules_to_save=['{part}'], or it would lose the mixing; "
        "merge_and_unload() keeps it, where PEFT can merge this kind of adapter"
    )

    adapted = adapted_torchs(kept=[part], b=variant)
    shake(adapted)
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(torchs(b=variant), tmp_path)
    saved = [name for name in hf.mixing_parameters(adapted) if "modules_to_save" in name]
    assert saved
    for name in saved:
        assert torch.equal(loaded.get_parameter(name), adapted.get_parameter(name)), name


@pytest.mark.parametrize("other", [{}, {"b": {"normalizer": "sigsoftmax"}}], ids=["plain", "other"])
def test_an_adapter_of_attentions_of_torch_is_refused_on_another_base(other, tmp_path):
    """This variant has no tensors by which it could be told."""
    adapted_torchs(b={"normalizer": "l2"}).save_pretrained(tmp_path)
    peft.PeftModel.from_pretrained(torchs(b={"normalizer": "l2"}), tmp_path)

    base = torchs(**other)
    names = list(base.state_dict())
    with pytest.raises(ValueError, match=r"^adapter: was trained on a base with normalizer l2, "):
        peft.PeftModel.from_pretrained(base, tmp_path)
    assert list(base.state_dict()) == names


def test_an_adapter_tells_of_the_attentions_that_are_mixed_beside_plain_ones(tmp_path):
    def adapted(second):
        layers = [MixedAttention(8, 2), MixedAttention(8, 2, **second)]
        config = peft.LoraConfig(target_modules=["q_proj"])
        return peft.get_peft_model(torch.nn.Sequential(*layers), config)

    adapted({"normalizer": "l2"}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^adapter: was trained on a base with normalizer l2, "):
        adapted({}).load_adapter(tmp_path, "second")
    # Sizes belong to the base, and are no variant.
    adapted({"head_dim": 4, "value_head_dim": 4}).save_pretrained(tmp_path / "sizes")
    adapted({}).load_adapter(tmp_path / "sizes", "second")


def test_an_adapter_of_calls_of_torch_that_the_other_door_has_mixed_is_guarded_too(tmp_path):
    def base(**variant):
        torch.manual_seed(0)
        model = Calling().double()
        return nn_mix(model, **variant, example=(calling_inputs(3),)) if variant else model

    def adapted(**kept):
        mixed = base(head_mixing="position-wise")
        return peft.get_peft_model(mixed, peft.LoraConfig(target_modules=["q"], **kept))

    with pytest.raises(ValueError, match=r"^adapter: must have modules_to_save=\['head_mixing'\]"):
        adapted().save_pretrained(tmp_path)
    adapted(modules_to_save=["head_mixing"]).save_pretrained(tmp_path)
    plain = base()
    names = list(plain.state_dict())
    with pytest.raises(ValueError, match=r"^adapter: was trained on a base with head_mixing pos"):
        peft.PeftModel.from_pretrained(plain, tmp_path)
    assert list(plain.state_dict()) == names


def test_a_function_is_checked_wherever_it_has_been_imported(monkeypatch):
    def save(model):
        return "saved"

    def refuse(model):
        raise ValueError("lost")

    module = types.ModuleType("mine")
    module.save_of_mine = save
    monkeypatch.setitem(sys.modules, "mine", module)
    peft_guards._replace_everywhere(save, refuse)
    with pytest.raises(ValueError, match="lost"):
        module.save_of_mine(None)


@pytest.mark.slow
def test_adapters_are_checked_in_a_process_that_has_mixed_nothing():
    program = (
        "from peft import get_peft_model_state_dict, set_peft_model_state_dict\n"
        "import mixhead_plugin.hf\n"
        "for function in (get_peft_model_state_dict, set_peft_model_state_dict):\n"
        "    assert function.__wrapped__\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
