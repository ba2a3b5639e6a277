import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from mixhead_plugin.analysis.heads import Head, all_heads, gated
from mixhead_plugin.analysis.weighing import (
    importance,
    least_important,
    normalised_by_layer,
    pearson,
    removal_order,
    sentence_gradients,
)
from mixhead_plugin.modules.attention import HeadGates, MixheadAttention
from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.ops import NORMALIZERS
from tests.helpers import build, shake, task, tokens


def model_and_attentions(arch, **flags):
    model = shake(build(arch, **flags)).double().eval()
    return model, {name: m for name, m in model.named_modules() if isinstance(m, MixheadAttention)}


def sample(model, sentences):
    lengths = sentences.ne(task().source_dictionary.pad()).sum(1)
    inputs = {"src_tokens": sentences, "src_lengths": lengths}
    if hasattr(model, "encoder"):
        inputs["prev_output_tokens"] = sentences.roll(1, 1)
    return {"net_input": inputs, "target": sentences, "ntokens": int(lengths.sum())}


def sentence_losses(model, batch):
    """[B] in float64, where fairseq's criteria take a softmax in float32."""
    scores = model(**batch["net_input"])[0]  # [B, N, V]
    target, pad = batch["target"], task().source_dictionary.pad()
    return torch.nn.functional.cross_entropy(scores.transpose(1, 2), target, ignore_index=pad, reduction="none").sum(1)


def cross_entropy(model, batch):
    return sentence_losses(model, batch).sum(), 1, {}


def gates_but_one(attentions, head, value):
    """[H] ones, and `value` at one head"""
    gates = {}
    for name, attention in attentions.items():
        by_kind = {kind: torch.ones(attention.num_heads, dtype=torch.float64) for kind in ("source", "mixed")}
        if name == head.attention:
            by_kind[head.kind][head.index] = value
        gates[name] = HeadGates(by_kind["source"] if attention.head_mixing is not None else None, by_kind["mixed"])
    return gates


CASES = [("mixhead_transformer_lm", {"head_mixing": mixing}) for mixing in HEAD_MIXINGS]
CASES += [("mixhead_transformer_lm", {"attention_normalizer": n}) for n in NORMALIZERS if n != "softmax"]
CASES += [("mixhead_transformer", {"head_mixing": mixing}) for mixing in ("none", "position-wise")]


@pytest.mark.parametrize("arch, flags", CASES, ids=lambda case: case if isinstance(case, str) else str(case.values()))
def test_a_gradient_is_the_difference_that_a_gate_near_1_makes_to_each_sentence(arch, flags):
    model, attentions = model_and_attentions(arch, decoder_layers=1, encoder_layers=1, **flags)
    sentences = tokens(padded=True)
    found = sentence_gradients(model, cross_entropy, sample(model, sentences), attentions)
    assert sum(g.shape[1] for by_kind in found.values() for g in by_kind.values()) == len(all_heads(attentions))
    step = 1e-5
    batch = sample(model, sentences)
    for head in all_heads(attentions):
        losses = []
        for value in (1 + step, 1 - step):
            with torch.no_grad(), gated(attentions, gates_but_one(attentions, head, value)):
                losses.append(sentence_losses(model, batch))  # [B]
        slopes = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(found[head.attention][head.kind][:, head.index], slopes, rtol=1e-4, atol=1e-7)


def test_importance_is_the_mean_of_the_absolute_values_over_all_batches():
    model, attentions = model_and_attentions("mixhead_transformer_lm")
    criterion = CrossEntropyCriterion(task(), sentence_avg=False)
    batches = [sample(model, tokens(batch, length=5 + batch)) for batch in (3, 1, 2)]
    weights, sentences = importance(model, criterion, batches, attentions)
    assert sentences == 6
    for name, by_kind in weights.items():
        for kind, w in by_kind.items():
            each = [sentence_gradients(model, criterion, batch, attentions)[name][kind].abs() for batch in batches]
            torch.testing.assert_close(w, torch.cat(each).mean(0))
            signed = torch.cat([sentence_gradients(model, criterion, b, attentions)[name][kind] for b in batches])
            assert (w > signed.mean(0).abs() + 1e-9).any()  # signs that cancel would show


def test_afterwards_model_and_gates_are_as_before():
    model, attentions = model_and_attentions("mixhead_transformer_lm")
    before = HeadGates(mixed=torch.full((4,), 0.5, dtype=torch.float64))
    for attention in attentions.values():
        attention.gates = before
    importance(model, CrossEntropyCriterion(task(), sentence_avg=False), [sample(model, tokens())], attentions)
    assert all(attention.gates is before for attention in attentions.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_to_weigh_on_is_said():
    model, attentions = model_and_attentions("mixhead_transformer_lm")
    with pytest.raises(ValueError, match="no sentences"):
        importance(model, CrossEntropyCriterion(task(), sentence_avg=False), [], attentions)


WEIGHTS = {
    "a": {"source": torch.tensor([3.0, 1.0, 2.0, 4.0]), "mixed": torch.tensor([0.3, 0.4, 0.0, 0.0])},
    "b": {"source": torch.tensor([0.5, 0.6, 5.0, 0.7]), "mixed": torch.tensor([0.0, 0.0, 0.0, 0.0])},
}


def test_normalised_every_layer_has_length_1_unless_it_is_0():
    normal = normalised_by_layer(WEIGHTS)
    torch.testing.assert_close(normal["a"]["mixed"], torch.tensor([0.6, 0.8, 0.0, 0.0]))
    torch.testing.assert_close(normal["b"]["source"].norm(), torch.tensor(1.0))
    assert torch.equal(normal["b"]["mixed"], torch.zeros(4))


def test_the_least_important_go_first_and_the_most_important_of_a_layer_never():
    order = removal_order(WEIGHTS)["source"]
    assert [(head.attention, head.index) for head in order] == [
        ("b", 0),
        ("b", 1),
        ("b", 3),
        ("a", 1),
        ("a", 2),
        ("a", 0),
    ]
    order = removal_order(WEIGHTS, at_least=3)["source"]
    assert [(head.attention, head.index) for head in order] == [("b", 0), ("a", 1)]
    assert removal_order(WEIGHTS, at_least=5) == {"source": [], "mixed": []}
    with pytest.raises(ValueError, match="at_least 0"):
        removal_order(WEIGHTS, at_least=0)


def test_a_fraction_is_of_all_heads_of_each_kind():
    assert least_important(WEIGHTS, 0) == []
    quarter = least_important(WEIGHTS, 0.25)
    assert quarter[:2] == [Head("b", "source", 0), Head("b", "source", 1)]
    assert [head.kind for head in quarter] == ["source", "source", "mixed", "mixed"]
    assert len(least_important(WEIGHTS, 1.0)) == 12  # one head stays in each of the four


def test_pearson_is_1_for_what_goes_together():
    scaled = {name: {kind: 2 * w + 1 for kind, w in by_kind.items()} for name, by_kind in WEIGHTS.items()}
    assert pearson(WEIGHTS, scaled) == pytest.approx({"source": 1.0, "mixed": 1.0})
    turned = {name: {kind: -w for kind, w in by_kind.items()} for name, by_kind in WEIGHTS.items()}
    assert pearson(WEIGHTS, turned) == pytest.approx({"source": -1.0, "mixed": -1.0})
    left = {"a": {"mixed": torch.tensor([1.0, 2.0, 3.0])}}
    right = {"a": {"mixed": torch.tensor([1.0, 3.0, 2.0])}}
    assert pearson(left, right) == pytest.approx({"mixed": 0.5})
