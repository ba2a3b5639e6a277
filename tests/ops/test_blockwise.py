"""Test what blocks add.

That is little memory, threads, dropout that is drawn again, operators that torch can compile.
"""

import math
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mixhead_plugin.ops import attention
from mixhead_plugin.ops.blockwise import plan
from mixhead_plugin.ops.blockwise.buffers import Buffers
from mixhead_plugin.ops.blockwise.sharing import Sharing, sharing
from mixhead_plugin.ops.inputs import DIMENSIONS, AttentionInputs
from mixhead_plugin.ops.operators import DIFFERENTIABLE
from tests.covering import covering, each_once
from tests.ops import calls
from tests.ops.calls import (
    DV,
    FEW,
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


@pytest.fixture(autouse=True)
def small_blocks():
    with blocks(2, 2**6):
        yield


# threads, and scores in a block
SETTINGS = {
    "2 threads, blocks of 64": (2, 2**6),
    "1 thread, blocks of 256": (1, 2**8),
    "3 threads, blocks of 1024": (3, 2**10),
}


@covering(setting=SETTINGS, mixing=MIXINGS, distances=FEW)
def test_everything_repeats_bit_by_bit_with_the_seed(setting, mixing, distances):
    given = tensors(mixing, distances, torch.float32)
    runs = []
    with blocks(*SETTINGS[setting]):
        for _ in range(4):
            torch.manual_seed(11)
            runs.append(outcome(given, causal=True, dropout_p=0.4, impl="blockwise"))
    for run in runs[1:]:
        assert_same(run, runs[0], rtol=0, atol=0)


# likewise
IN_A_BLOCK = {"one sentence": (2, 2**6), "several sentences": (1, 2**12)}


@covering(
    mixing=MIXINGS,
    distances=FEW,
    normalizer=["softpick", "softmax, sink"],
    in_a_block=IN_A_BLOCK,
    kept=["0", ""],
)
def test_no_buffer_is_read_after_another_step_has_taken_it(
    mixing, distances, normalizer, in_a_block, kept, monkeypatch
):
    """Nothing changes if each use of a buffer has memory of its own, which is full of NaN."""
    given = tensors(mixing, distances, torch.float32, normalizer=normalizer)
    options = dict(causal=True, dropout_p=0.2, impl="blockwise", normalizer=normalizer)
    monkeypatch.setenv("MIXHEAD_KEPT_MIB", kept)

    def own_memory(self, name, shape, most=None):
        return self.like.new_full(shape, math.nan)

    runs = []
    for get in (Buffers.get, own_memory):
        monkeypatch.setattr(Buffers, "get", get)
        torch.manual_seed(3)
        with blocks(*IN_A_BLOCK[in_a_block]):
            runs.append(outcome(given, **options))
    assert_same(*runs, rtol=0, atol=0)


@pytest.mark.parametrize(
    "n_sentences, n_queries, n_keys, causal, expected",
    [
        pytest.param(1, 512, 2048, False, (1, 8, 20), id="too few blocks for larger ones"),
        pytest.param(1, 2048, 2048, False, (1, 8, 64), id="larger to reach 64 queries"),
        pytest.param(4, 512, 512, False, (1, 8, 64), id="of the usual size"),
        pytest.param(4, 128, 128, True, (4, 8, 64), id="causal, filled by other sentences"),
    ],
)
def test_a_block_of_mixed_heads_has_the_size_that_suits_a_cpu(
    n_sentences, n_queries, n_keys, causal, expected
):
    query = torch.empty(n_sentences, 8, n_queries, 1)
    key = torch.empty(n_sentences, 8, n_keys, 1)
    mixed = AttentionInputs(query, key, key, mixing=torch.empty(8, 8), causal=causal)
    with mock.patch.multiple(plan, BLOCK_SIZE_CPU=2**18, MIN_QUERIES=20, MANY_QUERIES=64, LARGER=4):
        assert plan._sizes(mixed) == plan.BlockSizes(*expected)


SHARED = {
    "key": Sharing.BY_GROUP,
    "value": Sharing.BY_GROUP,
    "relative_key": Sharing.BY_ALL,
    "gain": Sharing.BY_ALL,
    "sink": Sharing.TERM,
}


@pytest.mark.parametrize("name", DIMENSIONS)
def test_blocks_share_a_gradient_as_its_dimensions_say(name):
    for dims in DIMENSIONS[name]:
        expected = SHARED.get(name, Sharing.WRITTEN)  # the rest has queries
        if name in ("mixing", "score_mixing") and len(dims) == 2:
            expected = Sharing.TERM
        assert sharing(name, len(dims)) is expected


@pytest.mark.parametrize("number_of_dimensions", [1, 2, 3, 4])
def test_all_blocks_add_to_a_mask_whatever_its_dimensions(number_of_dimensions):
    assert sharing("attn_mask", number_of_dimensions) is Sharing.BY_ALL


def test_nothing_depends_on_the_number_of_threads():
    given = tensors("per query")
    outcomes = []
    for n in (1, 2, 4):
        torch.set_num_threads(n)
        torch.manual_seed(2)
        outcomes.append(outcome(given, causal=True, dropout_p=0.5, impl="blockwise"))
    for found in outcomes[1:]:
        assert_same(found, outcomes[0], rtol=0, atol=0)


@each_once(setting=SETTINGS, p=[0.1, 0.5, 0.9])
def test_dropout_has_its_probability_and_no_pattern(setting, p):
    n = 48
    q = torch.zeros(8, H, n, D)
    v = torch.eye(n).expand(8, H, n, n)
    with blocks(*SETTINGS[setting]):
        weights = attention(q, q, v, dropout_p=p, impl="blockwise") * n * (1 - p)  # 0 or 1
    assert ((weights == 0) | ((weights - 1).abs() < 1e-5)).all()
    deviation = (p * (1 - p) / weights.numel()) ** 0.5
    assert abs(weights.mean() - (1 - p)) < 5 * deviation
    for dim in range(4):  # neighbours that both stay are as frequent as chance has it
        pairs = weights * weights.roll(1, dim)
        assert abs(pairs.mean() - (1 - p) ** 2) < 10 * deviation


@pytest.mark.parametrize(
    "p", [0.99999, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.9999, 1e-4))]
)
def test_extreme_probabilities_are_met_as_well(p):
    n = 512  # 16 random bits would keep 1.5 times as many weights at the first p
    q = torch.zeros(16, H, n, 1)
    ones = attention(q, q, torch.ones(16, H, n, 1), dropout_p=p, impl="blockwise")  # 1 on average
    deviation = (p / (1 - p) / (16 * H * n * n)) ** 0.5
    assert abs(ones.mean() - 1) < 5 * deviation


@pytest.mark.parametrize(
    "n_queries, mask",
    [
        pytest.param(NK + 9, "causal", id="queries that see no key"),
        pytest.param(NQ, "padded at the end", id="keys that are padding"),
        pytest.param(NQ, "a window", id="keys that the last queries do not see"),
    ],
)
def test_what_no_block_writes_is_zero(n_queries, mask):
    given = tensors("per query", n_queries=n_queries)
    masks = calls.MASKS[mask]()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        assert_same(*(outcome(given, **masks, impl=impl) for impl in ("blockwise", "reference")))
    finally:
        torch.use_deterministic_algorithms(False)


def test_all_may_be_dropped():
    found = outcome(tensors("shared"), dropout_p=1.0, impl="blockwise")
    assert all((value == 0).all() for value in found.values())


@each_once(mixing=MIXINGS, distances=["none", "scores shared"], normalizer=["softmax", *SINKS])
def test_autograd_saves_inputs_a_seed_and_an_empty_handle(mixing, distances, normalizer):
    drawn = tensors(mixing, distances, normalizer=normalizer)
    kept = []
    given = {name: t.requires_grad_() for name, t in drawn.items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        calls.run(given, causal=True, dropout_p=0.1, impl="blockwise", normalizer=normalizer)
    known = {t.data_ptr() for t in given.values()}
    assert sum(t.numel() for t in kept if t.data_ptr() not in known) <= 1  # the seed of the dropout


@covering(mixing=MIXINGS, distances=FEW, impl=["blockwise", "auto"])
def test_activation_checkpointing_drops_the_same_weights(mixing, distances, impl):
    given = tensors(mixing, distances)
    options = dict(causal=True, dropout_p=0.3, impl=impl)
    found = []
    for wrap in (
        lambda f, *a, **k: f(*a, **k),
        lambda f, *a, **k: checkpoint(f, *a, use_reentrant=False, **k),
    ):
        torch.manual_seed(5)
        found.append(
            outcome(given, lambda wrap=wrap, **arguments: wrap(attention, **arguments), **options)
        )
    assert_same(*found)


@each_once(mixing=MIXINGS, distances=FEW)
def test_it_compiles_without_a_break(mixing, distances):
    given = tensors(mixing, distances, torch.float32)
    mask = calls.hole()

    def run(**arguments):
        out = attention(**arguments, causal=True, key_padding_mask=mask, impl="blockwise")
        return (out.transpose(1, 2).flatten(2) * 2).sin()

    torch._dynamo.reset()  # or the cases together reach the limit of compilations
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(outcome(given, compiled), outcome(given, run))


def operator_inputs(mixing="per query", distances=FEW[-1], dtype=torch.float64, learned=True):
    given = {
        n: t.requires_grad_(learned)
        for n, t in tensors(mixing, distances, dtype, normalizer=SINKS[0]).items()
    }
    given["attn_mask"] = torch.randn(NQ, NK, dtype=dtype, requires_grad=learned)
    names = AttentionInputs._fields[: AttentionInputs._fields.index("seed")]
    return [given.get(name) for name in names], [torch.tensor(5), "softmax", True, 0.2, 0.5]


@each_once(mixing=MIXINGS, distances=FEW)
def test_torch_finds_no_fault_in_the_operator(mixing, distances):
    inputs, settings = operator_inputs(mixing, distances)
    torch.library.opcheck(torch.ops.mixhead_plugin.blockwise, (*inputs, *settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_lie_in_memory_as_the_compiler_was_told(dtype):
    """Each gradient has the strides of its tensor, which is transposed here."""
    inputs, settings = operator_inputs("shared", dtype=dtype, learned=False)
    turned = [
        t if t is None or t.dim() < 2 else t.transpose(-2, -1).contiguous().transpose(-2, -1)
        for t in inputs
    ]
    turned[AttentionInputs._fields.index("key_padding_mask")] = calls.hole()
    d_output = torch.randn(B, NQ, H, DV).transpose(1, 2).to(dtype)
    # as the queries of latents
    expanded = [turned[0][:, :1].expand_as(turned[0]), *turned[1:], *settings]
    torch.library.opcheck(
        torch.ops.mixhead_plugin.blockwise, expanded, test_utils="test_faketensor"
    )
    given = dict(zip(AttentionInputs._fields, turned))
    names = [name for name in DIFFERENTIABLE if given[name] is not None]
    arguments = (d_output, " ".join(names), *turned, *settings)
    torch.library.opcheck(
        torch.ops.mixhead_plugin.blockwise_backward, arguments, test_utils="test_faketensor"
    )


@pytest.mark.parametrize("frozen", DIFFERENTIABLE)
def test_a_frozen_tensor_gets_no_gradient_and_changes_no_other(frozen):
    mixing = "factors" if frozen.startswith("mixing_") else "per query"
    inputs, settings = operator_inputs(mixing, "past gain scores shared", learned=False)
    given = dict(zip(AttentionInputs._fields, inputs))
    asked = [name for name in DIFFERENTIABLE if given[name] is not None]
    assert frozen in asked
    d_output = torch.randn(B, H, NQ, DV, dtype=torch.float64)

    def gradients(names):
        operator = torch.ops.mixhead_plugin.blockwise_backward
        return dict(zip(DIFFERENTIABLE, operator(d_output, " ".join(names), *inputs, *settings)))

    expected = gradients(asked)
    found = gradients([name for name in asked if name != frozen])
    assert found.pop(frozen).numel() == 0
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


def test_a_second_derivative_is_refused():
    given = {name: t.requires_grad_() for name, t in tensors("shared").items()}
    out = attention(**given, impl="blockwise")
    (gradient,) = torch.autograd.grad(out.square().sum(), given["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative; impl 'reference' has"):
        gradient.square().sum().backward()


def test_a_forward_mode_derivative_by_any_input_is_refused():
    given = tensors("shared", FEW[-1])
    for name, tensor in given.items():
        with pytest.raises(
            NotImplementedError, match="no forward-mode derivative; impl 'reference' has"
        ):
            torch.func.jvp(
                lambda t, name=name: calls.run({**given, name: t}, impl="blockwise"),
                (tensor,),
                (torch.ones_like(tensor),),
            )


def test_the_default_device_does_not_matter():
    given = tensors("shared")
    results = []
    for device in ("cpu", "meta"):
        torch.manual_seed(1)
        with torch.device(device):
            results.append(attention(**given, dropout_p=0.5, impl="blockwise"))
    assert torch.equal(*results)


def test_inference_mode_is_carried_into_the_threads():
    with torch.inference_mode():
        given = {name: t.clone() for name, t in tensors("shared").items()}
        out = attention(**given, causal=True, impl="blockwise")
        torch.testing.assert_close(out, attention(**given, causal=True, impl="reference"))
