"""Heads of torch models, called as those of transformers; tests/heads has the laws."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixhead_plugin.nn as door
from tests.heads.models import HEADS, Translator, torch_model
from tests.nn import calling as calls
from tests.nn.reading import LanguageModel, Reader

SOURCE = torch.tensor([[3, 4, 5], [6, 7, 8]])
TARGET = torch.tensor([[9, 8], [7, 6]])


@pytest.mark.parametrize(
    "inputs", [(SOURCE, TARGET), {"source": SOURCE, "target": TARGET}], ids=["tuple", "dict"]
)
def test_the_heads_of_a_call_are_seen_without_dropout_and_modes_return(inputs):
    model = torch_model({"head_mixing": "position-wise"}).train()
    model.transformer.encoder.eval()
    modes = [module.training for module in model.modules()]
    found = door.attentions(model, inputs)
    assert [module.training for module in model.modules()] == modes
    names = [heads.name for heads in found.values()]
    assert names == [
        "transformer.encoder.layers.0.self_attn",
        "transformer.decoder.layers.0.self_attn",
        "transformer.decoder.layers.0.multihead_attn",
    ]
    expected = []
    attention = model.eval().get_submodule(names[2])
    handle = attention.register_forward_pre_hook(lambda module, args: expected.append(args))
    model(SOURCE, TARGET)
    handle.remove()
    weights = attention(*expected[0], average_attn_weights=False)[1]
    torch.testing.assert_close(found[2].mixed, weights)


def test_a_batch_is_a_dict_a_tuple_or_a_tensor():
    model = LanguageModel()
    expected = door.importance(model, [{"words": SOURCE}], by_words)
    assert list(expected) == [0] and expected[0].shape == (HEADS,)
    for batch in (SOURCE, (SOURCE, "a label"), {"step": torch.tensor(7), "words": SOURCE}):
        torch.testing.assert_close(door.importance(model, [batch], by_words), expected)


def test_a_batch_without_sentences_changes_no_importance():
    model = LanguageModel()
    expected = door.importance(model, [SOURCE], by_words)
    torch.testing.assert_close(door.importance(model, [SOURCE, SOURCE[:0]], by_words), expected)


def by_words(model, batch):
    if isinstance(batch, dict):
        words = batch["words"]
    else:
        words = batch if isinstance(batch, torch.Tensor) else batch[0]
    return model(words).exp().sum()


def test_a_state_dict_of_a_pruned_model_loads_into_one_that_was_pruned_by_the_same_heads():
    heads = {0: [1], "transformer.decoder.layers.0.multihead_attn": [0, 3]}
    pruned = torch_model({"head_mixing": "position-independent"})
    assert door.prune(pruned, heads) is pruned
    fresh = door.mix(Translator(), "position-independent").double().eval()
    fresh = door.prune(fresh, heads)
    fresh.load_state_dict(pruned.state_dict())
    assert torch.equal(fresh(SOURCE, TARGET), pruned(SOURCE, TARGET))


@pytest.mark.parametrize("study", ["ablate", "importance"])
def test_layers_that_no_call_passed_are_named_at_the_line_of_the_program(study):
    model = nn.ModuleList([Reader(), Reader()])
    with pytest.warns(UserWarning, match=study) as warned:
        if study == "ablate":
            with door.ablate(model, {0: [0], 1: [0]}):
                model[0](SOURCE)
        else:
            door.importance(model, [SOURCE], lambda model, words: model[0](words).exp().sum())
    assert warned[0].filename == __file__


REFUSED = {
    "no attention of ours": (
        lambda: door.ablate(nn.Transformer(8, 2, 1, 1, 8), {0: [0]}),
        "Transformer: has no attention of mixhead_plugin.nn; mix(model, 'none') makes them without "
        "mixing",
    ),
    "no sentences": (
        lambda: door.importance(LanguageModel(), ["words"], by_words),
        "batches: one is a str without a tensor, must have one whose first dimension counts its "
        "sentences",
    ),
    "no batch": (
        lambda: door.importance(LanguageModel(), [], by_words),
        "importance: must have a batch with a sentence",
    ),
    "a batch without sentences": (
        lambda: door.importance(LanguageModel(), [SOURCE[:0]], by_words),
        "importance: must have a batch with a sentence",
    ),
    "one batch in place of several": (
        lambda: door.importance(LanguageModel(), SOURCE, by_words),
        "batches is a Tensor: must be several batches, as [batch]",
    ),
    "a loss in place of a function": (
        lambda: door.importance(LanguageModel(), [SOURCE], torch.ones(())),
        "loss is a Tensor: must be a function of the model and a batch",
    ),
    "a loss for each sentence": (
        lambda: door.importance(LanguageModel(), [SOURCE], lambda model, words: model(words)[:, 0]),
        "importance: the loss returned a tensor of shape [2, 16], must return one number, the sum "
        "over the sentences",
    ),
    "a number of Python": (
        lambda: door.importance(LanguageModel(), [SOURCE], lambda *call: by_words(*call).item()),
        "importance: the loss returned a float, must return a tensor of one number",
    ),
    "a loss without a graph": (
        lambda: door.importance(LanguageModel(), [SOURCE], lambda *call: by_words(*call).detach()),
        "importance: the loss has no gradient, it must not be detached or under no_grad or "
        "inference_mode",
    ),
    "inputs of another kind": (
        lambda: door.attentions(LanguageModel(), "words"),
        "inputs 'words': must be a tensor, a tuple of arguments, or a dict of keywords",
    ),
}


@pytest.mark.parametrize("call, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_hooks_stand_beside_each_other_and_end_with_their_handles():
    model = LanguageModel().eval()
    before = model(SOURCE)
    seen = []
    first = model.attention.register_attention_hook(lambda *call: seen.append("first"))
    second = model.attention.register_attention_pre_hook(lambda *call: seen.append("second"))
    copied = copy.deepcopy(model)
    assert torch.equal(model(SOURCE), before)
    assert seen == ["second", "first"]
    first.remove()
    model(SOURCE)
    second.remove()
    model(SOURCE)
    assert seen == ["second", "first", "second"]
    copied(SOURCE)  # a copy has hooks of its own, as one of torch's
    assert seen == ["second", "first", "second", "second", "first"]


# ---- modules that call F.scaled_dot_product_attention --------------------------------------------


def calling(**variant):
    """Return a mixed model of such modules, with its input."""
    model = calls.Model(is_causal=True).double()
    door.mix(model, example=(calls.inputs(3),), **variant)
    return calls.move(model), calls.inputs()


@torch.no_grad()
@pytest.mark.parametrize("head_mixing", ["position-wise", "none"])
def test_heads_of_a_module_that_calls_the_function_are_seen(head_mixing):
    model, x = calling(head_mixing=head_mixing)
    first, _ = door.attentions(model, (x,)).values()
    attention = model.layers[0]
    query, key, value = attention.project(x)
    scores = (query @ key.mT * calls.D**-0.5).masked_fill(torch.ones(5, 5).triu(1) > 0, -torch.inf)
    torch.testing.assert_close(first.source, scores.softmax(-1))
    assert first.name == "layers.0"
    assert (first.mixing is None) == (head_mixing == "none")
    out = (first.mixed @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention.out(out), attention(x))


@pytest.mark.parametrize("variant", [{"head_mixing": "position-wise"}, {"head_mixing": "none"}])
def test_a_silenced_head_gives_nothing_and_its_importance_is_the_slope_of_its_gate(variant):
    model, x = calling(attention_gate="head", **variant)

    def loss(model, batch):
        return model(batch).square().sum()

    found = door.importance(model, [x], loss)
    with torch.no_grad(), door.ablate(model, {0: [1]}):
        silenced = model(x)
    weight = model.layers[0].out.weight.data  # [C, H * D]
    before = weight.clone()
    head = slice(calls.D, 2 * calls.D)
    weight[:, head] = 0
    torch.testing.assert_close(silenced, model(x))

    losses = []
    for factor in (1 + 1e-6, 1 - 1e-6):
        weight[:, head] = before[:, head] * factor
        losses.append(torch.stack([loss(model, one[None]) for one in x]))
    slopes = (losses[0] - losses[1]) / 2e-6
    torch.testing.assert_close(found[0][1], slopes.abs().mean().detach(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["v_proj.weight", "out_proj.bias", "head_mixing.weight"])
def test_a_parameter_that_two_attentions_share_is_not_cut(name):
    """They would share it no longer."""
    model = nn.ModuleList(
        [door.MixedAttention(HEADS, HEADS, head_mixing="position-independent") for _ in range(2)]
    )
    owner, _, entry = name.rpartition(".")
    shared = model[0].get_parameter(name)
    setattr(model[1].get_submodule(owner), entry, shared)
    with pytest.raises(ValueError) as refused:
        door.prune(model, {0: [1]})
    assert str(refused.value) == (
        f"1.{name}: is 0.{name}, too; each attention must have its own parameters"
    )
    assert model[0].get_parameter(name) is shared


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_heads_that_a_checkpoint_computes_again_are_ablated_in_whichever_thread(use_reentrant):
    """On a GPU a backward pass runs in a thread of its own."""
    model = nn.ModuleList([door.MixedAttention(HEADS, HEADS, head_mixing="position-independent")])
    x = torch.randn(2, 3, HEADS, requires_grad=True)

    def attend(x):
        return model[0](x, x, x, need_weights=False)[0].tanh()

    def gradient(compute):
        x.grad = None
        with door.ablate(model, {0: [1, 2]}), ThreadPoolExecutor(1) as other:
            other.submit(compute(x).sum().backward).result()
        return x.grad

    def checkpointed(x):
        return checkpoint(attend, x, use_reentrant=use_reentrant)

    torch.testing.assert_close(gradient(checkpointed), gradient(attend))


def test_heads_of_a_module_that_calls_the_function_cannot_be_cut():
    model, _ = calling(head_mixing="position-wise")
    with pytest.raises(ValueError, match="cut") as refused:
        door.prune(model, {0: [1]})
    assert str(refused.value) == (
        "heads [1] of layer 0: its module keeps its projections to itself, so no head can be cut; "
        "ablate them instead"
    )
