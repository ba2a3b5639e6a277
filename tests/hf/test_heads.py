"""Heads of models of `transformers` are silenced, weighed and cut off, mixed or not."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mixhead_plugin.heads.choosing import choose
from mixhead_plugin.hf.studied_attention import attentions_of
from tests.covering import each_once
from tests.hf.models import FEW, GENERATING, GROUPED, HEADS, MODELS, build, hf, whole

VARIANTS = [
    {"head_mixing": "position-wise", "attention_sink": "zero"},
    {},
    {"head_mixing": "position-independent", "attention_gate": "head"},
    {"head_mixing": "none", "attention_gate": "element", "attention_sink": "learned"},
    {"feature_mixing": "shared"},
]
OUTPUTS = ("c_proj", "o_proj", "out_proj", "dense", "out_lin", "o")  # read the outputs of all heads


def output(model, name):
    """Return the projection that reads the heads of an attention."""
    attention = model.get_submodule(name)
    for each in OUTPUTS:
        if hasattr(attention, each):
            return getattr(attention, each)
    # BERT's is beside its attention.
    parent, _, _ = name.rpartition(".")
    return model.get_submodule(parent).output.dense


def zero(model, name, heads):
    """Set the columns to 0 with which the output projection of an attention reads some heads."""
    weight = output(model, name).weight.data  # [C, H * D]; GPT-2's is transposed
    columns = weight if type(model).__name__.startswith("GPT2") else weight.t()
    columns.unflatten(0, (HEADS, -1))[heads] = 0


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def projections_cut(grouped, mixes):
    """Return how many whole projections are halved when half the heads of an attention go.

    Args:
        grouped: whether pairs of heads share keys and values, whose projections are half as large
        mixes: whether M makes the mixed heads, whose weights come from all queries and keys
    """
    keys = values = 0.5 if grouped else 1
    queries = outputs = 1
    if mixes:
        return values + outputs
    return queries + keys + values + outputs


# Heads that can be cut from every model. Where heads share keys, these are whole groups.
FIRST_CUT = [0, 1]
LAST_CUT = [2, 3]


def ends(model):
    """Return the names of the first and the last attention."""
    names = [attention.name for attention in attentions_of(model)]
    return names[0], names[-1]


def silenced_copy(model, first_heads):
    """Return a copy without some heads of the first attention and LAST_CUT of the last one."""
    first, last = ends(model)
    silenced = copy.deepcopy(model)
    zero(silenced, first, first_heads)
    zero(silenced, last, LAST_CUT)
    return silenced


@each_once(name=MODELS, variant=VARIANTS)
def test_an_ablated_head_is_one_whose_output_is_not_read(name, variant):
    model, inputs = build(name, **variant)
    inputs = whole(model, inputs)
    before = model(**inputs).logits
    _, last = ends(model)
    silenced = silenced_copy(model, [0, 2])
    with hf.ablate(model, {0: [0, 2], last: (2, 3, 2)}):
        torch.testing.assert_close(model(**inputs).logits, silenced(**inputs).logits)
    assert torch.equal(model(**inputs).logits, before)


@each_once(name=MODELS, variant=VARIANTS)
def test_a_pruned_model_is_smaller_and_computes_what_it_did_with_its_heads_ablated(name, variant):
    model, inputs = build(name, **variant)
    inputs = whole(model, inputs)
    first, last = ends(model)

    # Heads that share keys go together. Others go one by one: head 2 is number 1 after 0 is gone.
    grouped = name.startswith(tuple(GROUPED))
    if grouped:
        silenced = silenced_copy(model, FIRST_CUT)
        steps = [FIRST_CUT]
    else:
        silenced = silenced_copy(model, [0, 2])
        steps = [[0], [1]]

    size = count(model)
    for some in steps:
        hf.prune(model, {0: iter(some)})  # which can be read once
    hf.prune(model.requires_grad_(False), {last: LAST_CUT})
    assert not any(parameter.requires_grad for parameter in model.parameters())
    mixes = variant.get("head_mixing", "none") != "none"
    half = output(silenced, first).weight.numel() / 2
    assert size - count(model) >= 2 * projections_cut(grouped, mixes) * half
    torch.testing.assert_close(model(**inputs).logits, silenced(**inputs).logits)


@each_once(name=FEW, variant=VARIANTS)
def test_a_pruned_model_is_copied_and_loaded_as_it_is(name, variant, tmp_path):
    model, inputs = build(name, **variant)
    inputs = whole(model, inputs)
    _, last = ends(model)
    hf.prune(model, {0: FIRST_CUT, last: LAST_CUT})
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    loaded = hf.load(tmp_path)
    torch.testing.assert_close(loaded(**inputs).logits, expected)
    torch.testing.assert_close(copy.deepcopy(model)(**inputs).logits, expected)
    assert len(hf.attentions(loaded, inputs)) == len(attentions_of(model))
    with pytest.raises(ValueError, match=r"hf\.load"):
        type(model).from_pretrained(tmp_path)


@each_once(name=[name for name in FEW if name in GENERATING], variant=VARIANTS)
def test_a_pruned_model_generates_with_a_cache_what_it_does_without(name, variant):
    model, inputs = build(name, **variant)
    _, last = ends(model)
    hf.prune(model, {0: FIRST_CUT, last: LAST_CUT})
    prompt = {"input_ids": inputs["input_ids"], "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(**prompt), model.generate(**prompt, use_cache=False))


# ---- what is no head, or cannot be cut ---------------------------------------------------------


def llama():
    return build("LlamaForCausalLM")[0]


def pruned_t5():
    return hf.prune(build("T5Model")[0], {0: [1]})


IDS = torch.tensor([[3, 4]])
LAYERS = "must be from 0 to 1, or a name such as model.layers.0.self_attn"
# The message, and the call that is refused with it.
REFUSED = {
    f"layer 2: {LAYERS}": lambda: hf.ablate(llama(), {2: [0]}),
    f"layer 'lm_head': {LAYERS}": lambda: hf.ablate(llama(), {"lm_head": [0]}),
    "head 4 of layer 0: must be a whole number from 0 to 3": lambda: hf.ablate(llama(), {0: [4]}),
    "heads 3 of layer 0: must be a list of numbers, as [0]": lambda: hf.ablate(llama(), {0: 3}),
    "heads [0, 1, 2, 3] of layer 0: must leave one head": lambda: hf.prune(llama(), {0: range(4)}),
    "heads [0] of layer 0: head_mixing must have all heads, U is divided by its root mean square "
    "over all heads; ablate them instead": lambda: hf.prune(
        build("BertForMaskedLM", head_mixing="low-rank")[0], {0: [0]}
    ),
    "heads [0] of layer 0: feature_mixing must have all heads, each head is a sum of all; ablate "
    "them instead": lambda: hf.prune(build("T5Model", feature_mixing="heads")[0], {0: [0]}),
    "T5Model: is pruned, so it cannot be mixed again": lambda: hf.mix(pruned_t5(), "average"),
    "T5Model: is pruned, and must stay as it is": lambda: hf.unmix(pruned_t5()),
    "importance: must have a batch with a sentence": lambda: hf.importance(llama(), [], squares),
    "batches: one is a dict without a tensor, must have one whose first dimension counts its "
    "sentences": lambda: hf.importance(llama(), [{"input_ids": [[3, 4]]}], squares),
    "batches is a dict: must be several batches, as [batch]": lambda: hf.importance(
        llama(), {"input_ids": IDS}, squares
    ),
    "loss None: must be a function of the model and a batch": lambda: hf.importance(
        llama(), [{"input_ids": IDS}], None
    ),
    "inputs is a Tensor: must be a dict of arguments, as {'input_ids': ids} or a tokenizer "
    "returns": lambda: hf.attentions(llama(), IDS),
    "inputs['input_ids'] is a list: must be a tensor, as a tokenizer gives it with "
    "return_tensors='pt'": lambda: hf.attentions(llama(), {"input_ids": [[3, 4]]}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_head_or_cannot_be_cut_is_refused_in_one_line(message):
    with pytest.raises(ValueError) as error:
        REFUSED[message]()
    assert str(error.value) == message


def test_heads_of_attentions_that_share_a_projection_are_refused():
    model, inputs = build("LlamaForCausalLM", feature_mixing="shared")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.o_proj = first.o_proj
    before = model(**inputs).logits
    refused = {
        "silenced or weighed": lambda: hf.ablate(model, {0: [1]}),
        "pruned": lambda: hf.prune(model, {0: [0, 1]}),
        "folded": lambda: hf.fold(model),
    }
    for what, call in refused.items():
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == (
            "LlamaForCausalLM: model.layers.1.self_attn.o_proj and model.layers.0.self_attn.o_proj "
            f"are one; each attention must have its own to be {what}"
        )
    assert torch.equal(model(**inputs).logits, before)


def test_a_cut_that_is_refused_for_one_layer_leaves_the_model_as_it_was():
    model, inputs = build("LlamaForCausalLM")
    before = model(**inputs).logits
    with pytest.raises(ValueError) as error:
        hf.prune(model, {0: [0, 1], 1: [1]})
    assert str(error.value) == "heads [1] of layer 1: must be whole groups of 2 that share keys"
    assert torch.equal(model(**inputs).logits, before)
    hf.mix(model, "average")  # which refuses what was mixed or pruned


def test_pruning_nothing_changes_nothing():
    model = llama()
    for heads in ({}, {0: []}):
        assert hf.prune(model, heads) is model
        assert not [name for name in vars(model.config) if "mixhead" in name]
        # A pruned model is neither mixed nor unmixed.
        hf.unmix(hf.prune(hf.mix(model, "position-independent"), heads))


def test_a_layer_may_be_named_twice_by_number_and_by_name():
    heads = {0: [1], "model.layers.0.self_attn": torch.tensor([2])}
    assert choose(attentions_of(llama()), heads) == {0: [1, 2]}


# ---- calls that are compiled, or in other threads ----------------------------------------------


def squares(model, batch):
    return model(**batch).logits.square().sum()


def test_heads_of_compiled_models_are_silenced_and_weighed():
    model, inputs = build("LlamaForCausalLM", {"num_hidden_layers": 1}, head_mixing="position-wise")
    inputs = {"input_ids": inputs["input_ids"], "use_cache": False}

    def studied():
        with hf.ablate(model, {0: [1, 2]}):
            silenced = model(**inputs).logits
        importance = hf.importance(model, [inputs], squares)
        weights = hf.attentions(model, inputs)[0].mixed
        return silenced, importance, weights, model(**inputs).logits

    expected = studied()
    model.compile(backend="eager")
    model(**inputs)
    torch.testing.assert_close(studied(), expected)


@pytest.mark.filterwarnings("ignore:ablate")
def test_an_ablation_belongs_to_its_thread_and_is_refused_if_no_call_there_passed_it():
    model, inputs = build("T5ForConditionalGeneration")
    inputs = whole(model, inputs)
    expected = model(**inputs).logits
    found = []
    thread = threading.Thread(target=lambda: found.append(model(**inputs).logits))
    with pytest.raises(RuntimeError) as error, hf.ablate(model, {0: [1]}):
        thread.start()
        thread.join()
    assert str(error.value) == (
        "ablate: had no effect, no call in this thread passed "
        "encoder.block.0.layer.0.SelfAttention or another chosen layer"
    )
    assert torch.equal(found[0], expected)


def encode(model, batch):
    return model.get_encoder()(**batch)[0].square().sum()


def test_looking_at_heads_leaves_each_tower_its_own_attention():
    model, inputs = build("BartModel")
    model.encoder.config = copy.deepcopy(model.config)
    model.encoder.config._attn_implementation = "eager"
    before = [module.config._attn_implementation for module in (model, model.encoder)]
    hf.attentions(model, inputs | {"decoder_input_ids": inputs["input_ids"]})
    assert [module.config._attn_implementation for module in (model, model.encoder)] == before


def test_layers_that_no_call_passed_are_named():
    model, inputs = build("T5ForConditionalGeneration")
    told = r"^ablate: had no effect on decoder\..*SelfAttention, which no call passed$"
    with (
        pytest.warns(UserWarning, match=told) as warned,
        hf.ablate(model, {0: [1], 2: [0]}),
    ):
        encode(model, inputs)
    assert warned[0].filename == __file__
    told = r"^importance: is 0 for decoder\.block\.0.*, on which no loss depends$"
    with pytest.warns(UserWarning, match=told) as warned:
        hf.importance(model, [inputs], encode)
    assert warned[0].filename == __file__


@torch.no_grad()
def test_two_threads_silence_each_their_own_heads():
    model, inputs = build("LlamaForCausalLM")
    expected = {}
    for head in (1, 2):
        with hf.ablate(model, {0: [head]}):
            expected[head] = model(**inputs).logits

    # One that raises does not reach it again; then the other does not wait for ever.
    both = threading.Barrier(2, timeout=60)

    @torch.no_grad()
    def silence(head):
        for _ in range(5):
            with hf.ablate(model, {0: [head]}):
                both.wait()
                assert torch.equal(model(**inputs).logits, expected[head])
                both.wait()

    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(silence, head) for head in expected]
    for each in calls:
        each.result()  # raises what the call has raised
    # compiled models are compiled again
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_gates_can_be_inside_each_other():
    model, inputs = build("LlamaForCausalLM", head_mixing="position-wise")

    def silenced(model, batch):
        with hf.ablate(model, {0: [1]}):
            return squares(model, batch)

    with hf.ablate(model, {0: [1]}):
        outside = hf.importance(model, [inputs], squares)
    inside = hf.importance(model, [inputs], silenced)
    torch.testing.assert_close(inside, outside)
    assert inside[0][1] == 0
    assert inside[0][0] > 0


def test_a_gate_ends_with_its_block_even_if_that_raises():
    model, inputs = build("LlamaForCausalLM", head_mixing="position-wise")
    expected = model(**inputs).logits
    with pytest.raises(KeyError), hf.ablate(model, {0: [1]}):
        raise KeyError
    assert torch.equal(model(**inputs).logits, expected)


# ---- losses that give no importance ------------------------------------------------------------


def detached(model, batch):
    return squares(model, batch).detach()


def apart(model, batch):
    """Call the model, and return a loss that does not come from that call."""
    squares(model, batch)
    return model.lm_head.weight.sum()


def of_one_sentence(model, batch):
    return squares(model, {"input_ids": batch["input_ids"][:1]})


def of_no_call(model, batch):
    return model.lm_head.weight.sum()


def of_each_sentence(model, batch):
    return model(**batch).logits.square().sum((1, 2))


def as_a_number(model, batch):
    return squares(model, batch).item()


def without_labels(model, batch):
    return model(**batch).loss


NO_IMPORTANCE = {
    of_each_sentence: "importance: the loss returned a tensor of shape [3], must return one "
    "number, the sum over the sentences",
    as_a_number: "importance: the loss returned a float, must return a tensor of one number",
    without_labels: "importance: the loss returned a NoneType, must return a tensor of one number",
    detached: "importance: the loss has no gradient, it must not be detached or under no_grad or "
    "inference_mode",
    apart: "importance: the loss does not depend on any head",
    of_one_sentence: "model.layers.0.self_attn: was called with 1 sentences, the first tensor of "
    "the batch has 3; importance must see them apart",
    of_no_call: "importance: had no effect, no call in this thread passed "
    "model.layers.0.self_attn or another chosen layer",
}


@pytest.mark.parametrize("loss", NO_IMPORTANCE)
def test_a_loss_that_would_give_another_gradient_or_none_is_refused(loss):
    model, inputs = build("LlamaForCausalLM")
    with pytest.raises((ValueError, RuntimeError)) as error:
        hf.importance(model, [inputs], loss)
    assert str(error.value) == NO_IMPORTANCE[loss]


def test_gates_under_gradient_checkpointing_are_refused():
    model, inputs = build("LlamaForCausalLM")
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError) as error, hf.ablate(model, {0: [1]}):
        model(**inputs)
    assert str(error.value) == (
        "LlamaForCausalLM: gradient checkpointing may compute heads again without their gates; "
        "call model.eval() or model.gradient_checkpointing_disable()"
    )
