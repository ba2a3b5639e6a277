"""What `ops.attention` refuses: each wrong argument in one line that names it."""

import pytest
import torch

from mixhead_plugin.ops import IMPLEMENTATIONS, NORMALIZERS, LowRank, RelativeScores, attention
from tests.ops import calls
from tests.ops.calls import NK, NQ, B, D, H, tensors

FLOAT = "must be float16, bfloat16, float32 or float64"


WRONG = {
    "normalizer": (
        dict(normalizer="max"),
        ValueError,
        f"normalizer 'max': must be one of {', '.join(NORMALIZERS)}",
    ),
    "impl": (
        dict(impl="fast"),
        ValueError,
        f"impl 'fast': must be one of auto, {', '.join(IMPLEMENTATIONS)}",
    ),
    "dropout_p": (dict(dropout_p=1.5), ValueError, "dropout_p 1.5: must be a probability"),
    "scale": (
        dict(scale=torch.tensor(0.5)),
        ValueError,
        "scale 0.5: must be a float, not a tensor",
    ),
    "query": (
        dict(query=torch.zeros(2, 3).double()),
        ValueError,
        "query [2, 3]: must be [batch, heads, positions, head size]",
    ),
    "query that is no tensor": (
        dict(query=[[1.0]]),
        TypeError,
        "query is list: must be a tensor",
    ),
    "score_mixing of factors": (
        dict(score_mixing=LowRank(torch.eye(H), torch.eye(H), torch.ones(H))),
        TypeError,
        "score_mixing is LowRank: must be a tensor",
    ),
    "query of integers": (
        dict(query=torch.zeros(B, H, NQ, D, dtype=torch.long)),
        TypeError,
        f"query is torch.int64: {FLOAT}",
    ),
    "key of another dtype": (
        dict(key=torch.zeros(B, H, NK, D)),
        TypeError,
        "key is torch.float32: must be torch.float64, as the query",
    ),
    "key": (
        dict(key=torch.zeros(B, H, NK, D + 1).double()),
        ValueError,
        "key [3, 4, 14, 6]: must be [3, 4, 14, 5]",
    ),
    "value": (
        dict(value=torch.zeros(B, H, NK + 1, D).double()),
        ValueError,
        "value [3, 4, 15, 5]: must be [3, 4, 14, 5]",
    ),
    "value of other heads": (
        dict(value=torch.zeros(B, H - 1, NK, D).double()),
        ValueError,
        "value [3, 3, 14, 5]: must be [3, 4, 14, 5]",
    ),
    "mixing": (
        dict(mixing=torch.zeros(H, H + 1).double()),
        ValueError,
        "mixing [4, 5]: must be [4, 4] or [3, 11, 4, 4]",
    ),
    "mixing elsewhere": (
        dict(mixing=torch.zeros(H, H, device="meta").double()),
        ValueError,
        "mixing is on meta: must be on cpu, as the query",
    ),
    "attn_mask of bools": (
        dict(attn_mask=torch.zeros(NQ, NK, dtype=torch.bool)),
        TypeError,
        f"attn_mask is torch.bool: {FLOAT}, which is added; -inf hides a key",
    ),
    "attn_mask": (
        dict(attn_mask=torch.zeros(NQ, NK + 1)),
        ValueError,
        "attn_mask [11, 15]: must be broadcastable to [3, 4, 11, 14]",
    ),
    "key_padding_mask of floats": (
        dict(key_padding_mask=torch.zeros(B, NK)),
        TypeError,
        "key_padding_mask is torch.float32: must be bool, True hides a key",
    ),
    "key_padding_mask": (
        dict(key_padding_mask=torch.zeros(B, NQ).bool()),
        ValueError,
        "key_padding_mask [3, 11]: must be [3, 14]",
    ),
    "score_mixing": (
        dict(score_mixing=torch.zeros(H, H + 1).double()),
        ValueError,
        "score_mixing [4, 5]: must be [4, 4] or [3, 11, 4, 4]",
    ),
    "sink of other heads": (
        dict(sink=torch.zeros(H + 1).double()),
        ValueError,
        "sink [5]: must be [4]",
    ),
    "sink without a denominator": (
        dict(sink=torch.zeros(H).double(), normalizer="relu2"),
        ValueError,
        "sink: needs one of the normalizers softmax, sigsoftmax, l2, entmax15, not relu2",
    ),
    "query of float8": (
        dict(query=torch.zeros(B, H, NQ, D).to(torch.float8_e4m3fn)),
        TypeError,
        f"query is torch.float8_e4m3fn: {FLOAT}",
    ),
    "mixing of float8": (
        dict(mixing=torch.zeros(H, H).to(torch.float8_e4m3fn)),
        TypeError,
        f"mixing is torch.float8_e4m3fn: {FLOAT}",
    ),
    "attn_mask of float8": (
        dict(attn_mask=torch.zeros(NQ, NK).to(torch.float8_e4m3fn)),
        TypeError,
        f"attn_mask is torch.float8_e4m3fn: {FLOAT}, which is added; -inf hides a key",
    ),
    "attn_mask elsewhere": (
        dict(attn_mask=torch.zeros(NQ, NK, device="meta")),
        ValueError,
        "attn_mask is on meta: must be on cpu, as the query",
    ),
    "key_padding_mask elsewhere": (
        dict(key_padding_mask=torch.zeros(B, NK, device="meta").bool()),
        ValueError,
        "key_padding_mask is on meta: must be on cpu, as the query",
    ),
    "query that is nested": (
        dict(query=torch.nested.nested_tensor([torch.zeros(H, n, D) for n in (2, 3, 4)])),
        TypeError,
        "query is a nested tensor: must be padded, with key_padding_mask for what is no key",
    ),
    "key of sparse layout": (
        dict(key=torch.zeros(B, H, NK, D).double().to_sparse()),
        TypeError,
        "key is torch.sparse_coo: must be dense, as by to_dense()",
    ),
    "gain of integers": (
        dict(gain=torch.zeros(H, NQ + NK - 1, dtype=torch.long)),
        TypeError,
        f"gain is torch.int64: {FLOAT}",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_in_one_line(case):
    arguments, kind, message = WRONG[case]
    with pytest.raises(kind) as error:
        calls.run({**tensors(), **arguments})
    assert str(error.value) == message


FACTORS = {"left": (B, NQ, H, 2), "right": (B, NQ, H, 2), "diagonal": (B, NQ, H)}


WRONG_FACTORS = {
    "mixing is tuple: must be a tensor or ops.LowRank(left, right, diagonal)": lambda f: tuple(f),
    "mixing.diagonal is NoneType: must be a tensor": lambda f: f._replace(diagonal=None),
    "mixing.right [3, 11, 4, 1]: must be [3, 11, 4, 2]": (
        lambda f: f._replace(right=f.right[..., :1])
    ),
    "mixing.left [3, 1, 4, 2]: must be [3, 11, 4, 2]": lambda f: f._replace(left=f.left[:, :1]),
    "mixing.left []: must be [3, 11, 4, 1]": lambda f: f._replace(left=torch.tensor(1.0)),
    "mixing.diagonal [3, 11, 4, 2]: must be [3, 11, 4]": lambda f: f._replace(diagonal=f.left),
    f"mixing.left is torch.int64: {FLOAT}": lambda f: f._replace(left=f.left.long()),
}


@pytest.mark.parametrize("message", WRONG_FACTORS)
def test_factors_that_do_not_fit_are_refused_in_one_line(message):
    factors = LowRank(*(torch.zeros(FACTORS[name]) for name in LowRank._fields))
    with pytest.raises((TypeError, ValueError)) as error:
        attention(**tensors(), mixing=WRONG_FACTORS[message](factors))
    assert str(error.value) == message


def test_a_pair_that_names_neither_relative_tensor_is_refused():
    pair = torch.zeros(B, H, NQ, 1).double(), torch.zeros(H, NK, 1).double()
    with pytest.raises(
        TypeError, match=r"^relative is tuple: must be ops.RelativeScores\(query, key\)$"
    ):
        attention(**tensors(), relative=pair)


@pytest.mark.parametrize("missing", RelativeScores._fields)
def test_relative_scores_without_one_of_their_tensors_are_refused(missing):
    pair = RelativeScores(torch.zeros(B, H, NQ, 1).double(), torch.zeros(H, NK, 1).double())
    with pytest.raises(TypeError, match=rf"^relative.{missing} is NoneType: must be a tensor$"):
        attention(**tensors(), relative=pair._replace(**{missing: None}))


P = NQ + NK - 1


BY_DISTANCE = {
    "gain": f"[{H}, {P}]",
    "relative_query": f"[{B}, {H}, {NQ}, 2]",
    "relative_key": f"[{H}, {P}, 2] or [{H}, {NK}, 2]",
}


CUTS = {
    "the last dimension is shorter": lambda t: t[..., :-1],
    "the second dimension is shorter": lambda t: t[:, :-1],
    "the first dimension is shorter": lambda t: t[:-1],
    "a dimension is missing": lambda t: t[0],
}


def test_a_relative_query_without_dimensions_is_refused():
    pair = RelativeScores(torch.ones(()).double(), torch.zeros(H, NK, 1).double())
    with pytest.raises(ValueError) as error:
        attention(**tensors(), relative=pair)
    assert str(error.value) == f"relative.query []: must be [{B}, {H}, {NQ}, 1]"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", BY_DISTANCE)
def test_shapes_by_distance_that_do_not_fit_are_refused(name, cut):
    given = tensors(distances="past and gain")
    given[name] = CUTS[cut](given[name])
    shown = name.replace("_", ".")
    message = f"{shown} {list(given[name].shape)}: must be {BY_DISTANCE[name]}"
    if name == "relative_query" and cut == "the last dimension is shorter":
        # The size of relative scores is that of their queries.
        message = f"relative.key [{H}, {NK}, 2]: must be [{H}, {P}, 1] or [{H}, {NK}, 1]"
    with pytest.raises(ValueError) as error:
        calls.run(given)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["relative_query", "relative_key"])
def test_relative_scores_of_another_dtype_are_refused(name):
    given = tensors(distances="past and gain")
    given[name] = given[name].float()
    with pytest.raises(TypeError) as error:
        calls.run(given)
    shown = name.replace("_", ".")
    assert str(error.value) == f"{shown} is torch.float32: must be torch.float64, as the query"
