"""Laws of the attention and of whole models, tried on random cases; the larger number of them is for the slow tests.

The cases are the same every time: hypothesis derives them from the property itself.
"""

import math
from contextlib import contextmanager
from typing import Any, Callable, Dict, NamedTuple, Optional
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixhead_plugin.modules.head_mixing import HEAD_MIXINGS
from mixhead_plugin.modules.synthesizer import SYNTHESIZERS
from mixhead_plugin.ops import NORMALIZERS, RelativeScores, attention, blockwise
from mixhead_plugin.options import FAMILIES
from tests.helpers import build, dictionary, shake, tokens
from tests.xl import build_xl

INF = float("inf")
PAD, EOS = dictionary().pad(), dictionary().eos()


def for_all(few: int, many: int, **strategies: Any) -> Callable:
    """A property as a test of `few` cases, and a slow one of `many`."""

    def decorate(holds: Callable) -> Callable:
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])
        def test(examples: int) -> None:
            setting = settings(
                max_examples=examples,
                derandomize=True,
                deadline=None,
                database=None,
                suppress_health_check=[HealthCheck.too_slow],
            )
            setting(given(**strategies)(holds))()

        return test

    return decorate


class Call(NamedTuple):
    """Arguments of one attention, and blocks so small that there are many."""

    tensors: Dict[str, Tensor]  # float64: query, key, value, and if there are, mixing, attn_mask, gain, relative's
    options: Dict[str, Any]
    block: int  # scores in one block
    rows: int  # queries in one block, at least

    @property
    def shape(self):
        """B, H, Nq, Nk"""
        return (*self.tensors["query"].shape[:3], self.tensors["key"].shape[2])

    def cast(self, dtype: torch.dtype) -> "Call":
        """In `dtype`; an additive mask stays at least in float32, as the scores."""
        mask_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        kinds = {name: mask_dtype if name == "attn_mask" else dtype for name in self.tensors}
        return self._replace(tensors={name: tensor.to(kinds[name]) for name, tensor in self.tensors.items()})

    def changed(self, options: Optional[Dict[str, Any]] = None, **tensors: Tensor) -> "Call":
        return self._replace(tensors={**self.tensors, **tensors}, options={**self.options, **(options or {})})


@contextmanager
def in_blocks(call: Call):
    with mock.patch.multiple(blockwise, _BLOCK={"cpu": call.block}, _MIN_QUERIES=call.rows):
        yield


def outcome(call: Call, impl: str = "blockwise", run: Callable = attention) -> Dict[str, Tensor]:
    """The output, and the gradient of every tensor for a gradient of the output that depends on the place alone."""
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in call.tensors.items()}
    arguments = {name: tensor for name, tensor in tensors.items() if not name.startswith("relative")}
    if "relative_query" in tensors:
        arguments["relative"] = RelativeScores(tensors["relative_query"], tensors["relative_key"])
    with in_blocks(call):
        out = run(**arguments, **call.options, impl=impl)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
        grads = torch.autograd.grad((out * weight).sum(), list(tensors.values()))
    return {"out": out.detach(), **dict(zip(tensors, grads))}


def assert_equal(found: Dict[str, Tensor], expected: Dict[str, Tensor], **tolerance: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **{"rtol": 1e-8, "atol": 1e-9, **tolerance}, msg=name)


@st.composite
def calls(
    draw: Callable,
    masked: bool = True,
    mixed: Optional[bool] = None,
    relative: bool = True,
    rectangular: bool = True,
    low: bool = True,
) -> Call:
    """
    Args:
        masked: whether keys may be hidden and scores have biases
        mixed: whether heads mix; None for either
        relative: whether distances may matter
        rectangular: whether there may be other numbers of mixed heads than of heads
        low: whether scores may be lowered by 1e8, as fairseq's encoders do, which leaves float32 multiples of 8
    """
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    n_queries, n_keys = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    head_dim, value_dim = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    size = draw(st.sampled_from([0.1, 1.0, 2.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    kinds = {None: [None, "shared", "per query"], True: ["shared", "per query"], False: [None]}
    mixing = draw(st.sampled_from(kinds[mixed]))
    mixed_heads = draw(st.integers(1, 4)) if mixing and rectangular else heads
    tensors = {
        "query": size * random(batch, heads, n_queries, head_dim),
        "key": size * random(batch, heads, n_keys, head_dim),
        "value": random(batch, mixed_heads, n_keys, value_dim),
    }
    if mixing:
        shape = (heads, mixed_heads) if mixing == "shared" else (batch, n_queries, heads, mixed_heads)
        tensors["mixing"] = random(*shape)
    options = {"normalizer": draw(st.sampled_from([*NORMALIZERS])), "causal": masked and draw(st.booleans())}
    if masked and draw(st.booleans()):
        full = (batch, heads, n_queries, n_keys)
        shape = [n if draw(st.booleans()) else 1 for n in full][draw(st.integers(0, 3)) :]
        bias = random(*shape)
        hide = draw(st.sampled_from([0.0, -INF, -1e8] if low else [0.0, -INF]))
        tensors["attn_mask"] = bias.masked_fill(torch.rand(shape, generator=generator) < 0.3, hide) if hide else bias
    if masked and draw(st.booleans()):
        options["key_padding_mask"] = torch.rand(batch, n_keys, generator=generator) < draw(
            st.sampled_from([0.2, 0.6, 1.0])
        )
    if relative and draw(st.booleans()):
        depth = draw(st.integers(1, 3))
        tensors["relative_query"] = random(batch, heads, n_queries, depth)
        tensors["relative_key"] = random(heads, draw(st.sampled_from([n_keys, n_queries + n_keys - 1])), depth)
    if relative and draw(st.booleans()):
        tensors["gain"] = random(heads, n_queries + n_keys - 1)
    return Call(tensors, options, draw(st.sampled_from([1, 32, 256, 2**18])), draw(st.integers(1, 4)))


# ---- implementations -------------------------------------------------------------------------------------------------


@for_all(60, 2000, call=calls())
def test_blockwise_and_auto_are_the_reference(call):
    expected = outcome(call, "reference")
    assert_equal(outcome(call, "blockwise"), expected)
    assert_equal(outcome(call, "auto"), expected)


def eager(query, key, value, *, normalizer, causal, impl, **rest):
    """The formula as one would type it, all of it in the dtype of the inputs."""
    n_queries, n_keys = query.shape[2], key.shape[2]
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    hidden = torch.zeros(n_queries, n_keys, dtype=torch.bool)
    if causal:
        hidden = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(1 + n_keys - n_queries)
    if rest.get("key_padding_mask") is not None:
        hidden = hidden | rest["key_padding_mask"][:, None, None]
    if rest.get("attn_mask") is not None:
        mask = rest["attn_mask"]
        hidden = hidden | (mask == -INF)
        scores = scores + mask.clamp_min(torch.finfo(query.dtype).min).to(query.dtype)
    weights = NORMALIZERS[normalizer].weights(scores.masked_fill(hidden, -INF))
    if rest.get("mixing") is not None:
        mixing = rest["mixing"]
        mixing = mixing.expand(query.shape[0], n_queries, *mixing.shape[-2:])
        weights = (weights.permute(0, 2, 3, 1) @ mixing).permute(0, 3, 1, 2)
    return weights @ value


def steepness(call: Call) -> float:
    """What is made of the rounding of a gradient: the slope of swish-l2 is 1 / |s| where scores are nearly 0."""
    if call.options["normalizer"] != "swish-l2":
        return 1.0
    query, key = (call.tensors[name].double() for name in ("query", "key"))
    scores = (
        query @ key.transpose(2, 3) * query.shape[3] ** -0.5 + call.tensors.get("attn_mask", torch.zeros(())).double()
    )
    return max(1.0, 1 / float(scores.abs().min()))


@for_all(
    40,
    1500,
    call=calls(relative=False, low=False),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    impl=st.sampled_from(["reference", "blockwise", "auto"]),
)
def test_lower_precision_is_at_most_twice_as_wrong_as_the_eager_formula(call, dtype, impl):
    low = call.cast(dtype)
    expected = outcome(low.cast(torch.float64), "reference")
    found, typed = outcome(low, impl), outcome(low, run=eager)
    largest = max(float(value.abs().max()) for value in expected.values())
    # what is too large for the dtype, or for the formula on its way, is the business of test_numbers.py
    assume(largest < torch.finfo(dtype).max / 4 and all(value.isfinite().all() for value in typed.values()))
    # results are rounded to dtype, the exponentials of scores of ten and more to float32
    eps = torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps
    size = (1 + largest) * steepness(low)
    for name, value in expected.items():
        assert found[name].dtype == (dtype if name != "attn_mask" else torch.float32)
        error, eager_error = (float((some[name].double() - value).abs().max()) for some in (found, typed))
        assert error <= 2 * eager_error + 2 * eps * size, name


# ---- what must not matter --------------------------------------------------------------------------------------------


def permuted(call: Call, order: Tensor) -> Call:
    def rows(tensor, name):
        own = tensor.dim() == 4 and tensor.shape[0] > 1 and name not in ("relative_key", "gain")
        return tensor[order] if own else tensor

    tensors = {name: rows(tensor, name) for name, tensor in call.tensors.items()}
    padding = call.options.get("key_padding_mask")
    return call.changed({} if padding is None else {"key_padding_mask": padding[order]}, **tensors)


@for_all(30, 500, call=calls(), seed=st.integers(0, 99))
def test_sentences_in_another_order_have_the_same_outputs_in_that_order(call, seed):
    order = torch.randperm(call.shape[0], generator=torch.Generator().manual_seed(seed))
    found, expected = (attend(some) for some in (permuted(call, order), call))
    torch.testing.assert_close(found, expected[order], rtol=1e-8, atol=1e-9)


def attend(call: Call, **options: Any) -> Tensor:
    return outcome(call.changed(options))["out"]


@for_all(30, 500, call=calls(relative=False), more=st.integers(1, 5), seed=st.integers(0, 99))
def test_padding_after_the_keys_changes_nothing_and_gets_no_gradient(call, more, seed):
    batch, _, _, n_keys = call.shape
    if call.options["causal"]:
        call = call.changed({"causal": False})  # which key is the last one is what causal goes by
    expected = outcome(call)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in ("key", "value"):
        tensor = call.tensors[name]
        garbage = 100 * torch.randn(*tensor.shape[:2], more, tensor.shape[3], generator=generator, dtype=tensor.dtype)
        tensors[name] = torch.cat([tensor, garbage], 2)
    mask = call.tensors.get("attn_mask")
    if mask is not None and mask.shape[-1] > 1:
        tensors["attn_mask"] = torch.nn.functional.pad(mask, [0, more], value=3.0)
    padding = call.options.get("key_padding_mask", torch.zeros(batch, n_keys, dtype=torch.bool))
    padding = torch.nn.functional.pad(padding, [0, more], value=True)
    found = outcome(call.changed({"key_padding_mask": padding}, **tensors))
    for name in ("key", "value"):
        assert (found[name][:, :, n_keys:] == 0).all()
        found[name] = found[name][:, :, :n_keys]
    if "attn_mask" in tensors:
        assert (found["attn_mask"][..., n_keys:] == 0).all()
        found["attn_mask"] = found["attn_mask"][..., :n_keys]
    assert_equal(found, expected)


@for_all(30, 500, call=calls(relative=False), more=st.integers(1, 5), seed=st.integers(0, 99))
def test_the_future_changes_nothing(call, more, seed):
    """More positions behind those there are: what earlier ones give stays."""
    n_queries = call.shape[2]
    call = call.changed({"causal": True})
    generator = torch.Generator().manual_seed(seed)

    def longer(tensor, dim, n):
        shape = list(tensor.shape)
        shape[dim] = n
        return torch.cat([tensor, torch.randn(shape, generator=generator, dtype=tensor.dtype)], dim)

    tensors = {name: longer(call.tensors[name], 2, more) for name in ("query", "key", "value")}
    if "mixing" in call.tensors and call.tensors["mixing"].dim() == 4:
        tensors["mixing"] = longer(call.tensors["mixing"], 1, more)
    if "attn_mask" in call.tensors:
        mask = call.tensors["attn_mask"]
        mask = mask[(None,) * (4 - mask.dim())]
        mask = longer(mask, 3, more) if mask.shape[3] > 1 else mask
        tensors["attn_mask"] = longer(mask, 2, more) if mask.shape[2] > 1 else mask
    options = {}
    if "key_padding_mask" in call.options:
        options["key_padding_mask"] = torch.nn.functional.pad(call.options["key_padding_mask"], [0, more], value=False)
    torch.testing.assert_close(
        attend(call.changed(options, **tensors))[:, :, :n_queries], attend(call), rtol=1e-8, atol=1e-9
    )


@for_all(30, 500, call=calls(relative=False), seed=st.integers(0, 99))
def test_keys_in_another_order_are_the_same_keys(call, seed):
    call = call.changed({"causal": False})
    order = torch.randperm(call.shape[3], generator=torch.Generator().manual_seed(seed))
    tensors = {name: call.tensors[name][:, :, order] for name in ("key", "value")}
    if "attn_mask" in call.tensors and call.tensors["attn_mask"].shape[-1] > 1:
        tensors["attn_mask"] = call.tensors["attn_mask"][..., order]
    padding = call.options.get("key_padding_mask")
    options = {} if padding is None else {"key_padding_mask": padding[:, order]}
    torch.testing.assert_close(attend(call.changed(options, **tensors)), attend(call), rtol=1e-8, atol=1e-9)


@for_all(30, 500, call=calls(), factor=st.sampled_from([-3.0, 0.01, 0.5, 40.0]))
def test_what_the_query_is_multiplied_with_the_key_may_be_divided_by(call, factor):
    scaled = call.changed(query=call.tensors["query"] * factor, key=call.tensors["key"] / factor)
    torch.testing.assert_close(attend(scaled), attend(call), rtol=1e-8, atol=1e-9)
    as_scale = call.changed({"scale": call.tensors["query"].shape[3] ** -0.5 * factor}, key=scaled.tensors["key"])
    torch.testing.assert_close(attend(as_scale), attend(call), rtol=1e-8, atol=1e-9)


# ---- mixing ----------------------------------------------------------------------------------------------------------


@for_all(30, 500, call=calls(mixed=True, rectangular=False), seed=st.integers(0, 99))
def test_mixing_by_a_permutation_matrix_permutes_the_heads(call, seed):
    """The weights of head order[i] act on the values of head i; by query, each query has an order of its own."""
    batch, heads, n_queries, n_keys = call.shape
    generator = torch.Generator().manual_seed(seed)
    mixing = call.tensors["mixing"]
    per_query = mixing.dim() == 4
    sites = batch * n_queries if per_query else 1
    orders = torch.stack([torch.randperm(heads, generator=generator) for _ in range(sites)])  # [places, H]
    matrix = torch.nn.functional.one_hot(orders, heads).double().transpose(1, 2)  # M[j, i] = 1 where j = order[i]
    found = attend(call.changed(mixing=matrix.view_as(mixing)))

    weights = torch.eye(n_keys, dtype=torch.float64).expand(batch, heads, n_keys, n_keys)  # with V = I, O = P
    unmixed = call.changed(value=weights)
    del unmixed.tensors["mixing"]
    weights = attend(unmixed)  # [B, H, Nq, Nk]
    orders = orders.view(batch, n_queries, heads) if per_query else orders.expand(batch, n_queries, heads)
    index = orders.transpose(1, 2)[..., None].expand(-1, -1, -1, n_keys)
    torch.testing.assert_close(found, weights.gather(1, index) @ call.tensors["value"], rtol=1e-8, atol=1e-9)


@for_all(30, 500, call=calls(mixed=True), factor=st.sampled_from([-2.0, 0.0, 0.5]), seed=st.integers(0, 99))
def test_outputs_are_linear_in_the_mixing_and_in_the_values(call, factor, seed):
    generator = torch.Generator().manual_seed(seed)
    for name in ("mixing", "value"):
        one = call.tensors[name]
        other = torch.randn(one.shape, generator=generator, dtype=one.dtype)
        together = attend(call.changed(**{name: one + factor * other}))
        apart = attend(call) + factor * attend(call.changed(**{name: other}))
        torch.testing.assert_close(together, apart, rtol=1e-8, atol=1e-9)


# ---- normalizers -----------------------------------------------------------------------------------------------------


@st.composite
def rows(draw: Callable) -> Tensor:
    """Scores [R, K] of which each row has a visible one, float64"""
    number, keys = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    scores = draw(st.sampled_from([0.01, 1.0, 30.0])) * torch.randn(
        number, keys, generator=generator, dtype=torch.float64
    )
    hidden = torch.rand(number, keys, generator=generator) < draw(st.sampled_from([0.0, 0.5]))
    hidden[:, draw(st.integers(0, keys - 1))] = False
    return scores.masked_fill(hidden, -INF)


def weigh(name: str, scores: Tensor) -> Tensor:
    return NORMALIZERS[name].weights(scores)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-9, atol=1e-12)


# By normalizer, the factor on the weights of a row whose scores all rise by c; None where there is no such law.
SHIFT = {
    "softmax": lambda c: 1.0,
    "sigsoftmax": None,
    "l2": lambda c: 1.0,
    "unnormalized": math.exp,
    "relu2": None,
    "swish-l2": None,
}
# What each key weighs when every key is there r times, as a power of r. So softmax's output stays, l2's grows by r^0.5.
COPIES = {"softmax": -1.0, "sigsoftmax": -1.0, "l2": -0.5, "unnormalized": 0.0, "relu2": -1.0, "swish-l2": -0.5}


def test_the_tables_have_every_normalizer():
    assert SHIFT.keys() == COPIES.keys() == NORMALIZERS.keys()


@for_all(60, 1000, name=st.sampled_from([*NORMALIZERS]), scores=rows(), shift=st.sampled_from([-20.0, -0.7, 3.0, 50.0]))
def test_scores_that_rise_together(name, scores, shift):
    law = SHIFT[name]
    if law is None:  # or it would stand in the table
        scores = torch.tensor([[0.3, 1.1, -INF]], dtype=torch.float64)
        with pytest.raises(AssertionError):
            close(weigh(name, scores + shift), weigh(name, scores))
    else:
        close(weigh(name, scores + shift), weigh(name, scores) * law(shift))


@for_all(60, 1000, name=st.sampled_from([*NORMALIZERS]), scores=rows(), copies=st.integers(2, 4))
def test_keys_that_are_there_several_times(name, scores, copies):
    expected = weigh(name, scores) * copies ** COPIES[name]
    close(weigh(name, scores.repeat(1, copies)), expected.repeat(1, copies))


@for_all(40, 1000, scores=rows())
def test_lengths_and_sums_of_rows(scores):
    visible = (scores > -INF).sum(-1)
    one = torch.ones((), dtype=torch.float64)
    for name in ("softmax", "sigsoftmax"):
        weights = weigh(name, scores)
        close(weights.sum(-1), one)
        assert (weights >= 0).all()
    for name in ("l2", "swish-l2"):
        close(weigh(name, scores).square().sum(-1), one)
    sums = weigh("l2", scores).sum(-1)  # the least for one key that takes all, the most for equal keys
    assert ((sums >= 1 - 1e-12) & (sums <= visible.double().sqrt() + 1e-12)).all()


@for_all(40, 1000, scores=rows(), factor=st.sampled_from([0.25, 3.0]))
def test_scaling_laws(scores, factor):
    """l2's squares are the softmax of twice the scores; l2 is softmax made as long as 1; relu2 goes with the square of
    the scores' scale; and l2 of equal scores weighs each of n keys n^-0.5, whatever the scores."""
    softmax = weigh("softmax", scores)
    close(weigh("l2", scores).square(), weigh("softmax", 2 * scores))
    close(weigh("l2", scores), softmax / torch.linalg.vector_norm(softmax, dim=-1, keepdim=True))
    close(weigh("relu2", factor * scores), factor**2 * weigh("relu2", scores))
    equal = torch.where(scores > -INF, torch.full_like(scores, factor), scores)
    visible = (scores > -INF).sum(-1, keepdim=True)
    close(weigh("l2", equal), (scores > -INF) * visible.double() ** -0.5)


@for_all(30, 500, call=calls(mixed=False, relative=False), name=st.sampled_from(["softmax", "sigsoftmax"]))
def test_outputs_are_means_of_values(call, name):
    """Without mixing, a query that sees a key stays within the values of the keys."""
    found = attend(call.changed({"normalizer": name}))
    value = call.tensors["value"]
    low, high = (extreme(value, 2, keepdim=True) for extreme in (torch.amin, torch.amax))
    ones = attend(call.changed({"normalizer": name}, value=torch.ones_like(value)))
    close(ones * (ones > 0.5), (ones > 0.5).double())  # 1, or 0 for a query that sees none
    inside = (found >= low - 1e-9) & (found <= high + 1e-9)
    assert (inside | (ones < 0.5)).all() and (found[ones < 0.5] == 0).all()


@for_all(20, 300, call=calls(relative=False, masked=False), seed=st.integers(0, 99))
def test_a_vector_added_to_all_keys_does_not_matter_to_softmax_and_l2(call, seed):
    """It adds the same to all scores of a query; why a bias of k_proj learns nothing under softmax."""
    key = call.tensors["key"]
    generator = torch.Generator().manual_seed(seed)
    moved = key + torch.randn(*key.shape[:2], 1, key.shape[3], generator=generator, dtype=key.dtype)
    for name in ("softmax", "l2"):
        one, other = (attend(call.changed({"normalizer": name}, key=k)) for k in (key, moved))
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


# ---- whole models ----------------------------------------------------------------------------------------------------

KINDS = ["transformer", "transformer_lm", "roberta_base", "bert_base", "synthesizer_lm", "transformer_xl"]


class Built(NamedTuple):
    kind: str
    model: torch.nn.Module
    tokens: Tensor  # [B, N], padded on the right; where there is an encoder and a decoder, the latter's
    source: Tensor  # [B, N], the encoder's

    def logits(self, tokens: Optional[Tensor] = None, source: Optional[Tensor] = None) -> Tensor:
        """[B, N, V]"""
        tokens, source = (own if new is None else new for own, new in ((self.tokens, tokens), (self.source, source)))
        with torch.no_grad():
            if self.kind == "transformer":
                return self.model(source, source.ne(PAD).sum(1), tokens)[0]
            if self.kind == "transformer_xl":
                return self.model.get_normalized_probs(self.model(tokens, window=0), log_probs=True)  # no memory
            return self.model(tokens)[0]


@st.composite
def models(draw: Callable, kinds: Any = tuple(KINDS), padded: bool = True) -> Built:
    kind, seed = draw(st.sampled_from(kinds)), draw(st.integers(0, 2**20))
    flags = {
        "attention_normalizer": draw(st.sampled_from([*NORMALIZERS])),
        "head_mixing": draw(st.sampled_from([*HEAD_MIXINGS])),
        "attention_impl": draw(st.sampled_from(["auto", "blockwise", "reference"])),
        "head_dim": draw(st.sampled_from([None, 6])) if kind != "transformer_xl" else None,
    }
    family = draw(st.sampled_from([*FAMILIES]))
    if family == "fixhead":
        flags["head_dim"] = flags["head_dim"] or 6
    if kind == "synthesizer_lm":
        flags["synthesizer"] = draw(st.sampled_from([*SYNTHESIZERS]))
    elif kind != "transformer_xl":
        flags["relative_position"] = draw(st.sampled_from(["none", "t5", "rotary"]))
        flags["relative_gain"] = draw(st.sampled_from([0, 3]))
    if flags["head_dim"] is None:
        del flags["head_dim"]
    make = build_xl if kind == "transformer_xl" else build
    model = shake(make(f"{family}_{kind}", seed=seed % 5, **flags)).eval()
    torch.manual_seed(seed)
    batch, length = draw(st.integers(1, 4)), draw(st.integers(2, 8))
    padded = padded and kind != "transformer_xl"  # whose rows are one text
    texts = [tokens(batch, max(n, batch + 1) if padded else n, padded) for n in (length, draw(st.integers(1, 8)))]
    if kind == "bert_base":
        texts[0][:, 1] = texts[0][:, 1].where(texts[0][:, 1] == PAD, EOS)  # ends the first of two
    return Built(kind, model, *texts)


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@for_all(30, 300, built=models(), seed=st.integers(0, 99))
def test_a_model_does_not_mind_the_order_of_sentences(built, seed):
    order = torch.randperm(len(built.tokens), generator=torch.Generator().manual_seed(seed))
    assert_same_logits(built.logits(built.tokens[order], built.source[order]), built.logits()[order])


@for_all(30, 300, built=models([k for k in KINDS if k != "transformer_xl"]), more=st.integers(1, 4), left=st.booleans())
def test_a_model_does_not_mind_more_padding(built, more, left):
    """On either side of the sources of a translation, which fairseq pads on the left; on the right of all else."""
    longer = torch.nn.functional.pad(built.tokens, [0, more], value=PAD)
    source = torch.nn.functional.pad(built.source, [more * left, more * (1 - left)], value=PAD)
    real = built.tokens.ne(PAD)
    found = built.logits(longer, source)[:, : built.tokens.shape[1]]
    assert_same_logits(found[real], built.logits()[real])


@for_all(
    30,
    300,
    built=models(["transformer", "transformer_lm", "synthesizer_lm", "transformer_xl"], padded=False),
    more=st.integers(1, 4),
)
def test_a_decoder_does_not_see_the_future(built, more):
    longer = torch.cat([built.tokens, tokens(len(built.tokens), more)], 1)
    assert_same_logits(built.logits(longer)[:, : built.tokens.shape[1]], built.logits())
