"""Test what the module adds to the op.

That is projections, caches, kinds of masks, beams, constant keys and TorchScript.
"""

import copy
import itertools

import numpy as np
import pytest
import torch
from fairseq.modules import MultiheadAttention

from mixhead_plugin.fairseq.attention import MixheadAttention
from mixhead_plugin.fairseq.models.synthesizer.attention import SynthesizerAttention
from mixhead_plugin.ops import IMPLEMENTATIONS
from mixhead_plugin.ops.reference import masked_scores
from mixhead_plugin.parts import Variant, mixing_parameters
from tests.attention_equations import (
    ATTENTIONS,
    COMBINATIONS,
    CROSS,
    NK,
    NQ,
    RELATIVE,
    SOME_NORMALIZERS,
    B,
    E,
    H,
    StepByStep,
    build,
    check_half_precision,
    decode,
    definition,
    future,
    inputs,
    padding,
)
from tests.covering import covering, each_once

# where nothing is different from fairseq before training
STARTS = [
    name
    for name, kind in COMBINATIONS.items()
    if kind["head_mixing"] not in ("random", "average", "differential")
]
DEFINED = [kind for kind in ATTENTIONS if kind not in ("constant", "zero")]


def hidden(kind):
    return padding()[:, None, None] if kind == "cross" else future().bool()


# ---- fairseq's module --------------------------------------------------------------------------


def twins(mixing, kind):
    """Return our module and fairseq's own, made with the same seed."""
    arguments = {"self_attention": kind != "cross", **ATTENTIONS[kind]}
    torch.manual_seed(3)
    ours = MixheadAttention(E, H, **COMBINATIONS[mixing], **arguments).eval()

    fairseqs = {name: value for name, value in arguments.items() if "relative" not in name}
    torch.manual_seed(3)
    return ours, MultiheadAttention(E, H, **fairseqs).eval()


LIKE_FAIRSEQ = {
    "mixing": STARTS,
    "kind": ["self", "constant", "zero", "cross", "t5", "gain"],
    "masked": [False, True],
}


@each_once(**LIKE_FAIRSEQ)
def test_before_training_outputs_and_gradients_are_those_of_fairseqs_module(mixing, kind, masked):
    ours, fairseqs = twins(mixing, kind)
    for name, parameter in fairseqs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name

    query, key, masks = inputs(kind)
    call = {**(masks if masked else {}), "static_kv": kind == "cross", "need_weights": False}
    expected, _ = fairseqs(query, key, key, **call)
    out, _ = ours(query, key, key, **call)
    torch.testing.assert_close(out, expected)

    expected.square().sum().backward()
    out.square().sum().backward()
    for name, parameter in fairseqs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, msg=name)
    for name, parameter in ours.named_parameters():
        # U of a low-rank mixing is multiplied by V, which starts as 0.
        waits = "hidden" in name or "left" in name
        if "_mixing" in name and not waits:
            assert parameter.grad.abs().max() > 0, name


@each_once(**LIKE_FAIRSEQ, head_weights=[False, True])
def test_before_training_weights_are_those_of_fairseqs_module(mixing, kind, masked, head_weights):
    ours, fairseqs = twins(mixing, kind)
    query, key, masks = inputs(kind)
    call = {**(masks if masked else {}), "static_kv": kind == "cross"}
    call["need_head_weights"] = head_weights
    expected = fairseqs(query, key, key, **call)[1]
    weights = ours(query, key, key, **call)[1]
    if weights.dim() > expected.dim():  # fairseq's self-attention averages anyway
        weights = weights.mean(0)
    torch.testing.assert_close(weights, expected)


def test_before_softmax_returns_what_fairseqs_module_returns():
    torch.manual_seed(3)
    fairseqs = MultiheadAttention(E, H, **CROSS).eval()
    query, key, masks = inputs("cross")
    expected = fairseqs(query, key, key, before_softmax=True, **masks)
    torch.testing.assert_close(
        build("cross")(query, key, key, before_softmax=True, **masks), expected
    )


def test_before_softmax_autocast_rounds_the_scores_once():
    module = build("cross")
    query, key, masks = inputs("cross")
    masks["attn_mask"] = torch.randn(NQ, NK)
    asked = []
    module.register_attention_pre_hook(lambda module, inputs: asked.append(inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = module(query, key, key, before_softmax=True, **masks)[0]
        module(query, key, key, **masks)
    (given,) = asked
    expected = masked_scores(given).flatten(0, 1)  # of the same queries and keys, in float32
    torch.testing.assert_close(found, expected.bfloat16(), rtol=0, atol=0)


@each_once(
    mixing=COMBINATIONS,
    kind=["self", "constant", "zero", "cross", "t5", "gain"],
    impl=["auto", "reference", "blockwise"],
    masked=[False, True],
)
def test_a_batch_without_sentences_gives_what_fairseqs_module_gives(mixing, kind, impl, masked):
    ours, fairseqs = twins(mixing, kind)
    ours.impl = impl
    query, key, masks = inputs(kind)
    # fairseq's module raises RuntimeError with static_kv, and for padding without weights.
    call = {"need_weights": masked}
    if masked:
        call["attn_mask"] = masks.get("attn_mask")
    if masked and kind == "cross":
        call["key_padding_mask"] = masks["key_padding_mask"][:0]

    results = []
    for module in (ours, fairseqs):
        given = query[:, :0].clone().requires_grad_()
        out, weights = module(given, key[:, :0], key[:, :0], **call)
        out.sum().backward()
        results.append((out, weights, given.grad))
    torch.testing.assert_close(*results)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


# ---- the equations -----------------------------------------------------------------------------


SIZES = [{}, {"head_dim": 6}, {"value_head_dim": 3}, {"head_dim": 2, "value_head_dim": 5}]


@covering(normalizer=SOME_NORMALIZERS, mixing=COMBINATIONS, kind=DEFINED, sizes=SIZES)
def test_outputs_weights_and_gradients_are_those_of_the_equations(normalizer, mixing, kind, sizes):
    module = build(kind, mixing, normalizer, **sizes).double()
    query, key, masks = inputs(kind, dtype=torch.float64)
    expected, weights = definition(module, query, key, hidden(kind))
    torch.testing.assert_close(
        module(query, key, key, need_head_weights=True, **masks), (expected, weights)
    )
    averaged = module(query, key, key, **masks)[1]
    torch.testing.assert_close(averaged, weights.mean(0))
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(expected.square().sum(), parameters)
    out, nothing = module(query, key, key, need_weights=False, **masks)
    assert nothing is None
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), parameters), wanted)


# That all give the same, tests of the ops prove.
@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name != "triton"])
def test_a_module_computes_with_its_implementation(impl, monkeypatch):
    def run(*args, **settings):
        raise Reached

    implementation = IMPLEMENTATIONS[impl]._replace(run=run)
    monkeypatch.setitem(IMPLEMENTATIONS, impl, implementation)
    module = build(mixing="position-wise")
    module.impl = impl
    x, *_ = inputs()
    with pytest.raises(Reached):
        module(x, x, x, need_weights=False)


class Reached(Exception):
    """An implementation was called."""


@each_once(
    kind=DEFINED,
    normalizer=["softmax", "l2", "l2, sink"],
    mixing=COMBINATIONS,
    dtype=[torch.float16, torch.bfloat16],
    need_weights=[False, True],
)
def test_half_precision_is_as_close_as_the_formula_in_half_precision(
    kind, normalizer, mixing, dtype, need_weights
):
    query, key, masks = inputs(kind)
    module = build(kind, mixing, normalizer)

    def found(attention, query, key):
        # self-attention is one tensor three times
        keys = key if kind == "cross" else query
        out, _ = attention(query, keys, key, need_weights=need_weights, **masks)
        return out

    def formula(attention, query, key):
        keys = key if kind == "cross" else query
        out, _ = definition(attention, query, keys, hidden(kind))
        return out

    check_half_precision(found, formula, module, [query, key], dtype)


def scale_mixing(module):
    scales = torch.linspace(0, 1, 8)[:, None]
    module.register_attention_pre_hook(
        lambda attention, inputs: inputs.with_mixing(inputs.mixing * scales)
    )


def scale_outputs(module):
    module.register_attention_hook(
        lambda attention, inputs, outputs: outputs * inputs.mixing.mean()
    )


def search_with_two_beams(module):
    module.set_beam_size(2)


# What is done to a module before, and what its calls have in addition.
WAYS = {
    "plain": (None, {}),
    "weights": (None, {"need_weights": True}),
    "pre-hook": (scale_mixing, {}),
    "hook": (scale_outputs, {}),
    "beams": (search_with_two_beams, {"static_kv": True, "incremental_state": {}}),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_with_many_small_heads_gives_what_evaluation_gives(way):
    prepare, call = WAYS[way]
    module = MixheadAttention(32, 8, encoder_decoder_attention=True, head_mixing="position-wise")
    torch.nn.init.normal_(module.head_mixing.query_weight)
    if prepare is not None:
        prepare(module)
    query = torch.randn(20, 4, 32)
    key = torch.randn(9, 2, 32).repeat_interleave(2, 1)

    def outcome(training):
        module.train(training)
        out, _ = module(query, key, key, **{"need_weights": False, **copy.deepcopy(call)})
        return out, torch.autograd.grad(out.sum(), list(module.parameters()))

    torch.testing.assert_close(outcome(training=True), outcome(training=False))


def test_autocast_does_not_lower_the_precision_of_the_weights():
    module = build(mixing="position-wise")
    x, *_ = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x, x, x)[1].dtype == torch.float32


# ---- step-by-step decoding ---------------------------------------------------------------------


@each_once(normalizer=SOME_NORMALIZERS, mixing=COMBINATIONS, kind=ATTENTIONS)
def test_step_by_step_with_reordered_hypotheses_is_the_full_pass(normalizer, mixing, kind):
    module = build(kind, mixing, normalizer).double()
    x, key, masks = inputs(kind, dtype=torch.float64)
    cross = kind == "cross"
    hide = {"key_padding_mask": padding()} if cross else {}
    steps, state = decode(module, x[:3], key if cross else None, **hide)
    torch.testing.assert_close(steps, module(x, key, key, need_weights=False, **masks)[0][:3])

    order = torch.tensor([2, 0, 0])
    module.reorder_incremental_state(state, order)
    chosen = torch.cat([x[:3, order], torch.randn_like(x[3:])])
    rest, _ = decode(module, chosen[3:], key[:, order] if cross else None, state)
    key = key[:, order] if cross else chosen
    masks |= {name: mask[order] for name, mask in hide.items()}
    torch.testing.assert_close(rest, module(chosen, key, key, need_weights=False, **masks)[0][3:])


def in_beams(mixing, beam, normalizer="softmax"):
    """Return a module, a query [Nq, B * beam, C], and a key and masks that repeat for each beam."""
    module = build("cross", mixing, normalizer).double()
    query = torch.randn(NQ, B * beam, E, dtype=torch.float64)
    key = inputs("cross", dtype=torch.float64)[1].repeat_interleave(beam, 1)
    masks = {"key_padding_mask": padding().repeat_interleave(beam, 0), "static_kv": True}
    return module, query, key, masks


@each_once(normalizer=SOME_NORMALIZERS, mixing=COMBINATIONS, beam=[2, 3])
def test_hypotheses_of_a_sentence_share_its_keys(normalizer, mixing, beam):
    module, query, key, masks = in_beams(mixing, beam, normalizer)
    full = module(query, key, key, need_weights=False, **masks)[0]
    module.set_beam_size(beam)
    steps, state = decode(module, query, key, **masks)
    torch.testing.assert_close(steps, full)
    # every sentence once
    assert module._get_input_buffer(state)["prev_key"].shape == (B, H, NK, E // H)

    # sentences that are finished leave the cache, and a hypothesis may continue twice
    order = torch.tensor([1] * beam + list(range(2 * beam, 3 * beam)))
    module.reorder_incremental_state(state, order)
    step = module(
        query[:1, order], None, None, incremental_state=state, static_kv=True, need_weights=False
    )[0]
    torch.testing.assert_close(step, full[:1, order])


WANTED = {
    "weights": {},
    "weights of heads": {"need_head_weights": True},
    "scores and values": {"before_softmax": True},
}
BEAM_MASKS = {"no mask": None, "a mask for all": (NQ, NK), "a mask a head": (B * 2 * H, NQ, NK)}


@each_once(mixing=COMBINATIONS, wanted=WANTED, mask=BEAM_MASKS)
def test_hypotheses_that_share_keys_get_all_that_they_get_with_keys_of_their_own(
    mixing, wanted, mask
):
    module, query, key, masks = in_beams(mixing, beam=2)
    if BEAM_MASKS[mask] is not None:
        masks["attn_mask"] = torch.randn(BEAM_MASKS[mask], dtype=torch.float64)
    alone = module(query, key, key, **masks, **WANTED[wanted])
    module.set_beam_size(2)
    together = module(query, key, key, incremental_state={}, **masks, **WANTED[wanted])
    torch.testing.assert_close(together, alone)


@each_once(mixing=STARTS, equal=[False, True])
def test_the_beam_size_of_an_earlier_search_changes_nothing(mixing, equal):
    """A model that once searched with a beam goes on as before, in training and in the next search.

    The batch has as many sentences as the earlier search had hypotheses; some may be equal.
    """
    module = build("cross", mixing)
    query = torch.randn(NQ, 4, E)
    key = torch.randn(NK, 4, ATTENTIONS["cross"]["kdim"])
    if equal:
        key = key[:, [0, 0, 2, 2]]
    full = module(query, key, key, static_kv=True, need_weights=False)[0]
    module.set_beam_size(2)
    torch.testing.assert_close(module(query, key, key, static_kv=True, need_weights=False)[0], full)
    steps, state = decode(module, query, key)
    torch.testing.assert_close(steps, full)
    for order in (torch.tensor([3, 0, 0, 1]), torch.tensor([0, 2, 0, 1])):
        module.reorder_incremental_state(state, order)
        query = query[:, order]
        key = key[:, order]
        step = module(
            query[:1], None, None, incremental_state=state, static_kv=True, need_weights=False
        )[0]
        torch.testing.assert_close(
            step, module(query[:1], key, key, static_kv=True, need_weights=False)[0]
        )


@each_once(normalizer=SOME_NORMALIZERS, mixing=COMBINATIONS, kind=ATTENTIONS)
def test_torchscript_gives_the_same_outputs(normalizer, mixing, kind):
    module = build(kind, mixing, normalizer)
    x, key, masks = inputs(kind)
    scripted = torch.jit.script(StepByStep(module))
    for weights, head_weights in itertools.product([False, True], repeat=2):
        arguments = {**masks, "need_weights": weights, "need_head_weights": head_weights}
        expected = module(x, key, key, **arguments)
        torch.testing.assert_close(scripted.attention(x, key, key, **arguments), expected)
    key = key if kind == "cross" else None
    torch.testing.assert_close(scripted(x, key), decode(module, x, key)[0])


@each_once(mixing=COMBINATIONS, kind=ATTENTIONS, normalizer=["softmax", "l2, sink"])
def test_torchscript_keeps_parts_in_float32_beside_half_precision(mixing, kind, normalizer):
    module = build(kind, mixing, normalizer)
    parts = {name: each.data for name, each in mixing_parameters(module).items()}
    module.bfloat16()
    for name, parameter in mixing_parameters(module).items():
        parameter.data = parts[name]
    query, key, masks = inputs(kind)
    query = query.bfloat16()
    key = key.bfloat16() if kind == "cross" else query

    scripted = torch.jit.script(StepByStep(module)).attention
    found, _ = scripted(query, key, key, **masks)
    exact = copy.deepcopy(module).double()
    expected, _ = exact(query.double(), key.double(), key.double(), **masks)
    assert found.dtype == torch.bfloat16
    assert torch.linalg.norm(found - expected) < 0.02 * torch.linalg.norm(expected)


# ---- what a constructor takes ------------------------------------------------------------------


def test_dropout_runs_in_training_and_where_it_is_retained():
    module = build(mixing="position-wise", dropout=0.5)
    x, *_ = inputs()
    first, weights = module(x, x, x)
    assert torch.equal(first, module(x, x, x)[0])
    dropout = module.dropout_module
    dropout.make_generation_fast_(
        "attention", retain_dropout=True, retain_dropout_modules=["MultiheadAttention"]
    )
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    dropout.apply_during_inference = False
    again, others = module.train()(x, x, x)
    assert not torch.equal(again, first)
    torch.testing.assert_close(others, weights)  # those before dropout


REFUSED = {
    "num_heads 5: must divide embed_dim 16, or head_dim be given": {"num_heads": 5},
    "num_mixed_heads 2: must be 4 without head mixing": {"num_mixed_heads": 2},
    "num_mixed_heads 4: must be 2 with differential mixing": {
        "num_mixed_heads": 4,
        "head_mixing": "differential",
    },
    "num_heads 1: must be a multiple of 2 with differential mixing": {
        "num_heads": 1,
        "head_mixing": "differential",
    },
    "attention_sink zero: needs one of the normalizers softmax, sigsoftmax, l2, entmax15, "
    "not sigmoid": {"attention_sink": "zero", "normalizer": "sigmoid"},
    "kdim 3: must be embed_dim 16 in self-attention": {"kdim": 3, "self_attention": True},
    "vdim 3: must be embed_dim 16 in self-attention": {"vdim": 3, "self_attention": True},
    "relative_position t5: must be none in encoder-decoder attention": {
        "encoder_decoder_attention": True,
        "relative_position": "t5",
    },
    "relative_gain 2: must be 0 in encoder-decoder attention": {
        "encoder_decoder_attention": True,
        "relative_gain": 2,
    },
    "relative_position rotary: must be none with add_bias_kv, a key without a position": {
        "add_bias_kv": True,
        "relative_position": "rotary",
    },
    "relative_gain 2: must be 0 with add_zero_attn, a key without a position": {
        "self_attention": True,
        "add_zero_attn": True,
        "relative_gain": 2,
    },
    "relative_position rotary: needs an even head size, not 3": {
        "self_attention": True,
        "head_dim": 3,
        "relative_position": "rotary",
    },
    "head_mixing: must be left out where a variant is given": {
        "variant": Variant(),
        "head_mixing": "average",
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused(message):
    with pytest.raises(ValueError) as error:
        MixheadAttention(E, **{"num_heads": H, **REFUSED[message]})
    assert str(error.value) == message


NUMBERS_OF_NUMPY = {
    "mixed heads": (
        MixheadAttention,
        {"head_mixing": "position-wise", "num_mixed_heads": np.int64(3)},
    ),
    "a synthesizer": (
        SynthesizerAttention,
        {
            "synthesizer": "factorized-random",
            "max_length": np.int64(9),
            "rank_or_factor": np.int64(2),
        },
    ),
}


@pytest.mark.parametrize("case", NUMBERS_OF_NUMPY)
def test_a_module_that_was_built_with_numbers_of_numpy_can_be_saved_and_read(case, tmp_path):
    module_class, numbers = NUMBERS_OF_NUMPY[case]
    module = module_class(np.int64(E), np.int64(H), head_dim=np.int64(4), **numbers)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    read = torch.load(tmp_path / "state.pt", weights_only=True)
    assert read._metadata == module.state_dict()._metadata


def test_quantisation_noise_reaches_the_projections():
    module = build(q_noise=0.5, qn_block_size=4).train()
    x, *_ = inputs()
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])


# ---- the device `meta`, on which people count parameters ---------------------------------------


@each_once(mixing=COMBINATIONS, kind=["self", "cross", *RELATIVE], need_weights=[False, True])
def test_a_module_can_be_built_and_run_on_meta(mixing, kind, need_weights):
    with torch.device("meta"):
        module = build(kind, mixing)
        query, key, masks = inputs(kind)
        out, _ = module(query, key, key, need_weights=need_weights, **masks)
    assert out.is_meta and out.shape == (NQ, B, E)
    assert not any(tensor.device.type != "meta" for tensor in module.state_dict().values())
    expected = {name: tensor.shape for name, tensor in build(kind, mixing).state_dict().items()}
    assert {name: tensor.shape for name, tensor in module.state_dict().items()} == expected
