"""Attentions that go through the AttentionInterface are found without a row.

Those of other sizes or another order are refused; towers that cannot be mixed are named.
"""

import copy
import functools
import json
import warnings

import pytest
import torch

from tests.hf.models import CONFIG, build, hf, shake, transformers


def row(monkeypatch, name, *fields, **others):
    monkeypatch.setitem(hf.LAYOUTS, f"{name}Attention", hf.Layout(*fields, **others))


def test_a_projection_that_gives_one_head_after_another_is_neither_mixed_nor_pruned():
    model, inputs = build("GPTNeoXForCausalLM")
    before = model(**inputs).logits
    for refused in (lambda: hf.mix(model, "position-wise"), lambda: hf.prune(model, {0: [1]})):
        with pytest.raises(
            ValueError,
            match=r"query_key_value must give queries, keys, values one after another, each f",
        ):
            refused()
    assert torch.equal(model(**inputs).logits, before)
    with hf.ablate(model, {0: [1]}):  # needs the output projection alone
        assert not torch.allclose(model(**inputs).logits, before)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_a_projection_that_gives_all_queries_then_keys_then_values_is_served(key_heads):
    model, inputs = build("Phi3ForCausalLM", {"num_key_value_heads": key_heads})
    before = model(**inputs).logits
    torch.testing.assert_close(
        hf.mix(copy.deepcopy(model), "position-wise")(**inputs).logits, before
    )
    mixed = shake(hf.mix(copy.deepcopy(model), feature_mixing="shared"))
    expected = mixed(**inputs).logits
    assert not torch.allclose(expected, before)
    torch.testing.assert_close(hf.fold(mixed)(**inputs).logits, expected)
    problem = (
        "^Phi3Attention: cannot be cut, because its forward needs all heads; "
        "ablate them, or mix them first$"
    )
    with pytest.raises(ValueError, match=problem):
        hf.prune(model, {0: [2, 3]})
    shake(hf.mix(model, "position-wise"))
    with hf.ablate(model, {0: [2, 3]}):
        expected = model(**inputs).logits
    torch.testing.assert_close(hf.prune(model, {0: [2, 3]})(**inputs).logits, expected)


@torch.no_grad()
def test_gates_beside_queries_are_not_mixed_but_heads_can_be_silenced():
    sizes = dict(
        head_dim=8, layer_types=["full_attention"] * 2, mlp_only_layers=[0, 1], num_experts=2
    )
    config = transformers.Qwen3NextConfig(**CONFIG, **sizes)
    model = transformers.Qwen3NextForCausalLM(config).eval()
    for refused in (lambda: hf.mix(model, "position-wise"), lambda: hf.prune(model, {0: [0, 1]})):
        with pytest.raises(ValueError, match=r"q_proj has 64 features, but 4 heads of 8 have 32$"):
            refused()
    ids = torch.randint(3, 31, (2, 5))
    with hf.ablate(model, {0: [1]}):  # needs the output projection alone
        found = model(ids, use_cache=False).logits
    model.model.layers[0].self_attn.o_proj.weight[:, 8:16] = 0
    torch.testing.assert_close(found, model(ids, use_cache=False).logits)


@torch.no_grad()
def test_rotations_that_ask_for_more_than_positions_do_not_hide_the_order():
    model, inputs = build("ModernBertModel")
    before = model(**inputs)[0]
    torch.testing.assert_close(hf.mix(model, "position-wise")(**inputs)[0], before)


def test_keys_and_values_in_the_wrong_order_are_noticed(monkeypatch):
    row(
        monkeypatch,
        "Granite",
        ("q_proj",),
        "num_attention_heads",
        "head_dim",
        ("v_proj",),
        ("k_proj",),
    )
    model, inputs = build("GraniteForCausalLM")
    before = model(**inputs).logits
    problem = (
        r"^GraniteAttention: cannot be mixed, "
        r"model\.layers\.0\.self_attn\.v_proj does not give the keys that its attention gets$"
    )
    for refused in (lambda: hf.mix(model, "position-wise"), lambda: hf.prune(model, {0: [0, 1]})):
        with pytest.raises(ValueError, match=problem):
            refused()
    assert torch.equal(model(**inputs).logits, before)


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


def rotating(monkeypatch, change):
    """Let the attentions of Llama change queries and keys [B, H, N, D] where they rotate them."""
    module = transformers.models.llama.modeling_llama
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *_: change(q, k))


MOVES = {
    "positions": lambda q, k: (q.roll(1, 2), k),
    "sentences": lambda q, k: (q.flip(0), k),
    "heads": lambda q, k: (q.flip(1), k),
    "all heads but the last one": lambda q, k: (q[:, [1, 2, 0, 3]], k),
    "key heads": lambda q, k: (q, k.flip(1)),
}


@pytest.mark.parametrize("move", MOVES)
def test_queries_of_another_position_sentence_or_head_are_refused(move, monkeypatch):
    rotating(monkeypatch, MOVES[move])
    model, _ = build("LlamaForCausalLM")
    with pytest.raises(ValueError, match=r"_proj does not give the (queries|keys) that its atten"):
        hf.mix(model, "position-wise")


TURNS = {
    "features before heads": lambda output: output.transpose(2, 3),  # [B, N, D, H]
    "all heads but the last one": lambda output: output[:, :, [1, 2, 0, 3]],
}


@pytest.mark.parametrize("turn", TURNS)
def test_outputs_of_heads_in_another_order_are_refused(turn, monkeypatch):
    module = transformers.models.llama.modeling_llama
    usual = module.ALL_ATTENTION_FUNCTIONS

    class Turned:
        @staticmethod
        def get_interface(*names):
            def attend(*args, **kwargs):
                output, weights = usual.get_interface(*names)(*args, **kwargs)
                return TURNS[turn](output), weights

            return attend

    monkeypatch.setattr(module, "ALL_ATTENTION_FUNCTIONS", Turned)
    model, inputs = build("LlamaForCausalLM")
    before = model(**inputs).logits
    refused = {
        "cannot be mixed": [
            lambda: hf.mix(model, "position-wise"),
            lambda: hf.prune(model, {0: [0, 1]}),
        ],
        # heads of a model without mixing
        "its heads cannot be told apart": [
            lambda: hf.ablate(model, {0: [1]}).__enter__(),
            lambda: hf.importance(model, [inputs], lambda model, batch: model(**batch)[0].sum()),
            lambda: hf.attentions(model, inputs),
        ],
    }
    for problem, calls in refused.items():
        for call in calls:
            with pytest.raises(ValueError) as error:
                call()
            assert str(error.value) == (
                f"LlamaAttention: {problem}, model.layers.0.self_attn.o_proj does not get the "
                "outputs of one head after another"
            )
    assert torch.equal(model(**inputs).logits, before)


def test_a_layer_that_is_refused_leaves_the_heads_of_those_before_it(monkeypatch):
    def refused(attention, model):
        assert "layers.0" in attention.name

    monkeypatch.setattr("mixhead_plugin.hf.studied_attention.check_outputs", refused)
    model, inputs = build("LlamaForCausalLM")
    before = model(**inputs).logits
    with pytest.raises(AssertionError), hf.ablate(model, {0: [1], 1: [1]}):
        pass
    assert torch.equal(model(**inputs).logits, before)


def test_heads_whose_order_cannot_be_checked_are_named(monkeypatch):
    model, inputs = build("LlamaForCausalLM")
    forward = type(model.model.layers[0].self_attn).forward

    @functools.wraps(forward)  # whose code names the AttentionInterface
    def with_more(self, hidden_states, *args, table=None, **kwargs):
        assert len(args) or "attention_mask" in kwargs  # as the layers call it
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", with_more)
    told = (
        "^LlamaAttention: the order of its heads could not be checked, because it does not work "
        "alone$"
    )
    with pytest.warns(UserWarning, match=told) as said, hf.ablate(model, {0: [1]}):
        found = model(**inputs).logits
    assert said[0].filename == __file__
    model.model.layers[0].self_attn.o_proj.weight.data[:, 8:16] = 0
    torch.testing.assert_close(found, model(**inputs).logits)


@pytest.mark.filterwarnings("ignore:.*was mixed in torch")
@pytest.mark.parametrize("name", ["GemmaForCausalLM", "Olmo2ForCausalLM"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_order_is_seen_in_half_precision(name, dtype):
    model = build(name)[0].to(dtype)
    assert hf.mixing_parameters(hf.mix(model, "position-wise"))


@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("norm", ["of lengths", "of lengths and means"])
def test_a_norm_over_all_heads_does_not_hide_their_order(norm, heads, monkeypatch):
    sizes = dict.fromkeys(("num_attention_heads", "num_heads", "n_heads"), heads)
    sizes["num_key_value_heads"] = heads
    model, inputs = build("Olmo2ForCausalLM", sizes)
    if norm == "of lengths and means":
        for layer in model.model.layers:
            layer.self_attn.q_norm = torch.nn.LayerNorm(32).double()
            torch.nn.init.normal_(layer.self_attn.q_norm.weight)
    before = model(**inputs).logits
    mixed = hf.mix(copy.deepcopy(model), "position-wise")
    torch.testing.assert_close(mixed(**inputs).logits, before)

    module = transformers.models.olmo2.modeling_olmo2
    order = [1, 0, *range(2, heads)]
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *_: (q[:, order], k))
    with pytest.raises(ValueError, match="q_proj does not give the queries that its attention"):
        hf.mix(model, "position-wise")


@torch.no_grad()
def test_keys_may_come_from_other_positions(monkeypatch):
    rotating(monkeypatch, lambda q, k: (q, k + k.roll(1, 2)))
    model, inputs = build("LlamaForCausalLM")
    before = model(**inputs).logits
    torch.testing.assert_close(hf.mix(model, "position-wise")(**inputs).logits, before)


def test_heads_that_are_told_by_their_number_are_not_cut(monkeypatch):
    rotating(monkeypatch, lambda q, k: (q, k * torch.arange(1.0, 1 + k.size(1))[:, None, None]))
    model, _ = build("LlamaForCausalLM")
    problem = "^LlamaAttention: cannot be cut, because its forward needs all heads; ablate them"
    with pytest.raises(ValueError, match=problem):
        hf.prune(model, {0: [0, 1]})


ALONE = {"GPTJ": {"rotary_dim": 4}, "GPTNeo": {"attention_types": [[["global"], 2]]}}


@pytest.mark.parametrize("name", ALONE)
def test_attentions_that_compute_everything_themselves_are_refused(name, monkeypatch):
    kind = {"GPTJ": "GPTJ", "GPTNeo": "GPTNeoSelf"}[name]
    heads = {"GPTJ": "num_attention_heads", "GPTNeo": "num_heads"}[name]
    row(monkeypatch, kind, ("q_proj",), heads, "head_dim")
    model, _ = build(f"{name}ForCausalLM", ALONE[name])
    if any(hf.finding.calls_the_interface(module) for module in model.modules()):
        pytest.skip("this transformers has put it through the AttentionInterface")  # GPT-J, 5.24
    problem = (
        f"^{kind}Attention: computes its attention itself; "
        "must call it through the AttentionInterface$"
    )
    for refused in (lambda: hf.mix(model, "position-wise"), lambda: hf.prune(model, {0: [0]})):
        with pytest.raises(ValueError, match=problem):
            refused()


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


# Sinks

SINKS = dict(num_local_experts=2, num_experts_per_tok=1, head_dim=8, sliding_window=3)


def gpt_oss():
    model, inputs = build("GptOssForCausalLM", SINKS)
    model.set_experts_implementation("eager")
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
    return model, inputs


def test_sinks_of_the_model_s_own_are_kept_and_trained():
    model, inputs = gpt_oss()
    expected = model(**inputs).logits
    mixed = hf.mix(copy.deepcopy(model), "position-wise")
    torch.testing.assert_close(mixed(**inputs).logits, expected, rtol=1e-5, atol=1e-6)
    for each in (model, mixed):
        each(**inputs).logits.square().sum().backward()
    for ours, theirs in zip(mixed.model.layers, model.model.layers):
        torch.testing.assert_close(
            ours.self_attn.sinks.grad, theirs.self_attn.sinks.grad, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    "variant, problem",
    [
        ({"attention_sink": "zero"}, "so attention_sink must be none"),
        ({"normalizer": "relu2"}, "needs one of the normalizers softmax, "),
    ],
)
def test_sinks_of_the_model_s_own_take_no_others_and_need_a_denominator(variant, problem):
    model, _ = gpt_oss()
    with pytest.raises(ValueError, match=f"^GptOssAttention: has sinks of its own, {problem}"):
        hf.mix(model, **variant)
