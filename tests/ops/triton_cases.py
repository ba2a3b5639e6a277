"""Build calls of the fused kernels and compare them with the formula.

The kernels are interpreted on a CPU and compiled on a GPU.

This file must be the first that imports the kernels, so tests import their modules from here.
"""

import importlib.util
import math
import os
import sys

import pytest
import torch
import torch.utils._device

from mixhead_plugin.ops import NORMALIZERS, attention
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.triton import support

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    if "mixhead_plugin.ops.triton.rows" in sys.modules:
        raise RuntimeError(
            "the kernels were imported before TRITON_INTERPRET was set, so they cannot be "
            "interpreted"
        )
    os.environ["TRITON_INTERPRET"] = "1"

from mixhead_plugin.ops.triton import (  # noqa: E402
    calls,  # noqa: F401
    masks,  # noqa: F401
    operators,  # noqa: F401  (registers the operators of torch)
    passes,  # noqa: F401
    programs,  # noqa: F401
    rows,  # noqa: F401
    tuning,
    verify,  # noqa: F401
)
from mixhead_plugin.ops.triton.tuning import Tile  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)  # other tests start processes

INF = float("inf")
B, H, NQ, NK, D, DV = 2, 3, 19, 37, 12, 20
DEVICE = "cuda" if ON_GPU else "cpu"
MIXED = ["per query", "shared"]
MIXINGS = [None, *MIXED]
SINKS = [f"{name}, sink" for name in support.KERNEL_NORMALIZERS if NORMALIZERS[name].takes_sink]
TABLES = tuning.tiles_for
# of the kernels that mix
TILES = [Tile(16, 32, 4, 1), Tile(16, 16, 4, 1), Tile(32, 16, 4, 1), Tile(64, 128, 4, 2)]


def use_tiles(monkeypatch, flash, mixed):
    """Let every kernel of a family use one tile."""
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(
        tuning, "tiles_for", lambda kernel, *size: [flash if "flash" in kernel else mixed]
    )


def use_few_large_tiles(monkeypatch):
    """Use fewer and larger tiles than tuning.py.

    The interpreter takes its time by operation.
    """
    use_tiles(monkeypatch, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))


def interpret(monkeypatch):
    """Interpret the kernels, and mend bfloat16.

    The interpreter multiplies bfloat16 as integers and truncates.
    """
    import numpy as np
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot = InterpreterBuilder.create_dot
    cast = InterpreterBuilder.cast_impl

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self, source, to):
        if source.dtype.scalar != tl.float32 or to.scalar != tl.bfloat16:
            return cast(self, source, to)
        bits = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return TensorHandle(bits.numpy().view(np.uint16), tl.bfloat16)

    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda s, a, b, *rest: dot(s, widened(a), widened(b), *rest),
    )
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounded)
    monkeypatch.setattr(support, "INTERPRETED_DTYPES", support.DTYPES)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def fill_unwritten_memory_with_nan(monkeypatch):
    # torch keeps this list of functions from its first call on; it must not hold the ones from
    # below.
    torch.utils._device._device_constructors()

    def poisoned(function):
        def make(*arguments, **options):
            made = function(*arguments, **options)
            return (
                made.fill_(float("nan"))
                if made.is_floating_point() and made.device.type != "meta"
                else made
            )

        return make

    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(place, name, poisoned(getattr(place, name)))


def inputs(
    mixed=None,
    dtype=torch.float32,
    batch=B,
    heads=H,
    n_queries=NQ,
    n_keys=NK,
    head_dim=D,
    value_dim=DV,
    sink=False,
):
    # as fairseq's projections leave them
    q = torch.randn(n_queries, batch, heads, head_dim).permute(1, 2, 0, 3)
    k = torch.randn(batch, heads, head_dim, n_keys).transpose(2, 3)
    v = torch.randn(batch, n_keys, heads, value_dim).transpose(1, 2)
    tensors = {"query": q, "key": k, "value": v}
    if mixed == "shared":
        tensors["mixing"] = torch.eye(heads) + torch.randn(heads, heads) / max(heads, 1)
    elif mixed == "per query":
        mixing = torch.eye(heads) + torch.randn(n_queries, batch, heads, heads) / max(heads, 1)
        tensors["mixing"] = mixing.transpose(0, 1)
    if sink:
        tensors["sink"] = torch.randn(heads)
    return {name: tensor.to(DEVICE, dtype).requires_grad_() for name, tensor in tensors.items()}


def detached(tensors):
    return {name: tensor.detach() for name, tensor in tensors.items()}


def record(tensors, **options):
    return AttentionInputs(**{"scale": 0.5, **tensors, **options})


def padding(n_keys=NK, batch=B):
    mask = torch.zeros(batch, n_keys, dtype=torch.bool, device=DEVICE)
    mask[0, n_keys // 2 :] = True
    mask[-1, 0] = mask[-1, n_keys // 3] = True
    return mask


def a_sentence_of_nothing(n_keys=NK):
    return padding(n_keys) | torch.tensor([[True], [False]], device=DEVICE)


def future(n_queries=NQ, n_keys=NK):
    return torch.full((n_queries, n_keys), -INF, device=DEVICE).triu(1 + n_keys - n_queries)


def holes(*shape):
    bias = torch.randn(shape, device=DEVICE)
    bias[..., 3] = -INF
    bias[..., 2, :] = -INF  # a query that sees nothing
    return bias


def formula(
    query,
    key,
    value,
    mixing=None,
    sink=None,
    *,
    normalizer,
    causal=False,
    attn_mask=None,
    key_padding_mask=None,
):
    """Compute the attention as one would write it, in the dtype of its inputs."""
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    hidden = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
    if attn_mask is not None:
        hidden |= attn_mask == -INF
        scores = scores + attn_mask.to(scores.dtype).masked_fill(attn_mask == -INF, 0)
    if causal:
        hidden |= future(*scores.shape[2:]) == -INF
    if key_padding_mask is not None:
        hidden |= key_padding_mask[:, None, None]
    scores = scores.masked_fill(hidden, -INF)
    if sink is not None:
        column = sink.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = NORMALIZERS[normalizer].weights(scores)[..., : key.shape[2]]
    if mixing is not None:
        batch, heads, n_queries, _ = scores.shape
        mixing = mixing.expand(batch, n_queries, heads, heads)
        weights = (weights.permute(0, 2, 3, 1) @ mixing.to(weights.dtype)).permute(0, 3, 1, 2)
    return weights @ value


def by_kernels(**arguments):
    return attention(**arguments, impl="triton")


def reference(**arguments):
    return attention(**arguments, impl="reference")


def with_gradients(function, tensors, **options):
    """Return the output and the gradient of every tensor.

    All functions get the same gradient of the output.
    """
    out = function(**tensors, **options)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(
        out.device, out.dtype
    )
    return [out.detach(), *torch.autograd.grad(out, list(tensors.values()), d_out)]


def in_float64(tensors):
    return {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}


def must_be_right(tensors, **options):
    exact = with_gradients(reference, in_float64(tensors), **options)
    must_agree(
        tensors,
        with_gradients(by_kernels, tensors, **options),
        with_gradients(formula, tensors, **options),
        exact,
    )


def must_agree(names, got, by_formula, exact):
    """Allow twice the error of the formula in the same dtype, and the rounding of sums in float32.

    The error is a root mean square; the largest, of which few numbers decide, may be four times as
    large. The ratio of two errors of a few numbers is itself a random one: see `accuracy.shares`.
    """
    largest = max(right.abs().max() for right in exact)
    for name, value, rounded, right in zip(["output", *names], got, by_formula, exact, strict=True):
        # the only key of a row has no gradient: what is left of one is rounding
        size = right.abs().max() if right.any() else largest
        # by how much more the ratio of errors of a few numbers may be; 1 from 103 numbers on
        few = max(1.0, math.exp(7 / max(right.numel(), 1) ** 0.5) / 2)
        for times, norm in (
            (2, lambda errors: errors.square().mean().sqrt()),
            (4, lambda errors: errors.abs().max()),
        ):
            allowed = (
                few * times * norm(rounded - right) + 4 * torch.finfo(torch.float32).eps * size
            )
            error = norm(value - right)
            assert error <= allowed, f"{name} is wrong by {error:.2g}, {allowed:.2g} is allowed"


def synchronize():
    """Let a kernel that fails fail here, not in what comes after it."""
    if ON_GPU:
        torch.cuda.synchronize()


def kept_weights(p, query, key, mixing=None):
    """Return which weights dropout keeps: with V the identity, the output is the weights."""
    found = []
    for columns in torch.eye(key.shape[2], device=DEVICE, dtype=key.dtype).split(128, 1):
        torch.manual_seed(5)
        value = columns.expand(*key.shape[:2], -1, -1)
        found.append(by_kernels(query=query, key=key, value=value, mixing=mixing, dropout_p=p) != 0)
    return torch.cat(found, 3)


def must_be_right_with_dropout(tensors, normalizer, p):
    """Compare with the formula, which drops what the kernels drop.

    What is dropped depends on the seed and the place alone.
    """
    kept = kept_weights(p, torch.zeros_like(tensors["query"]), torch.zeros_like(tensors["key"]))

    def dropped(query, key, value, mixing=None, sink=None):
        n_keys = key.shape[2]
        identity = torch.eye(n_keys, dtype=key.dtype, device=DEVICE).expand(
            *key.shape[:2], n_keys, n_keys
        )
        return (
            formula(query, key, identity, mixing, sink, normalizer=normalizer) * kept / (1 - p)
        ) @ value

    synchronize()
    exact = with_gradients(dropped, in_float64(tensors))
    synchronize()
    torch.manual_seed(5)
    got = with_gradients(by_kernels, tensors, normalizer=normalizer, dropout_p=p)
    must_agree(tensors, got, with_gradients(dropped, tensors), exact)
