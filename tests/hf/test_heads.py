"""Heads of models of `transformers` are silenced, weighed and cut off, mixed or not."""

import copy
import threading

import pytest
import torch

from mixhead_plugin.heads.choosing import choose
from mixhead_plugin.hf.adapter import attentions_of
from tests.covering import each_once
from tests.hf.models import GROUPED, HEADS, MODELS, build, hf, whole

VARIANTS = [
    dict(head_mixing="position-wise", attention_sink="zero"),
    {},
    dict(head_mixing="position-independent", attention_gate="head"),
    dict(head_mixing="none", attention_gate="element", attention_sink="learned"),
    dict(feature_mixing="shared"),
]
OUTPUTS = ("c_proj", "o_proj", "out_proj", "dense", "out_lin", "o")  # read the outputs of all heads


def output(model, name):
    """Return the projection that reads the heads of an attention."""
    attention = model.get_submodule(name)
    found = [getattr(attention, each) for each in OUTPUTS if hasattr(attention, each)]
    return found[0] if found else model.get_submodule(name.rpartition(".")[0]).output.dense


@each_once(name=MODELS, variant=VARIANTS)
def test_a_pruned_model_is_smaller_and_computes_what_it_did_with_its_heads_ablated(
    name, variant, tmp_path
):
    model, inputs = build(name, **variant)
    inputs = whole(model, inputs)
    before = model(**inputs).logits
    sites = [attention.name for attention in attentions_of(model)]
    grouped, mixes = name.startswith(tuple(GROUPED)), variant.get("head_mixing", "none") != "none"
    # head 2 is 1 after 0 is gone
    first, steps = ([0, 1], [[0, 1]]) if grouped else ([0, 2], [[0], [1]])
    heads = {0: first, sites[-1]: (2, 3, 2)}
    silenced = copy.deepcopy(model)
    for layer, some in ((sites[0], first), (sites[-1], [2, 3])):
        weight = output(silenced, layer).weight  # [C, H * D]; GPT-2's is transposed
        columns = weight.data if "GPT2" in name else weight.data.t()
        columns.unflatten(0, (HEADS, -1))[some] = 0
    with hf.ablate(model, heads):
        torch.testing.assert_close(model(**inputs).logits, silenced(**inputs).logits)
    assert torch.equal(model(**inputs).logits, before)
    size = sum(parameter.numel() for parameter in model.parameters())
    for some in steps:
        hf.prune(model, {0: some})
    hf.prune(model.requires_grad_(False), {sites[-1]: [2, 3]})
    assert not any(parameter.requires_grad for parameter in model.parameters())
    halves = {(False, False): 4, (False, True): 2, (True, False): 3, (True, True): 1.5}[
        grouped, mixes
    ]
    width = output(silenced, sites[0]).weight.numel() / 2  # half a projection
    assert size - sum(parameter.numel() for parameter in model.parameters()) >= 2 * halves * width
    model.save_pretrained(tmp_path)
    for pruned in (model, copy.deepcopy(model), hf.load(tmp_path)):
        torch.testing.assert_close(pruned(**inputs).logits, silenced(**inputs).logits)
    assert len(hf.attentions(pruned, inputs)) == len(sites)
    with pytest.raises(ValueError, match=r"hf\.load"):
        type(model).from_pretrained(tmp_path)
    if model.can_generate() and "input_ids" in inputs:
        prompt = {"input_ids": inputs["input_ids"], "max_new_tokens": 3, "do_sample": False}
        assert torch.equal(pruned.generate(**prompt), pruned.generate(**prompt, use_cache=False))


def test_what_is_no_head_or_cannot_be_cut_is_refused_and_changes_nothing():
    model, inputs = build("LlamaForCausalLM")
    before = model(**inputs).logits
    assert choose(
        attentions_of(model), {0: [1], "model.layers.0.self_attn": torch.tensor([2])}
    ) == {0: [1, 2]}
    low_rank = build("BertForMaskedLM", head_mixing="low-rank")[0]
    for refused, message in (
        (
            lambda: hf.ablate(model, {2: [0]}),
            r"^layer 2: must be from 0 to 1, or a name such as model\.layers\.0",
        ),
        (lambda: hf.ablate(model, {"lm_head": [0]}), "^layer 'lm_head': must"),
        (lambda: hf.ablate(model, {0: [4]}), "^head 4 of layer 0: must be from 0 to 3$"),
        (
            lambda: hf.prune(model, {0: [0, 1], 1: [1]}),
            r"heads \[1\] of layer 1: must be whole groups of 2",
        ),
        (lambda: hf.prune(model, {0: range(4)}), "must leave one head"),
        (lambda: hf.prune(low_rank, {0: [0]}), "head_mixing must have all heads"),
        (
            lambda: hf.prune(build("T5Model", feature_mixing="heads")[0], {0: [0]}),
            "feature_mixing must have all heads",
        ),
        (lambda: hf.importance(model, [], None), "must have a batch"),
        (lambda: hf.mix(hf.prune(build("T5Model")[0], {0: [1]}), "average"), "or pruned"),
        (lambda: hf.unmix(hf.prune(build("T5Model")[0], {0: [1]})), "is pruned"),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    assert torch.equal(model(**inputs).logits, before)


def squares(model, batch):
    return model(**batch).logits.square().sum()


def test_heads_of_compiled_models_are_silenced_and_weighed():
    model, inputs = build("LlamaForCausalLM", {"num_hidden_layers": 1}, head_mixing="position-wise")
    inputs = {"input_ids": inputs["input_ids"], "use_cache": False}

    def studied():
        with hf.ablate(model, {0: [1, 2]}):
            silenced = model(**inputs).logits
        found = hf.importance(model, [inputs], squares), hf.attentions(model, inputs)[0].mixed
        return silenced, *found, model(**inputs).logits

    expected = studied()
    model.compile(backend="eager")
    model(**inputs)
    torch.testing.assert_close(studied(), expected)


@pytest.mark.filterwarnings("ignore:ablate")
def test_an_ablation_belongs_to_one_thread_and_one_without_effect_is_told():
    model, inputs = build("T5ForConditionalGeneration")
    expected = model(**whole(model, inputs)).logits
    found = []
    with (
        pytest.raises(
            RuntimeError,
            match=r"^ablate: had no effect, no call in this thread passed encoder\.block\.0\.l",
        ),
        hf.ablate(model, {0: [1]}),
    ):
        thread = threading.Thread(target=lambda: found.append(model(**whole(model, inputs)).logits))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)
    partly = pytest.warns(
        UserWarning,
        match=r"^ablate: had no effect on decoder\..*SelfAttention, which no call passed$",
    )
    with partly, hf.ablate(model, {0: [1], 2: [0]}):
        model.get_encoder()(**inputs)
    with pytest.warns(
        UserWarning, match=r"^importance: is 0 for decoder\.block\.0.*, on which no loss depends$"
    ):
        hf.importance(
            model, [inputs], lambda model, batch: model.get_encoder()(**batch)[0].square().sum()
        )


@torch.no_grad()
def test_two_threads_silence_each_their_own_heads():
    model, inputs = build("LlamaForCausalLM")
    expected, wrong, both = {}, [], threading.Barrier(2)
    for head in (1, 2):
        with hf.ablate(model, {0: [head]}):
            expected[head] = model(**inputs).logits

    @torch.no_grad()
    def silence(head):
        for _ in range(5):
            with hf.ablate(model, {0: [head]}):
                both.wait()
                if not torch.equal(model(**inputs).logits, expected[head]):
                    wrong.append(head)
                both.wait()

    threads = [threading.Thread(target=silence, args=(head,)) for head in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    # compiled models are compiled again
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_gates_can_be_inside_each_other_and_end_with_their_block():
    model, inputs = build("LlamaForCausalLM", head_mixing="position-wise")
    expected = model(**inputs).logits

    def silenced(model, batch):
        with hf.ablate(model, {0: [1]}):
            return squares(model, batch)

    with hf.ablate(model, {0: [1]}):
        outside = hf.importance(model, [inputs], squares)
    inside = hf.importance(model, [inputs], silenced)
    torch.testing.assert_close(inside, outside)
    assert inside[0][1] == 0 and inside[0][0] > 0
    with pytest.raises(KeyError), hf.ablate(model, {0: [1]}):
        raise KeyError
    assert torch.equal(model(**inputs).logits, expected)


def test_what_would_give_another_gradient_or_none_is_refused():
    model, inputs = build("LlamaForCausalLM")
    batches, rows = [inputs], inputs["input_ids"].size(0)
    for loss, problem in (
        (
            lambda model, batch: squares(model, batch).detach(),
            "the loss has no gradient, it must not be detached or",
        ),
        (_apart, "the loss does not depend"),
        (
            lambda model, batch: squares(model, {"input_ids": batch["input_ids"][:1]}),
            f"was called with 1 .* has {rows};",
        ),
    ):
        with pytest.raises(ValueError, match=problem):
            hf.importance(model, batches, loss)
    with pytest.raises(
        RuntimeError,
        match=r"^importance: had no effect, no call in this thread passed model\.layers\.0",
    ):
        hf.importance(model, batches, lambda model, batch: model.lm_head.weight.sum())
    model.train().gradient_checkpointing_enable()
    with (
        pytest.raises(ValueError, match="gradient checkpointing may compute heads again"),
        hf.ablate(model, {0: [1]}),
    ):
        model(**inputs)


def _apart(model, batch):
    squares(model, batch)
    return model.lm_head.weight.sum()
