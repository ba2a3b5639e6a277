"""The public function `attention`: check the arguments, choose an implementation, call it."""

from typing import Callable, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from mixhead_plugin.ops import fused, triton
from mixhead_plugin.ops.blockwise import blockwise_attention
from mixhead_plugin.ops.blockwise.plan import block_size
from mixhead_plugin.ops.forward_mode import in_forward_mode
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.reference import reference_attention, reference_with_weights, whole_mixing
from mixhead_plugin.ops.relative import RelativeScores


class Implementation(NamedTuple):
    """One value of the flag ``--attention-impl``."""

    run: Callable[[AttentionInputs], Tensor]
    summary: str


IMPLEMENTATIONS = {
    "reference": Implementation(reference_attention, "the formula as it stands; all weights in memory"),
    "blockwise": Implementation(blockwise_attention, "exact, by blocks of queries; memory linear in the length"),
    "triton": Implementation(
        triton.triton_attention,
        "fused GPU kernels; so far interpreted and compiled, not run on a GPU",
    ),
}


def implementation_problem(impl: str) -> str:
    """Return why `impl` cannot be used on this machine, in a few words; empty if it can."""
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        return "unknown"
    return triton.machine_problem() if impl == "triton" else ""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str = "softmax",
    mixing: Optional[Tensor] = None,
    causal: bool = False,
    attn_mask: Optional[Tensor] = None,
    key_padding_mask: Optional[Tensor] = None,
    relative: Optional[RelativeScores] = None,
    gain: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    score_mixing: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    scale: Optional[float] = None,
    impl: str = "auto",
    need_weights: bool = False,
) -> Union[Tensor, Tuple[Tensor, Tensor]]:
    """Compute multi-head attention with a choice of normalizer and with mixed heads (mixhead eqs 8-12).

    Mixing one matrix for all queries is the post-softmax projection of talking-heads attention (Shazeer et al. 2020).

    Args:
        query: [B, H, Nq, D]; float16, bfloat16, float32 or float64, as `key` and `value`
        key: [B, H, Nk, D]
        value: [B, H', Nk, Dv]; H' differs from H only with a rectangular `mixing`
        normalizer: a key of `NORMALIZERS`
        mixing: floats of any dtype, [H, H'] or [B, Nq, H, H']; M[..., j, i]: weight of source head j in mixed head i
        causal: query t sees the keys up to t + (Nk - Nq)
        attn_mask: additive floats of any dtype, broadcastable to [B, H, Nq, Nk]; -inf hides a key
        key_padding_mask: bool [B, Nk], True hides a key
        relative: `RelativeScores(a, r)`, a [B, H, Nq, R] and r [H, Nk or Nq + Nk - 1, R] in the dtype of `query`; adds
            a[b, h, t] . r[h, k - t + Nq - 1] to the score of query t and key k
        gain: [H, Nq + Nk - 1]; weights times gain[:, k - t + Nq - 1], before mixing (l2 essay, 'Preliminary Solution')
        sink: [H], scores of one more key for each row, which has no value (Miller 2023, softmax1; gpt-oss); for
            normalizers that take one
        score_mixing: L, [H, H] or [B, Nq, H, H]; scale * query . key of head i becomes the sum over j of L[..., j, i]
            times that of head j, before relative scores and masks are added (talking heads)
        dropout_p: probability of dropping a (mixed) weight; the caller passes 0 outside of training
        scale: factor on query . key; None for D ** -0.5
        impl: "auto" or a key of `IMPLEMENTATIONS`. "auto" chooses the fastest; any other choice runs or raises.
        need_weights: also return the mixed weights [B, H', Nq, Nk]; then "reference" computes all, whatever `impl` is

    Returns:
        [B, H', Nq, Dv] in the dtype of `value`. A row that sees no key is 0. With `need_weights` a pair of it and the
        weights [B, H', Nq, Nk] before dropout, in float32 or better.

    Raises:
        ValueError: an unknown name, or tensors whose shapes do not fit together
        TypeError: a mask of the wrong dtype, or dtypes that differ
        RuntimeError: `impl` cannot run here, with the reason
        NotImplementedError: `impl` lacks a derivative that is asked for
    """
    relative_query, relative_key = (None, None) if relative is None else relative
    tensors = (query, key, value, mixing, attn_mask, key_padding_mask, relative_query, relative_key, gain)
    tensors += (sink, score_mixing)
    inputs = AttentionInputs(*tensors, None, None, None, normalizer, causal, dropout_p, scale)
    return reference_with_weights(_checked(inputs, impl)) if need_weights else attend(inputs, impl)


def attend(inputs: AttentionInputs, impl: str) -> Tensor:
    """Compute `attention` for inputs in one record; a scale of None is D ** -0.5."""
    inputs = _checked(inputs, impl)
    if inputs.mixing_query is not None and (impl == "triton" or not inputs.query.is_cpu):  # the kernels read all of M
        inputs = inputs._replace(mixing=whole_mixing(inputs), mixing_query=None, mixing_weight=None)
    if impl == "auto":
        impl = fastest(inputs)
    elif impl == "triton" and (problem := triton_problem(inputs)):
        raise RuntimeError(f"impl 'triton': {problem}; usable here: auto, reference, blockwise")
    return fused.fused_attention(inputs) if impl == "fused" else IMPLEMENTATIONS[impl].run(inputs)


def _checked(inputs: AttentionInputs, impl: str) -> AttentionInputs:
    """Return the inputs with their scale; refuse what does not fit together."""
    if inputs.normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer {inputs.normalizer!r}: must be one of {', '.join(NORMALIZERS)}")
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl {impl!r}: must be one of auto, {', '.join(IMPLEMENTATIONS)}")
    if not 0.0 <= inputs.dropout_p <= 1.0:
        raise ValueError(f"dropout_p {inputs.dropout_p}: must be a probability")
    _check_tensors(inputs)
    return inputs if inputs.scale is not None else inputs._replace(scale=inputs.query.shape[3] ** -0.5)


def fastest(inputs: AttentionInputs) -> str:
    """Return what "auto" stands for: "fused" or a key of `IMPLEMENTATIONS`.

    The choice does not depend on whether gradients are on: activation checkpointing computes the same attention without
    and with them, and both passes must drop the same weights.
    """
    query, key = inputs.query, inputs.key
    if query.device.type == "meta":
        return "reference"  # there are shapes alone, and counters of FLOPs know its operations
    if query.shape[2] <= 1:  # a step of decoding
        return "reference"
    if in_forward_mode(inputs):
        return "reference"  # the only one with forward-mode derivatives
    if fused.serves(inputs):
        return "fused"
    if query.device.type != "cpu" and not triton_problem(inputs):
        return "triton"
    # All weights take no more memory than the queries. Computing them twice pays where blocks keep them in the cache.
    n_keys, head_dim = key.shape[2], query.shape[3]
    if n_keys <= head_dim and (n_keys <= 16 or query.shape[:3].numel() * n_keys <= block_size(query.device)):
        return "reference"
    return "blockwise"


def triton_problem(inputs: AttentionInputs) -> str:
    """Return why the kernels cannot serve a call, or an empty string."""
    return triton.machine_problem() or triton.problem(inputs) or triton.fault(inputs)


def _check_tensors(inputs: AttentionInputs) -> None:
    query, key, value, mixing, mask, padding, relative_query, relative_key, gain, sink, score_mixing = inputs[:11]
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} {list(tensor.shape)}: must be [batch, heads, positions, head size]")
        if not tensor.is_floating_point() or tensor.dtype != query.dtype:
            raise TypeError(f"{name} is {tensor.dtype}: query, key and value must share one floating-point dtype")
    batch, heads, n_queries, head_dim = query.shape
    n_keys, distances = key.shape[2], max(0, n_queries + key.shape[2] - 1)
    if key.shape != (batch, heads, n_keys, head_dim):
        raise ValueError(f"key {list(key.shape)} does not fit query {list(query.shape)}")
    mixed = heads if mixing is None else value.shape[1]
    if value.shape[:3] != (batch, mixed, n_keys):
        raise ValueError(f"value {list(value.shape)} does not fit key {list(key.shape)}")
    if mixing is not None:
        _check_shape("mixing", mixing, (heads, mixed), (batch, n_queries, heads, mixed))
    if mask is not None:
        if not mask.is_floating_point():
            raise TypeError(f"attn_mask is {mask.dtype}: must be additive floats, -inf hides a key")
        full = (batch, heads, n_queries, n_keys)
        if mask.dim() > 4 or any(m not in (1, n) for m, n in zip(mask.shape[::-1], full[::-1])):
            raise ValueError(f"attn_mask {list(mask.shape)}: must be broadcastable to {list(full)}")
    if padding is not None:
        if padding.dtype != torch.bool:
            raise TypeError(f"key_padding_mask is {padding.dtype}: must be bool, True hides a key")
        _check_shape("key_padding_mask", padding, (batch, n_keys))
    if relative_query is not None:
        for name, tensor in (("query", relative_query), ("key", relative_key)):
            if tensor.dtype != query.dtype:
                raise TypeError(f"relative.{name} is {tensor.dtype}: must be of the query's {query.dtype}")
        size = relative_query.shape[-1]
        _check_shape("relative.query", relative_query, (batch, heads, n_queries, size))
        _check_shape("relative.key", relative_key, (heads, n_keys, size), (heads, distances, size))
    if gain is not None:
        if not gain.is_floating_point():
            raise TypeError(f"gain is {gain.dtype}: must be floats")
        _check_shape("gain", gain, (heads, distances))
    if sink is not None:
        if not NORMALIZERS[inputs.normalizer].takes_sink:
            takers = ", ".join(name for name, entry in NORMALIZERS.items() if entry.takes_sink)
            raise ValueError(f"sink: normalizer {inputs.normalizer!r} takes none, only {takers}")
        _check_shape("sink", sink, (heads,))
    if score_mixing is not None:
        _check_shape("score_mixing", score_mixing, (heads, heads), (batch, n_queries, heads, heads))


def _check_shape(name: str, tensor: Tensor, *fitting: Tuple[int, ...]) -> None:
    if tensor.shape not in fitting:
        expected = " or ".join(str(list(shape)) for shape in fitting)
        raise ValueError(f"{name} {list(tensor.shape)}: must be {expected}")
