"""The one public function: checks its arguments, then hands them to an implementation."""

from typing import Any, Callable, Dict, NamedTuple, Optional

import torch
from torch import Tensor

from mixhead_plugin.ops import fused, triton
from mixhead_plugin.ops.blockwise import blockwise_attention
from mixhead_plugin.ops.forward_mode import in_forward_mode
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.reference import reference_attention
from mixhead_plugin.ops.relative import RelativeScores
from mixhead_plugin.ops.relative import problem as relative_problem


class Implementation(NamedTuple):
    """One entry of the flag ``--attention-impl``."""

    run: Callable[..., Tensor]  # takes the arguments of `attention`, checked and with every default filled in
    summary: str
    missing: str = ""  # why it cannot run at all


IMPLEMENTATIONS = {
    "reference": Implementation(reference_attention, "the formula as it stands; all weights in memory"),
    "blockwise": Implementation(blockwise_attention, "exact, by blocks of queries; memory linear in the length"),
    "triton": Implementation(
        triton.triton_attention, "fused GPU kernels; so far interpreted and compiled for a Hopper GPU, not run on one"
    ),
}


def implementation_problem(impl: str) -> str:
    """Why `impl` cannot be used on this machine, in a few words; empty if it can."""
    if impl == "auto":
        return ""
    if impl not in IMPLEMENTATIONS:
        return "unknown"
    return IMPLEMENTATIONS[impl].missing or (triton.machine_problem() if impl == "triton" else "")


def usable_implementations() -> list[str]:
    return ["auto", *(name for name in IMPLEMENTATIONS if not implementation_problem(name))]


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
    dropout_p: float = 0.0,
    scale: Optional[float] = None,
    impl: str = "auto",
) -> Tensor:
    """Multi-head attention with a choice of normalizer and with mixed heads (mixhead eqs 8-12).

    Args:
        query: [B, H, Nq, D]; float16, bfloat16, float32 or float64, as `key` and `value`
        key: [B, H, Nk, D]
        value: [B, H', Nk, Dv]; H' = H unless a rectangular `mixing` says else
        normalizer: a key of `NORMALIZERS`
        mixing: None, [H, H'] or [B, Nq, H, H']; M[..., j, i] is the weight of source head j in mixed head i
        causal: query t sees the keys up to t + (Nk - Nq)
        attn_mask: additive floats, broadcastable to [B, H, Nq, Nk]; -inf hides a key
        key_padding_mask: bool [B, Nk], True hides a key
        relative: scores by distance that are added, in the dtype of `query`
        gain: [H, Nq + Nk - 1], factors on the weights by distance, before mixing; of key k for query t it is
            gain[:, k - t + Nq - 1], as in `RelativeScores` (l2 essay, 'Preliminary Solution')
        dropout_p: probability of dropping a (mixed) weight; the caller passes 0 outside of training
        scale: of the scores; None for D ** -0.5
        impl: "auto" or a key of `IMPLEMENTATIONS`; only "auto" may choose, an explicit choice that cannot serve raises.
            Where there is dropout it does not ask whether gradients are on: activation checkpointing computes the same
            attention without and with them, and has to drop the same weights. Only "reference" has second derivatives;
            "triton" rounds weights and `mixing` to the dtype of `query` before it multiplies them.

    Returns:
        [B, H', Nq, Dv] in the dtype of `value`. A row that sees no key is 0.

    Raises:
        ValueError: an unknown name, or tensors whose shapes do not fit together
        TypeError: a mask of the wrong dtype, or dtypes that differ
        RuntimeError: `impl` cannot run here, with the reason
    """
    if normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer {normalizer!r}: must be one of {', '.join(NORMALIZERS)}")
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl {impl!r}: must be one of auto, {', '.join(IMPLEMENTATIONS)}")
    _check_tensors(query, key, value, mixing, attn_mask, key_padding_mask, relative, gain)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p {dropout_p}: must be a probability")
    options = dict(
        normalizer=normalizer,
        mixing=mixing,
        causal=causal,
        attn_mask=attn_mask,
        key_padding_mask=key_padding_mask,
        relative=relative,
        gain=gain,
        dropout_p=dropout_p,
    )
    problem = implementation_problem(impl)
    if impl == "triton" and not problem:
        problem = triton.problem(query, key, value, **options)
    if problem:
        usable = [name for name in usable_implementations() if name != impl]
        raise RuntimeError(f"impl {impl!r}: {problem}; usable here: {', '.join(usable)}")
    run = _fastest(query, key, value, options) if impl == "auto" else IMPLEMENTATIONS[impl].run
    return run(query, key, value, scale=query.shape[3] ** -0.5 if scale is None else scale, **options)


def _fastest(query: Tensor, key: Tensor, value: Tensor, options: Dict[str, Any]) -> Callable[..., Tensor]:
    n_queries, n_keys, head_dim = query.shape[2], key.shape[2], query.shape[3]
    if n_queries <= 1 or query.is_meta:  # a step of decoding; no values to find blocks by
        return reference_attention
    if in_forward_mode(query, key, value, *options.values()):
        return reference_attention  # nothing else has forward-mode derivatives
    if fused.serves(query, key, value, **options):
        return fused.fused_attention
    if query.device.type != "cpu" and not (
        implementation_problem("triton") or triton.problem(query, key, value, **options)
    ):
        return triton.triton_attention
    if n_keys <= head_dim:  # all weights take no more room than the queries: computing them again would not pay
        return reference_attention
    return blockwise_attention


def _check_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Optional[Tensor],
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    relative: Optional[RelativeScores],
    gain: Optional[Tensor],
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} {list(tensor.shape)}: must be [batch, heads, positions, head size]")
        if not tensor.is_floating_point() or tensor.dtype != query.dtype:
            raise TypeError(f"{name} is {tensor.dtype}: query, key and value must share one floating-point dtype")
    batch, heads, n_queries, head_dim = query.shape
    n_keys = key.shape[2]
    if key.shape != (batch, heads, n_keys, head_dim):
        raise ValueError(f"key {list(key.shape)} does not fit query {list(query.shape)}")
    mixed = value.shape[1] if mixing is not None else heads
    if value.shape[:3] != (batch, mixed, n_keys):
        raise ValueError(f"value {list(value.shape)} does not fit key {list(key.shape)}")
    if mixing is not None and mixing.shape not in ((heads, mixed), (batch, n_queries, heads, mixed)):
        raise ValueError(f"mixing {list(mixing.shape)}: must be {[heads, mixed]} or {[batch, n_queries, heads, mixed]}")
    if attn_mask is not None:
        if not attn_mask.is_floating_point():
            raise TypeError(f"attn_mask is {attn_mask.dtype}: must be additive floats, -inf hides a key")
        full = (batch, heads, n_queries, n_keys)
        if attn_mask.dim() > 4 or any(m not in (1, n) for m, n in zip(attn_mask.shape[::-1], full[::-1])):
            raise ValueError(f"attn_mask {list(attn_mask.shape)}: must be broadcastable to {list(full)}")
    if key_padding_mask is not None:
        if key_padding_mask.dtype != torch.bool:
            raise TypeError(f"key_padding_mask is {key_padding_mask.dtype}: must be bool, True hides a key")
        if key_padding_mask.shape != (batch, n_keys):
            raise ValueError(f"key_padding_mask {list(key_padding_mask.shape)}: must be {[batch, n_keys]}")
    if relative is not None:
        if problem := relative_problem(relative, query, n_keys):
            raise ValueError(problem)
        for name, tensor in relative._asdict().items():
            if tensor.dtype != query.dtype:
                raise TypeError(f"relative.{name} is {tensor.dtype}: must be of the query's {query.dtype}")
    if gain is not None:
        if not gain.is_floating_point():
            raise TypeError(f"gain is {gain.dtype}: must be floats")
        if gain.shape != (heads, max(0, n_queries + n_keys - 1)):
            raise ValueError(f"gain {list(gain.shape)}: must be {[heads, n_queries + n_keys - 1]}")
