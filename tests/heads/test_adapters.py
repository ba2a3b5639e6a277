"""The laws of heads hold for the models of every door: fairseq's, torch's and transformers'."""

import contextlib
import copy
import itertools

import pytest
import torch

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.heads import cutting
from mixhead_plugin.heads.ablation import EXPERIMENTS, ablate, ablations, without
from mixhead_plugin.heads.assembly_attention import AssemblyAttention
from mixhead_plugin.heads.attention import HeadsError
from mixhead_plugin.heads.choosing import Head, all_heads, choose
from mixhead_plugin.heads.importance import importance
from mixhead_plugin.heads.views import heads_in_call
from tests import attention_equations
from tests.covering import each_once
from tests.heads.models import DOORS, HEADS, build

VARIANTS = {
    "unmixed": {},
    "A, gates": {"head_mixing": "position-independent", "attention_gate": "head"},
    "B, sink": {"head_mixing": "position-wise", "attention_sink": "learned"},
    "frozen, shared features": {"head_mixing": "average", "feature_mixing": "shared"},
}
EVERY = pytest.mark.parametrize(
    "door, variant",
    [
        pytest.param(door, variant, id=f"{door}, {name}")
        for door in DOORS
        for name, variant in VARIANTS.items()
    ],
)


@contextlib.contextmanager
def factor(attention, head, value):
    """Multiply one head by a number, whatever it does elsewhere."""

    def change(rows):
        factors = torch.ones(attention.heads[head.stage], dtype=rows.dtype)
        factors[head.number] = value
        return rows * factors[:, None]

    handle = attention.gate(head.stage, change)
    yield
    handle.remove()


def sentence_losses(case):
    # not squares, because a last layer norm keeps their sum
    return case.outputs(case.model).exp().flatten(1).sum(1)  # [B]


@EVERY
def test_importance_is_the_mean_over_sentences_of_the_slope_at_a_gate_of_1(door, variant):
    case = build(door, variant)
    attentions = case.find(case.model)
    batches = [None, None]
    found, sentences = importance(
        attentions, batches, lambda batch: sentence_losses(case).sum(), lambda batch: 3
    )
    assert sentences == 6
    assert all(parameter.grad is None for parameter in case.model.parameters())
    step = 1e-5
    for attention in attentions:
        for head in all_heads([attention]):
            losses = []
            for value in (1 + step, 1 - step):
                with torch.no_grad(), factor(attention, head, value):
                    losses.append(sentence_losses(case))
            slopes = (losses[0] - losses[1]) / (2 * step)  # [B]
            expected = slopes.abs().mean()
            weight = found[attention.name][head.stage][head.number]
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-6)
    weights = itertools.chain.from_iterable(by_stage.values() for by_stage in found.values())
    assert max(float(each.max()) for each in weights) > 0.01


@EVERY
@torch.no_grad()
def test_an_ablated_head_is_one_with_gate_0_and_gives_nothing_to_the_output(door, variant):
    case = build(door, variant)
    whole = case.outputs(case.model)
    attentions = case.find(case.model)
    for layer, attention in enumerate(attentions):
        expected = copy.deepcopy(case.model)
        projection = case.output_projection(expected, attention.name).weight  # [C, H' * Dv]
        projection.data.unflatten(1, (HEADS, -1))[:, 1] = 0
        head = Head(attention.name, "mixed", 1)
        with factor(attention, head, 0):
            by_gate = case.outputs(case.model)
        with ablate(attentions, {layer: [1]}):
            ablated = case.outputs(case.model)
        torch.testing.assert_close(ablated, by_gate, rtol=0, atol=0)
        torch.testing.assert_close(ablated, case.outputs(expected))
        assert not torch.allclose(ablated, whole)
    assert torch.equal(case.outputs(case.model), whole)


@EVERY
@torch.no_grad()
def test_an_ablated_source_head_is_one_that_no_mixed_head_takes(door, variant):
    case = build(door, variant)
    attentions = case.find(case.model)
    for attention in attentions:
        if "source" not in attention.heads:
            continue
        part = case.head_mixing(case.model, attention.name)
        with without(attentions, [Head(attention.name, "source", 2)]):
            ablated = case.outputs(case.model)
        keep = torch.ones(HEADS, 1, dtype=torch.float64)
        keep[2] = 0
        handle = part.register_forward_hook(lambda part, args, mixing, keep=keep: mixing * keep)
        torch.testing.assert_close(ablated, case.outputs(case.model))
        handle.remove()
        assert not torch.allclose(ablated, case.outputs(case.model))
    stages = set().union(*(attention.heads for attention in attentions))
    mixes = variant.get("head_mixing", "none") != "none"
    assert stages == ({"source", "mixed"} if mixes and door != "transformers" else {"mixed"})


@EVERY
@torch.no_grad()
def test_a_pruned_model_is_smaller_and_computes_what_it_did_with_its_heads_ablated(door, variant):
    case = build(door, variant)
    chosen = {0: [0, 2], 2: [3]}
    with ablate(case.find(case.model), chosen):
        ablated = case.outputs(case.model)
    size = sum(parameter.numel() for parameter in case.model.parameters())
    case.model.requires_grad_(False)
    case.prune(case.model, {0: [0]})
    case.prune(case.model, {0: [1], 2: [3]})  # head 2 is 1 after 0 is gone
    for pruned in (case.model, copy.deepcopy(case.model)):
        torch.testing.assert_close(case.outputs(pruned), ablated)
    assert not any(parameter.requires_grad for parameter in case.model.parameters())
    assert sum(parameter.numel() for parameter in case.model.parameters()) < size
    numbers = [attention.heads["mixed"] for attention in case.find(case.model)]
    assert numbers == [HEADS - 2, HEADS, HEADS - 1]


def mixed_by(mixing, source):
    """Return sum_j M[j, i] P_j by the equation; P without a mixing."""
    if mixing is None:
        return source
    equation = "bjqk,ji->biqk" if mixing.dim() == 2 else "bjqk,bqji->biqk"
    return torch.einsum(equation, source, mixing)


@EVERY
def test_what_is_seen_are_the_weights_and_the_m_of_a_call(door, variant):
    case = build(door, variant)
    if door == "transformers" and not variant:
        case.model.set_attn_implementation("eager")  # the others return no weights
    attentions = case.find(case.model)
    found = heads_in_call(attentions, lambda: case.outputs(case.model))
    assert [heads.name for heads in found.values()] == [each.name for each in attentions]
    for heads, returned in zip(found.values(), case.weights(case.model), strict=True):
        assert heads.source.shape[:2] == (3, HEADS)
        assert (heads.mixing is None) == (variant.get("head_mixing", "none") == "none")
        torch.testing.assert_close(heads.mixed, returned)
        torch.testing.assert_close(mixed_by(heads.mixing, heads.source), returned)


@EVERY
def test_what_is_no_head_or_must_stay_is_refused_before_any_change(door, variant):
    case = build(door, variant)
    attentions = case.find(case.model)
    name = attentions[0].name
    before = case.outputs(case.model)
    numbers = {0: [1], torch.tensor(0): [0], name: torch.tensor([2])}
    assert choose(attentions, numbers) == {0: [0, 1, 2]}
    refused = {
        f"layer 3: must be from 0 to 2, or a name such as {name}": {torch.tensor(3): [0]},
        f"layer 'nowhere': must be from 0 to 2, or a name such as {name}": {"nowhere": [0]},
        "head 4 of layer 1: must be a whole number from 0 to 3": {0: [0], 1: [4]},
        "head '3' of layer 1: must be a whole number from 0 to 3": {1: ["3"]},
        # Masks: as numbers, True would be head 1.
        "head True of layer 1: must be a whole number from 0 to 3": {1: [True, False]},
        "head tensor(True) of layer 1: must be a whole number from 0 to 3": {
            1: torch.tensor([True, False])
        },
        "heads 3 of layer 1: must be a list of numbers, as [0]": {1: 3},
        "heads is a list: must be a dict of layers and numbers of their heads, as {0: [1, 3]}": [1],
        "heads [0, 1, 2, 3] of layer 1: must leave one head": {0: [0], 1: range(4)},
    }
    for message, heads in refused.items():
        with pytest.raises(HeadsError) as error:
            case.prune(case.model, heads)
        assert str(error.value) == message
    assert torch.equal(case.outputs(case.model), before)


@pytest.mark.parametrize("door", DOORS)
def test_heads_that_all_others_need_are_refused(door):
    case = build(door, {"head_mixing": "low-rank"})
    with pytest.raises(HeadsError) as error:
        case.prune(case.model, {1: [0]})
    assert str(error.value) == (
        "heads [0] of layer 1: head_mixing must have all heads, U is divided by its root mean "
        "square over all heads; ablate them instead"
    )


# ---- the modules of this package ---------------------------------------------------------------


UNCUT = ("low-rank", "differential", "features heads", "features output")
CUT = [
    name for name in attention_equations.COMBINATIONS if name not in UNCUT and "scores" not in name
]


@each_once(
    normalizer=attention_equations.SOME_NORMALIZERS,
    mixing=CUT,
    kind=attention_equations.ATTENTIONS,
    bias=[True, False],
    values=[6, 3],
)
def test_every_part_is_cut_as_it_is_ablated(normalizer, mixing, kind, bias, values):
    sizes = {"head_dim": 6, "value_head_dim": values}
    module = attention_equations.build(kind, mixing, normalizer, bias=bias, **sizes).double()
    attention = AssemblyAttention("one", module)
    cut = {"mixed": [2]}
    if "source" in attention.heads:
        cut["source"] = [0, 2]
    removed = [Head("one", stage, index) for stage, some in cut.items() for index in some]
    query, key, masks = attention_equations.inputs(kind, dtype=torch.float64)
    whole = module(query, key, key, **masks)[0]
    expected = []
    with without([attention], removed):
        for need_weights in (False, True):
            expected.append(module(query, key, key, need_weights=need_weights, **masks)[0])
    attention.cut(cut)
    for need_weights, ablated in zip((False, True), expected):
        found = module(query, key, key, need_weights=need_weights, **masks)[0]
        torch.testing.assert_close(found, ablated, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(whole, ablated)


@torch.no_grad()
def test_what_is_seen_of_factors_is_their_matrix_and_a_source_head_leaves_every_mixed_head():
    module = attention_equations.build(mixing="low-rank").double()
    attention = AssemblyAttention("one", module)
    query, key, masks = attention_equations.inputs(dtype=torch.float64)
    q = attention_equations.heads(module.q_proj(query))
    whole = attention_equations.matrix(module.head_mixing, q, query)

    def call():
        return module(query, key, key, need_weights=False, **masks)

    torch.testing.assert_close(heads_in_call([attention], call)[0].mixing, whole)
    with without([attention], [Head("one", "source", 2)]):
        left = heads_in_call([attention], call)[0].mixing
    assert left[:, :, 2].count_nonzero() == 0
    kept = [0, 1, 3]
    torch.testing.assert_close(left[:, :, kept], whole[:, :, kept])


def test_weights_that_are_seen_are_exact_under_autocast():
    module = attention_equations.build(mixing="position-independent")
    attention = AssemblyAttention("one", module)
    query, key, masks = attention_equations.inputs()
    calls = []
    module.register_attention_hook(lambda module, inputs, outputs: calls.append(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        found = heads_in_call([attention], lambda: module(query, key, key, **masks))[0]

    (call,) = calls
    assert call.query.dtype == torch.bfloat16
    scores = call.query.double() @ call.key.double().mT * call.scale + masks["attn_mask"]
    source = scores.softmax(-1)
    torch.testing.assert_close(found.source, source.float())
    mixed = mixed_by(found.mixing.double(), source)
    torch.testing.assert_close(found.mixed, mixed.float())


def test_the_m_that_was_seen_stays_as_it_was_and_needs_no_gradient():
    module = attention_equations.build(mixing="position-independent")
    attention = AssemblyAttention("one", module)
    query, key, masks = attention_equations.inputs()
    found = heads_in_call([attention], lambda: module(query, key, key, **masks))[0]
    before = module.head_mixing.weight.detach().clone()
    module.head_mixing.weight.data.zero_()  # as training changes it
    assert not found.mixing.requires_grad
    assert torch.equal(found.mixing, before)


def test_a_parameter_of_unknown_heads_is_refused_before_any_change():
    attentions = [
        AssemblyAttention(name, attention_equations.build(mixing="none")) for name in "ab"
    ]
    attentions[1].module.positions = torch.nn.Parameter(torch.zeros(HEADS))
    problem = (
        "cannot be cut, its positions belongs to MixheadAttention; its heads can only be masked"
    )
    with pytest.raises(HeadsError) as error:
        cutting.prune(attentions, {"a": [0], "b": [0]})
    assert str(error.value) == f"heads [0] of layer 1: {problem}"
    assert attentions[0].heads == {"mixed": HEADS}

    with pytest.raises(HeadsError) as error:
        attentions[1].cut({"mixed": [0]})
    assert str(error.value) == f"b: {problem}"


def test_stages_that_no_attention_has_are_refused():
    attention = AssemblyAttention("one", attention_equations.build(mixing="none"))
    with pytest.raises(HeadsError) as error:
        importance([attention], [None], lambda batch: torch.ones(()), lambda batch: 1, ["source"])
    assert str(error.value) == "stages source: must be some of mixed, which the attentions have"


def test_each_head_is_scored_without_it_and_alone():
    modules = {
        "mixed": MixheadAttention(8, 4, head_mixing="average", self_attention=True),
        "plain": MixheadAttention(8, 4, self_attention=True),
    }
    attentions = [AssemblyAttention(name, module) for name, module in modules.items()]
    x = torch.randn(3, 2, 8)
    passing = {}  # by name and stage: the factors that the last call had

    def score():
        for name, module in modules.items():
            ones = {"source": torch.eye(4), "mixed": torch.ones(1, 1, 4, 1)}
            module(x, x, x)
            for stage in attentions[0].heads:
                gate = gates.get((name, stage))
                rows = ones[stage] if gate is None else gate(ones[stage])
                passing[name, stage] = rows.sum(-1).flatten()
        silent = [key for key, factors in passing.items() if not factors.all()]
        seen_factors.append({key: passing[key].tolist() for key in silent})
        return {"loss": float(len(seen_factors))}

    gates = {}
    seen_factors = []
    for attention in attentions:
        register = attention.gate

        def gate(stage, change, register=register, name=attention.name):
            gates[name, stage] = change
            handle = register(stage, change)
            remove = handle.remove
            handle.remove = lambda: (gates.pop((name, stage), None), remove())
            return handle

        attention.gate = gate

    measured = {experiment: ablations(attentions, experiment, score) for experiment in EXPERIMENTS}
    heads = all_heads(attentions)
    eye = torch.eye(4)
    assert len(seen_factors) == len(EXPERIMENTS) * len(heads) == 24
    for number, found in enumerate(seen_factors):
        head = heads[number % len(heads)]
        single = number < len(heads)
        expected = (1 - eye if single else eye)[head.number].tolist()
        assert found == {head[:2]: expected}
        values = measured["single" if single else "only"]["loss"]
        assert values[head.attention][head.stage][head.number] == number + 1
    assert not gates
    with pytest.raises(KeyError, match="onyl"):
        ablations(attentions, "onyl", score)
