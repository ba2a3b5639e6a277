"""Draw random calls of the attention, and compare their outputs and gradients."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from mixhead_plugin.ops import NORMALIZERS, LowRank, RelativeScores, attention
from mixhead_plugin.ops.blockwise import block_backward, masks, plan, products
from tests.ops.definitions import INF

B, H, NQ, NK, D, DV, R = 3, 4, 11, 14, 5, 3, 2

MIXINGS = ["none", "shared", "per query", "factors"]
RANK = 3  # of factors
# "tall" and "wide" matrices mix into fewer and into more heads.
SHAPES = {
    "shared": lambda b, n: (H, H),
    "per query": lambda b, n: (b, n, H, H),
    "tall": lambda b, n: (H, H - 1),
    "wide, per query": lambda b, n: (b, n, H, H + 3),
}


def factors(batch, n_queries, heads=H, rank=RANK):
    """Return the shapes of the factors of a low-rank M."""
    factor = (batch, n_queries, heads, rank)
    return {"mixing_left": factor, "mixing_right": factor, "mixing_diagonal": factor[:3]}


DISTANCES = [
    "none",
    "past",
    "all",
    "past and gain",
    "scores shared",
    "past and gain, scores per query",
]
FEW = ["none", "past and gain", "past and gain, scores per query"]  # of DISTANCES
SINKS = [f"{name}, sink" for name, entry in NORMALIZERS.items() if entry.takes_sink]


def tensors(
    mixing="none",
    distances="none",
    dtype=torch.float64,
    n_queries=NQ,
    n_keys=NK,
    batch=B,
    value_dim=DV,
    normalizer="",
):
    """Return the tensors of a call by name, relative scores as two.

    There is a sink for a normalizer of SINKS.
    """
    all_distances = max(0, n_queries + n_keys - 1)
    shapes = {"query": (batch, H, n_queries, D), "key": (batch, H, n_keys, D)}
    heads = H
    if mixing == "factors":
        shapes |= factors(batch, n_queries)
    elif mixing != "none":
        shapes["mixing"] = SHAPES[mixing](batch, n_queries)
        heads = shapes["mixing"][-1]
    if "past" in distances or distances == "all":
        known = n_keys if "past" in distances else all_distances
        shapes["relative_query"] = (batch, H, n_queries, R)
        shapes["relative_key"] = (H, known, R)
    if "gain" in distances:
        shapes["gain"] = (H, all_distances)
    if "scores" in distances:
        _, scores = distances.split("scores ")
        shapes["score_mixing"] = SHAPES[scores](batch, n_queries)
    if normalizer in SINKS:
        shapes["sink"] = (H,)

    found = {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}
    # the memory order of fairseq's projections
    found["query"] = torch.randn(n_queries, batch, H, D, dtype=dtype).permute(1, 2, 0, 3)
    found["value"] = torch.randn(batch, n_keys, heads, value_dim, dtype=dtype).transpose(1, 2)
    return found


def packed(tensors):
    """Return the tensors of a call as the arguments of `ops.attention`."""
    apart = ("relative_", "mixing_")
    arguments = {name: t for name, t in tensors.items() if not name.startswith(apart)}
    if "relative_query" in tensors:
        arguments["relative"] = RelativeScores(tensors["relative_query"], tensors["relative_key"])
    if "mixing_left" in tensors:
        arguments["mixing"] = LowRank(*(tensors[f"mixing_{name}"] for name in LowRank._fields))
    return arguments


def run(tensors, function=attention, **options):
    """Call `function` with tensors of `tensors()`, and options of `attention`."""
    arguments = packed(tensors)
    if options.get("normalizer") in SINKS:
        options["normalizer"] = options["normalizer"].removesuffix(", sink")
    return function(**arguments, **options)


def outcome(tensors, function=attention, **options):
    """Return the output and the gradient of every tensor.

    The gradient of the output differs at every place.
    """
    tensors = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    out = run(tensors, function, **options)
    # in float64, because steps between many places are too small for half precision
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device)
    weight = weight.view(out.shape).to(out.dtype)
    grads = torch.autograd.grad((out * weight).sum(), list(tensors.values()))
    return {"out": out.detach(), **dict(zip(tensors, grads))}


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@contextmanager
def blocks(threads, scores, queries=2):
    """Cut calls into blocks of at most `scores` scores, and run them in `threads` threads."""
    sizes = {
        "BLOCK_SIZE_CPU": scores,
        "MIN_QUERIES": queries,
        "MANY_QUERIES": queries,
        "LARGER": 1,
    }
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(plan, **sizes))
            # products of either order, wide and narrow spans
            for module in (block_backward, masks, products):
                stack.enter_context(mock.patch.object(module, "NARROW", 4))
            # small blocks take one way to the gradients of factors, large ones the other
            few = 0 if scores < 2**8 else 16
            stack.enter_context(mock.patch.object(block_backward, "FEW_HEADS", few))
            yield
    finally:
        torch.set_num_threads(before)


def padding(*spans, n_keys=NK):
    """Return a mask in which each sentence sees the keys of its span."""
    mask = torch.ones(len(spans), n_keys, dtype=torch.bool)
    for row, (start, stop) in zip(mask, spans):
        row[start:stop] = False
    return mask


def future(n_queries=NQ, n_keys=NK):
    return torch.full((n_queries, n_keys), -INF).triu(1 + n_keys - n_queries)


def hole():
    mask = padding((0, NK), (2, NK), (0, NK - 1))
    mask[1, 5:7] = True
    return mask


def window():
    """Return a mask in which a query sees some keys before it, and none behind it."""
    too_far_back = future(NK, NQ).t().flip(0, 1)
    return future() + too_far_back


def third_keys_hidden():
    return torch.randn(NK).masked_fill(torch.arange(NK) % 3 == 0, -INF)


# Functions, because what they draw must not depend on the tests before.
MASKS = {
    "none": dict,
    "causal": lambda: {"causal": True},
    "padded at the end": lambda: {"key_padding_mask": padding((0, NK), (0, 3), (0, NK - 2))},
    "padded at the start, causal": lambda: {
        "key_padding_mask": padding((6, NK), (NK - 1, NK), (0, NK)),
        "causal": True,
    },
    "a sentence of nothing": lambda: {"key_padding_mask": padding((0, NK), (0, 0), (0, 1))},
    "padded in the middle": lambda: {"key_padding_mask": hole()},
    "causal as a tensor": lambda: {"attn_mask": future()},
    "nothing visible": lambda: {"attn_mask": torch.full((NQ, NK), -INF)},
    "a window": lambda: {"attn_mask": window()},
    "a number": lambda: {"attn_mask": torch.tensor(0.5)},
    "bias by key": lambda: {"attn_mask": third_keys_hidden()},
    "bias by query": lambda: {"attn_mask": torch.randn(NQ, 1)},
    "bias by head": lambda: {"attn_mask": torch.randn(H, NQ, NK), "causal": True},
    "bias by sentence": lambda: {
        "attn_mask": torch.randn(B, 1, NQ, NK),
        "key_padding_mask": hole(),
    },
    "bias in half precision": lambda: {"attn_mask": torch.randn(NQ, NK).half(), "causal": True},
}
