"""Attentions whose projections give heads in another order than their row says are refused.

An attention that only looks so, because it has a norm over all heads, is served.
"""

import copy
import functools

import pytest
import torch

from tests.hf.models import CONFIG, build, hf, shake, transformers
from tests.hf.patches import rotating, row


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


def changing_outputs(monkeypatch, change):
    """Let Llama's attention change the outputs [B, N, H, D] that it projects."""
    module = transformers.models.llama.modeling_llama
    usual = module.ALL_ATTENTION_FUNCTIONS

    class Changed:
        @staticmethod
        def get_interface(*names):
            def attend(*args, **kwargs):
                output, weights = usual.get_interface(*names)(*args, **kwargs)
                return change(output), weights

            return attend

    monkeypatch.setattr(module, "ALL_ATTENTION_FUNCTIONS", Changed)


@pytest.mark.parametrize("turn", TURNS)
def test_outputs_of_heads_in_another_order_are_refused(turn, monkeypatch):
    changing_outputs(monkeypatch, TURNS[turn])
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


def test_outputs_whose_order_cannot_be_seen_are_mixed_with_a_warning(monkeypatch):
    """A gate that starts as 0 hides it."""
    changing_outputs(monkeypatch, lambda output: 0 * output)
    model, _ = build("LlamaForCausalLM")
    told = (
        "^LlamaAttention: the order of its heads could not be checked, because it computes them in "
        "its own way$"
    )
    with pytest.warns(UserWarning, match=told) as said:
        hf.mix(model, "position-wise")
    assert said[0].filename == __file__
    assert len(hf.mixing_parameters(model)) > 0


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
