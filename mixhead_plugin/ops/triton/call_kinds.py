"""Group calls of attention by the compiled kernels that serve them.

Triton looks at a few more properties, so it may compile a kernel anew for calls of the same kind:
whether addresses, and the strides of the mask, are multiples of 16, and whether there is a single
key.
"""

import torch
from torch import Tensor

from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.sample_calls import CallKind, layout_of


def call_kind(inputs: AttentionInputs) -> CallKind:
    """Return the kind of a call which has no `call_problem`."""
    inputs = _with_shape_of_matrix(inputs)
    query, key, value, mixing = inputs[:4]
    heads = int(query.shape[1])
    mixed_heads = int(value.shape[1])
    kind = CallKind(
        normalizer=inputs.normalizer,
        heads=heads,
        head_dim=int(query.shape[3]),
        value_dim=int(value.shape[3]),
        dtype=query.dtype,
        device=query.device,
        sink=inputs.sink is not None,
        causal=inputs.causal,
        padding=inputs.key_padding_mask is not None,
        dropout=inputs.dropout_p > 0,
        layouts=(layout_of(query), layout_of(key), layout_of(value)),
    )
    if mixing is not None:
        layouts = (*kind.layouts, layout_of(mixing))
        kind = kind._replace(mixing_dtype=mixing.dtype, mixing_dim=mixing.dim(), layouts=layouts)
    if mixed_heads != heads:
        kind = kind._replace(mixed_heads=mixed_heads)
    if inputs.score_mixing is not None:
        kind = kind._replace(score_mixing_dim=inputs.score_mixing.dim())
    if inputs.attn_mask is not None:
        mask = inputs.attn_mask
        kind = kind._replace(mask_dtype=mask.dtype, mask_by=_differs_by(mask))
    return kind


def _with_shape_of_matrix(inputs: AttentionInputs) -> AttentionInputs:
    """Return a call with M in place of its factors, as kernels get it; this M has only a shape."""
    factors = inputs.factors()
    if factors is None:
        return inputs
    batch, n_queries, heads, _ = factors.left.shape
    # Contiguous, as `LowRank.matrix` returns it.
    shape = (batch, n_queries, heads, heads)
    return inputs.with_mixing(torch.empty(shape, dtype=factors.matrix_dtype(), device="meta"))


def _differs_by(mask: Tensor) -> str:
    """Return the `mask_by` of a mask with up to four dimensions, [B, H, Nq, Nk]."""
    # An expanded dimension has one row in memory, whatever its size.
    sizes = []
    for size, stride in zip(mask.shape, mask.stride()):
        sizes.append(1 if stride == 0 else size)
    missing = [1] * (4 - len(sizes))
    batch, heads, n_queries, n_keys = missing + sizes
    if heads > 1:
        return "head"
    if batch > 1 or n_queries == 1 or n_keys == 1:
        return "sentence"
    return ""
