"""Compare the importance of heads with its definition, and test the command."""

from argparse import Namespace

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from mixhead_plugin.fairseq.analysis.correlation import pearson
from mixhead_plugin.fairseq.analysis.heads import all_heads, attentions, gated
from mixhead_plugin.fairseq.analysis.importance import (
    importance,
    normalized_by_layer,
    sentence_gradients,
    weigh,
)
from mixhead_plugin.fairseq.analysis.loading import batches, load
from mixhead_plugin.fairseq.attention import HeadGates
from tests.fairseq.analysis.test_prune import WEIGHTS
from tests.helpers import build, shake, task, tokens


def model_of(arch, **flags):
    return shake(build(arch, **flags)).double().eval()


def sample(model, sentences):
    lengths = sentences.ne(task().source_dictionary.pad()).sum(1)
    inputs = {"src_tokens": sentences, "src_lengths": lengths}
    if hasattr(model, "encoder"):
        inputs["prev_output_tokens"] = sentences.roll(1, 1)
    return {"net_input": inputs, "target": sentences, "ntokens": int(lengths.sum())}


def sentence_losses(model, batch):
    """Return the losses [B] in float64; fairseq's criteria take a softmax in float32."""
    scores = model(**batch["net_input"])[0]  # [B, N, V]
    target, pad = batch["target"], task().source_dictionary.pad()
    return torch.nn.functional.cross_entropy(
        scores.transpose(1, 2), target, ignore_index=pad, reduction="none"
    ).sum(1)


def cross_entropy(model, batch):
    return sentence_losses(model, batch).sum(), 1, {}


def gates_but_one(found, head, value):
    """Return gates of 1 for all heads, and of `value` for one."""
    gates = {}
    for name, attention in found.items():
        by_kind = {
            kind: torch.ones(attention.num_heads, dtype=torch.float64)
            for kind in ("source", "mixed")
        }
        if name == head.attention:
            by_kind[head.kind][head.index] = value
        gates[name] = HeadGates(
            by_kind["source"] if attention.head_mixing is not None else None, by_kind["mixed"]
        )
    return gates


# Without mixing, with a matrix that is frozen, that is trained, and that differs by query.
CASES = [
    ("mixhead_transformer_lm", mixing) for mixing in ("none", "average", "position-independent")
]
CASES += [("mixhead_transformer", "position-wise")]


@pytest.mark.parametrize("arch, mixing", CASES)
def test_a_gradient_is_the_difference_that_a_gate_near_1_makes_to_each_sentence(arch, mixing):
    model = model_of(
        arch, decoder_layers=1, encoder_layers=1, head_mixing=mixing, attention_normalizer="l2"
    )
    found, batch, step = attentions(model), sample(model, tokens(padded=True)), 1e-5
    gradients = sentence_gradients(model, cross_entropy, batch, found)
    assert sum(g.shape[1] for by_kind in gradients.values() for g in by_kind.values()) == len(
        all_heads(found)
    )
    for head in all_heads(found):
        losses = []
        for value in (1 + step, 1 - step):
            with torch.no_grad(), gated(found, gates_but_one(found, head, value)):
                losses.append(sentence_losses(model, batch))  # [B]
        slopes = (losses[0] - losses[1]) / (2 * step)
        torch.testing.assert_close(
            gradients[head.attention][head.kind][:, head.index], slopes, rtol=1e-4, atol=1e-7
        )


def test_importance_is_the_mean_of_the_absolute_values_over_all_batches():
    model = model_of("mixhead_transformer_lm")
    found, criterion = attentions(model), CrossEntropyCriterion(task(), sentence_avg=False)
    before = HeadGates(mixed=torch.full((4,), 0.5, dtype=torch.float64))
    for attention in found.values():
        attention.gates = before
    samples = [sample(model, tokens(batch, length=5 + batch)) for batch in (3, 1, 2)]
    weights, sentences = importance(model, criterion, samples, found)
    assert sentences == 6
    gradients = [sentence_gradients(model, criterion, batch, found) for batch in samples]
    for name, by_kind in weights.items():
        for kind, w in by_kind.items():
            signed = torch.cat([g[name][kind] for g in gradients])
            torch.testing.assert_close(w, signed.abs().mean(0))
            assert (w > signed.mean(0).abs() + 1e-9).any()  # signs that cancel would show
    assert all(attention.gates is before for attention in found.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_layer_is_normalized_to_length_1_unless_it_is_0():
    first, second = normalized_by_layer(WEIGHTS).values()
    torch.testing.assert_close(first["mixed"], torch.tensor([0.6, 0.8, 0.0, 0.0]))
    torch.testing.assert_close(second["source"].norm(), torch.tensor(1.0))
    assert torch.equal(second["mixed"], torch.zeros(4))


def test_pearson_is_1_for_a_linear_relation():
    scaled = {
        name: {kind: 2 * w + 1 for kind, w in by_kind.items()} for name, by_kind in WEIGHTS.items()
    }
    assert pearson(WEIGHTS, scaled) == pytest.approx({"source": 1.0, "mixed": 1.0})
    turned = {name: {kind: -w for kind, w in by_kind.items()} for name, by_kind in WEIGHTS.items()}
    assert pearson(WEIGHTS, turned) == pytest.approx({"source": -1.0, "mixed": -1.0})
    left = {"a": {"mixed": torch.tensor([1.0, 2.0, 3.0])}}
    right = {"a": {"mixed": torch.tensor([1.0, 3.0, 2.0])}}
    assert pearson(left, right) == pytest.approx({"mixed": 0.5})


# ---- the command -------------------------------------------------------------------------------


def test_every_head_is_weighed_by_the_loss_of_the_training(numbers, translation_checkpoint):
    found, out = numbers("importance", translation_checkpoint, "--batch-size", 4, "--cpu")
    (content,) = found["sets"]
    assert (content["subset"], content["sentences"]) == ("valid", 15)

    loaded = load(translation_checkpoint, cpu=True)
    found = attentions(loaded.model)
    expected, _ = importance(loaded.model, loaded.criterion, batches(loaded, batch_size=4), found)
    read = {entry["name"]: entry for entry in content["attentions"]}
    assert set(expected["encoder.layers.0.self_attn"]) == {"mixed"}  # --attention-scope decoder
    assert set(expected["decoder.layers.1.encoder_attn"]) == {"source", "mixed"}
    for name, by_kind in expected.items():
        for kind, weights in by_kind.items():
            assert (weights > 0).all()
            torch.testing.assert_close(torch.tensor(read[name][kind], dtype=torch.float64), weights)
    assert "encoder-self 0 " in out and "cross 1, source heads" in out


def test_two_sets_are_compared(numbers, lm_checkpoint, numbers_alone):
    content, out = numbers(
        "importance", lm_checkpoint, "--subset", "valid,test", "--normalize", "layer"
    )
    assert [s["label"] for s in content["sets"]] == ["valid", "test"]
    points = []
    for found in content["sets"]:
        layers = [torch.tensor(entry["mixed"]) for entry in found["attentions"]]
        points.append(torch.cat([layer / layer.norm() for layer in layers]))
    assert content["pearson"]["mixed"] == pytest.approx(
        float(torch.corrcoef(torch.stack(points))[0, 1]), abs=1e-5
    )
    assert f"Pearson's r of the mixed heads: {content['pearson']['mixed']:.3f}" in out
    assert numbers_alone == ["importance", "importance-2", "importance-correlation"]


def test_activation_checkpointing_does_not_hide_the_gradients(fairseq_lm_checkpoint):
    args = Namespace(subset="valid", max_tokens=None, batch_size=None, limit=2)
    plain, recomputing = (
        weigh(args, load(fairseq_lm_checkpoint, overrides={"checkpoint_activations": on}), "valid")[
            0
        ]
        for on in (False, True)
    )
    for name, by_kind in plain.items():
        torch.testing.assert_close(recomputing[name]["mixed"], by_kind["mixed"])
