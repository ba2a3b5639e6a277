"""Test the laws of every implementation on the CPU; test_triton.py tests the kernels.

test_choice.py has which implementation `auto` takes, and test_refusals.py what is refused.
"""

import warnings
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from statistics import median
from unittest import mock

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from mixhead_plugin.ops import (
    NORMALIZERS,
    LowRank,
    api,
    attention,
)
from tests.covering import covering, each_once
from tests.ops import calls, definitions
from tests.ops.calls import (
    FEW,
    MASKS,
    MIXINGS,
    NK,
    NQ,
    SINKS,
    B,
    D,
    H,
    assert_same,
    blocks,
    outcome,
    tensors,
)
from tests.ops.definitions import INF
from tests.torch_programs import run_program

IMPLS = ["auto", "reference", "blockwise"]
# Threads and scores in a block: blocks of some queries of some heads, and of several sentences.
WAYS = {"reference": (1, 2**18), "blocks of 64": (2, 2**6), "blocks of 1024": (3, 2**10)}
TORCHS = ["torch's kernel"]  # softmax alone, for values as large as queries


def compute(tensors, way, **options):
    if way in TORCHS:  # on a GPU it also serves calls that it does not serve here
        plain = tensors.keys() == {"query", "key", "value"}
        with mock.patch.object(api, "fastest", lambda inputs: "fused") if plain else nullcontext():
            return outcome(tensors, **options)
    with blocks(*WAYS[way]):
        return outcome(tensors, impl=way if way in IMPLS else "blockwise", **options)


# The next test has all normalizers, behind one mask. These need to know which rows see no key.
@covering(
    way=WAYS, normalizer=["softmax", "sigsoftmax", "l2", "l2, sink"], mixing=MIXINGS, masks=MASKS
)
def test_values_and_gradients_are_those_of_the_definition_behind_every_mask(
    way, normalizer, mixing, masks
):
    given = tensors(mixing, normalizer=normalizer)
    options = {"normalizer": normalizer, **MASKS[masks]()}
    assert_same(compute(given, way, **options), outcome(given, definitions.attention, **options))


@covering(
    way=WAYS,
    normalizer=[*NORMALIZERS, *SINKS],
    mixing=["none", "factors", *calls.SHAPES],
    distances=calls.DISTANCES,
)
def test_values_and_gradients_are_those_of_the_definition(way, normalizer, mixing, distances):
    given = tensors(mixing, distances, normalizer=normalizer)
    options = {"causal": True, "key_padding_mask": calls.hole(), "attn_mask": torch.randn(1, 1, NK)}
    options |= {"normalizer": normalizer, "scale": 0.7}
    assert_same(compute(given, way, **options), outcome(given, definitions.attention, **options))


@pytest.mark.parametrize("masks", MASKS)
def test_torchs_kernel_is_the_definition_behind_every_mask(masks):
    given = tensors(value_dim=D)
    options = {"scale": 0.7, **MASKS[masks]()}
    assert_same(
        compute(given, "torch's kernel", **options),
        outcome(given, definitions.attention, **options),
    )


SIZES = [
    (B, 1, 9),
    (B, 9, 1),
    (B, 13, 13),
    (B, 13, 6),
    (B, 6, 13),
    (B, 0, 4),
    (B, 4, 0),
    (B, 0, 0),
    (0, NQ, NK),
]


@covering(
    way=[*WAYS, *TORCHS],
    mixing=MIXINGS,
    distances=["all", *FEW],
    normalizer=["softmax", *SINKS[:1]],
    sizes=SIZES,
)
def test_any_number_of_sentences_queries_and_keys(way, mixing, distances, normalizer, sizes):
    shape = dict(zip(("batch", "n_queries", "n_keys"), sizes), value_dim=D)
    given = tensors(mixing, distances, normalizer=normalizer, **shape)
    options = {"normalizer": normalizer, "causal": True}
    assert_same(compute(given, way, **options), outcome(given, definitions.attention, **options))


@covering(
    way=WAYS,
    shape=[(NQ, NK), (1, H, NQ, NK), (B, 1, 1, NK), (B, H, NQ, NK), (NQ, 1)],
    causal=[False, True],
)
def test_a_learned_bias_gets_its_gradient_even_where_it_is_zero(way, shape, causal):
    given = {**tensors("shared"), "attn_mask": torch.zeros(shape, dtype=torch.float64)}
    expected = outcome(given, definitions.attention, causal=causal)
    assert expected["attn_mask"].count_nonzero() > 0
    assert_same(compute(given, way, causal=causal), expected)


@covering(
    way=WAYS, mixing=MIXINGS, distances=FEW, normalizer=["sigsoftmax", "l2", "sigmoid", *SINKS]
)
def test_gradients_with_dropout_are_those_of_finite_differences(way, mixing, distances, normalizer):
    given = tensors(mixing, distances, n_queries=4, n_keys=5, batch=2, normalizer=normalizer)
    given["attn_mask"] = torch.randn(1, H, 4, 5, dtype=torch.float64)

    def function(*values):
        torch.manual_seed(7)  # the same dropout each time
        impl = way if way in IMPLS else "blockwise"
        return calls.run(
            dict(zip(given, values)), impl=impl, normalizer=normalizer, causal=True, dropout_p=0.3
        )

    with blocks(*WAYS[way]):
        torch.autograd.gradcheck(
            function, [t.requires_grad_() for t in given.values()], fast_mode=True
        )


@each_once(normalizer=[*NORMALIZERS, *SINKS], mixing=MIXINGS, distances=FEW)
def test_the_reference_has_second_derivatives(normalizer, mixing, distances):
    given = tensors(mixing, distances, n_queries=3, n_keys=4, batch=1, normalizer=normalizer)
    options = {
        "impl": "reference",
        "normalizer": normalizer,
        "attn_mask": torch.zeros(3, 4).double(),
    }
    options["attn_mask"][0] = -torch.inf  # a query that sees nothing
    torch.autograd.gradgradcheck(
        lambda *values: calls.run(dict(zip(given, values)), **options),
        [t.requires_grad_() for t in given.values()],
        fast_mode=True,
    )


@covering(
    way=WAYS,
    normalizer=[*NORMALIZERS, *SINKS],
    mixing=MIXINGS,
    distances=FEW,
    dtype=[torch.float16, torch.bfloat16, torch.float32],
)
def test_errors_are_at_most_twice_those_of_the_formula_in_the_same_dtype(
    way, normalizer, mixing, distances, dtype
):
    options = {"normalizer": normalizer, "causal": True, "key_padding_mask": calls.hole()}
    shares = defaultdict(list)
    # In one draw the formula may be exact by luck. Then the median of five draws decides.
    for draw in range(5):
        if draw == 1 and max(map(max, shares.values())) <= 1:
            break
        # of halves the formula does not overflow
        low = {
            name: t.div(2).to(dtype)
            for name, t in tensors(mixing, distances, normalizer=normalizer).items()
        }
        exact = outcome(
            {name: t.double() for name, t in low.items()}, definitions.attention, **options
        )
        formula = outcome(low, definitions.attention, **options)
        for name, value in compute(low, way, **options).items():
            assert value.dtype == dtype
            rounding = torch.finfo(dtype).eps * exact[name].abs().max()
            error, formulas = (
                (t.double() - exact[name]).abs().max() for t in (value, formula[name])
            )
            shares[name].append((error / (2 * formulas + rounding)).item())
    for name, found in shares.items():
        assert median(found) <= 1 and max(found) <= 4, name


@st.composite
def random_calls(draw):
    """Draw tensors of any shapes, options, and the size of blocks."""
    batch = draw(st.integers(1, 3))
    heads = draw(st.integers(1, 4))
    mixed = draw(st.integers(1, 4))
    n_queries = draw(st.integers(1, 9))
    n_keys = draw(st.integers(1, 9))
    size = draw(st.integers(1, 5))
    torch.manual_seed(draw(st.integers(0, 2**20)))
    shapes = {"query": (batch, heads, n_queries, size), "key": (batch, heads, n_keys, size)}
    kind = draw(st.sampled_from(MIXINGS))
    if kind == "factors":
        shapes |= calls.factors(batch, n_queries, heads, rank=draw(st.integers(1, 5)))
    elif kind == "shared":
        shapes["mixing"] = (heads, mixed)
    elif kind != "none":
        shapes["mixing"] = (batch, n_queries, heads, mixed)
    mixed_heads = mixed if "mixing" in shapes else heads
    shapes["value"] = (batch, mixed_heads, n_keys, draw(st.integers(1, 5)))
    if draw(st.booleans()):
        rows = draw(st.sampled_from([n_keys, n_queries + n_keys - 1]))
        shapes["relative_query"] = (batch, heads, n_queries, 2)
        shapes["relative_key"] = (heads, rows, 2)
    if draw(st.booleans()):
        shapes["gain"] = (heads, n_queries + n_keys - 1)
    normalizer = draw(st.sampled_from([*NORMALIZERS, *SINKS]))
    if normalizer in SINKS:
        shapes["sink"] = (heads,)
    if draw(st.booleans()):
        of_scores = [(heads, heads), (batch, n_queries, heads, heads)]
        shapes["score_mixing"] = draw(st.sampled_from(of_scores))
    if draw(st.booleans()):
        full = (batch, heads, n_queries, n_keys)
        broadcast = [n if draw(st.booleans()) else 1 for n in full]
        missing = draw(st.integers(0, 3))
        shapes["attn_mask"] = broadcast[missing:]

    found = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    if "attn_mask" in found:
        hidden = torch.rand(shapes["attn_mask"]) < 0.3
        low = draw(st.sampled_from([0.0, -INF]))
        found["attn_mask"] = found["attn_mask"].masked_fill(hidden, low)
    options = {"normalizer": normalizer, "causal": draw(st.booleans())}
    if draw(st.booleans()):
        share = draw(st.sampled_from([0.2, 0.6, 1.0]))
        options["key_padding_mask"] = torch.rand(batch, n_keys) < share
    block = draw(st.sampled_from([1, 32, 256, 2**18])), draw(st.integers(1, 4))
    return found, options, block


@pytest.mark.parametrize("examples", [25, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_calls_are_the_definition(examples):
    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    @hypothesis.given(random_calls())
    def holds(call):
        given, options, (scores, queries) = call
        expected = outcome(given, definitions.attention, **options)
        with blocks(1, scores, queries):
            for impl in IMPLS:
                assert_same(outcome(given, impl=impl, **options), expected, rtol=1e-8, atol=1e-9)

    holds()


@covering(
    way=[*WAYS, *TORCHS],
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    lowest=[-1e8, "of float32", "of the mask"],
)
def test_very_low_scores_are_no_hidden_keys(way, dtype, lowest):
    """fairseq's encoders hide keys by -1e8; where every key has it, all weigh the same."""
    of_mask = torch.float64 if dtype == torch.float64 else torch.float32
    if lowest == "of float32":
        lowest = torch.finfo(torch.float32).min
    elif lowest == "of the mask":
        lowest = torch.finfo(of_mask).min
    given = {name: t.to(dtype) for name, t in tensors(value_dim=D).items()}
    given["query"] = 0 * given["query"]  # a float32 score has no place for more beside -1e8
    mask = torch.full((NQ, NK), -INF, dtype=torch.float64).index_fill(
        1, torch.tensor([0, 4]), lowest
    )
    out = compute(given, way, attn_mask=mask.to(of_mask))["out"]
    expected = given["value"][:, :, [0, 4]].double().mean(2, keepdim=True).expand(out.shape)
    torch.testing.assert_close(
        out.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps
    )


@covering(impl=IMPLS, mixing=MIXINGS)
def test_autocast_does_not_lower_the_precision(impl, mixing):
    given = tensors(mixing, dtype=torch.float32, value_dim=D)
    expected = calls.run(given, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(calls.run(given, impl=impl), expected)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_mask_may_have_the_half_precision_that_autocast_has_not(impl):
    given = tensors(dtype=torch.float32, n_queries=40, n_keys=40)
    mask = calls.future(40, 40).half()
    expected = attention(**given, attn_mask=mask, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16), blocks(1, 2**8):
        assert_same({"out": attention(**given, attn_mask=mask, impl=impl)}, {"out": expected})


@pytest.mark.parametrize(
    "mixing, distances",
    [("none", "none"), ("per query", "scores shared"), ("shared", "past"), ("factors", "none")],
)
def test_the_counter_of_flops_sees_every_product_of_matrices(mixing, distances):
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    given = tensors(mixing, distances)
    counts = {}
    for impl in ("reference", "blockwise"):
        with FlopCounterMode(display=False) as counter:
            calls.run(given, impl=impl)
        counts[impl] = counter.get_total_flops()
    assert counts["blockwise"] == counts["reference"] > 0

    given = {name: tensor.requires_grad_() for name, tensor in given.items()}
    out = calls.run(given, impl="blockwise")
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() > 2 * counts["blockwise"]


@covering(impl=["reference", "blockwise"], normalizer=NORMALIZERS)
def test_on_the_device_meta_there_are_shapes(impl, normalizer):
    given = {name: t.to("meta") for name, t in tensors("per query", FEW[-1]).items()}
    masks = {
        "attn_mask": calls.future().to("meta"),
        "key_padding_mask": calls.hole().to("meta"),
        "causal": True,
    }
    for name, value in outcome(
        given, impl=impl, normalizer=normalizer, dropout_p=0.1, **masks
    ).items():
        assert value.device.type == "meta"
        assert value.shape == (given[name].shape if name != "out" else (B, H, NQ, calls.DV))


@covering(impl=["reference", "blockwise"], mixing=MIXINGS)
def test_dropout_comes_after_the_mixing(impl, mixing):
    """With V the identity, the output is the dropped and mixed weights.

    Each is 0 or the mixed weight / (1 - p).
    """
    n = 64
    given = {
        **tensors(mixing, n_queries=n, n_keys=n),
        "value": torch.eye(n).double().expand(B, H, n, n).contiguous(),
    }
    whole, dropped = (calls.run(given, dropout_p=p, impl=impl) for p in (0.0, 0.25))
    zero = dropped == 0
    torch.testing.assert_close(dropped[~zero], whole[~zero] / 0.75)
    assert abs(zero.double().mean().item() - 0.25) < 0.01


@each_once(normalizer=NORMALIZERS, mixing=MIXINGS)
def test_auto_takes_the_formula_for_forward_mode_derivatives(normalizer, mixing):
    given = tensors(mixing, value_dim=D)
    query = given.pop("query")
    tangent = torch.randn(B, H, NQ, D, dtype=torch.float64)

    def tangent_of(impl):
        function = partial(attention, **calls.packed(given), normalizer=normalizer, impl=impl)
        _, found = torch.func.jvp(function, (query,), (tangent,))
        return found

    found = tangent_of("auto")
    assert found.abs().max() > 0
    torch.testing.assert_close(found, tangent_of("reference"))


@pytest.mark.parametrize("rank", [1, 2, 9])
def test_factors_mix_as_their_matrix_does_whatever_their_dtypes(rank):
    given = tensors(dtype=torch.float32, n_queries=30, n_keys=30)
    left, right = torch.randn(2, B, 30, H, rank)
    factors = LowRank(left.half(), right.double(), torch.randn(B, 30, H))
    expected = attention(**given, mixing=factors.matrix(), impl="reference")
    for impl in IMPLS:
        torch.testing.assert_close(attention(**given, mixing=factors, impl=impl), expected)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_causal_softmax_is_right_where_the_scale_is_no_positive_number(scale):
    given = tensors(n_queries=5, n_keys=5)
    exact = attention(**given, causal=True, scale=scale, impl="reference")
    torch.testing.assert_close(attention(**given, causal=True, scale=scale), exact)


# Python finds neither fairseq nor triton, and the import must not initialise CUDA.
WITHOUT_FAIRSEQ_AND_TRITON = """
import importlib.util
import sys

import torch

find = importlib.util.find_spec
sys.modules["fairseq"] = None
importlib.util.find_spec = (
    lambda name, *more: None if name in ("triton", "fairseq") else find(name, *more)
)
initialise = torch.cuda._lazy_init
torch.cuda._lazy_init = None
import mixhead_plugin
torch.cuda._lazy_init = initialise

from mixhead_plugin.ops import attention, implementation_problem
x = torch.randn(1, 2, 3, 4)
assert attention(x, x, x, normalizer="l2").shape == x.shape
assert "triton" not in sys.modules
print(implementation_problem("triton"))
"""


def test_the_package_works_without_fairseq_and_triton_and_says_so(tmp_path):
    result = run_program(WITHOUT_FAIRSEQ_AND_TRITON, tmp_path, env={"TRITON_INTERPRET": "1"})
    assert result.stdout.strip() == "needs the package triton, which is not installed", (
        result.stderr
    )


def test_a_traced_program_has_only_operations_of_torch_and_serves_other_sizes():
    """The classic exporter to ONNX traces, and knows no operator of ours."""

    def call(query, key, value, mixing):
        return attention(query, key, value, mixing=mixing)

    mixing = torch.eye(2) + 0.1
    with warnings.catch_warnings():
        # checks of shapes are not in the program
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(call, (*torch.randn(3, 1, 2, 40, 4), mixing))
    assert "mixhead_plugin::" not in str(traced.inlined_graph)
    longer = (*torch.randn(3, 3, 2, 70, 4), mixing)
    torch.testing.assert_close(traced(*longer), call(*longer))


def softmax_attention(query, key, value, attn_mask):
    """Sum scores and mask as torch does.

    `definitions.attention` has no shift, so exp(s) would be 0 in rows of low scores.
    """
    scores = query @ key.mT * query.shape[3] ** -0.5
    return torch.softmax(scores + attn_mask, -1) @ value


# What hides, from query 1, the only keys whose numbers in `attn_mask` are not low.
HIDING = {
    "the mask alone": {},
    "causal": {"causal": True},
    "padding": {"key_padding_mask": (torch.arange(NK) >= NK - 2).expand(B, -1)},
}


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize(
    "lowest", [-1e8, torch.finfo(torch.float32).min], ids=["of fairseq", "of transformers"]
)
def test_gradients_of_rows_of_low_scores_are_those_of_the_definition(lowest, hiding, way):
    """torch's own kernel gives such rows gradients that are several times too large.

    So "auto" may not take it.
    """
    torch._dynamo.reset()
    attend = attention
    if way == "compiled":
        attend = torch.compile(attention, backend="aot_eager", fullgraph=True)

    # as transformers writes for a query that may see no key, with left padding
    mask = torch.zeros(NQ, NK)
    mask[1] = lowest
    masks = HIDING[hiding]
    hidden = torch.zeros(B, 1, NQ, NK, dtype=torch.bool)
    if "causal" in masks:
        hidden |= torch.ones(NQ, NK, dtype=torch.bool).triu(1 + NK - NQ)
    if "key_padding_mask" in masks:
        hidden |= masks["key_padding_mask"][:, None, None]
    mask[1, hidden[0, 0, 1]] = 0.0

    for dtype in (torch.float64, torch.float32):
        # values as large as keys, as torch's kernel wants them
        made = tensors(value_dim=D, dtype=dtype)
        attn_mask = mask.to(dtype)
        of_torch = attn_mask.masked_fill(hidden, -INF)
        expected = outcome(made, softmax_attention, attn_mask=of_torch)
        assert_same(outcome(made, attend, attn_mask=attn_mask, **masks), expected)


def test_a_compiled_program_without_breaks_has_the_gradients_of_torchs_kernel():
    torch._dynamo.reset()
    made = tensors(value_dim=D)
    compiled = torch.compile(attention, backend="eager", fullgraph=True)
    assert_same(
        outcome(made, compiled, causal=True), outcome(made, definitions.attention, causal=True)
    )
