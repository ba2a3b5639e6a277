"""The attention function and the masks of mixed models, as `transformers` calls them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from mixhead_plugin.hf.attention_hooks import MixedHeads, mixed_heads_of
from mixhead_plugin.hf.calls import THREADS, Call
from mixhead_plugin.hf.layouts import MIXHEAD
from mixhead_plugin.ops.masks import as_added_mask, hide_lowest


def mixed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that `mix` has seen.

    The call is the contract of the `AttentionInterface`.

    Args:
        module: the attention
        query: [B, H, Nq, D]
        key: [B, G, Nk, D], where G divides H
        value: [B, G, Nk, D]
        attention_mask: broadcastable to [B, H, Nq, Nk]; bool, True is visible; or floats that are
            added to the scores. The least number of their type hides, as -inf does; a larger one,
            as -1e9, hides for softmax alone. None hides the future where the module is causal, but
            nothing if `attn_implementation` is eager. A causal module with more keys than queries
            needs one
        scaling: factor on query . key; None for D ** -0.5
        dropout: probability of dropping a weight
        is_causal: whether the module is causal, if there is no mask; None for its attribute
        position_bias: [1, H, Nq, Nk], added to the scores (T5)
        s_aux: [H], the sinks of the model's own (GPT-OSS)
        output_attentions: also return the weights
        others: what other implementations use

    Returns:
        output [B, Nq, H', Dv] and, with `output_attentions` or in a model whose
        `attn_implementation` is eager, the mixed weights [B, H', Nq, Nk]
    """
    class_name = type(module).__name__
    mixed = mixed_heads_of(module)
    if mixed is None:
        raise RuntimeError(
            f"{class_name}: has no mixing; load it by mixhead_plugin.hf.load, or add a row to "
            "hf.LAYOUTS"
        )
    implementation = mixed.config._attn_implementation
    if implementation not in (MIXHEAD, "eager"):
        raise RuntimeError(
            f"attn_implementation {implementation}: lost the mixing, must be {MIXHEAD} or eager"
        )
    for setting in ("softcap", "cache"):
        if others.get(setting) is not None:
            raise ValueError(f"{class_name}: {setting} cannot be used with mixed heads")

    call = _current_call(mixed, query)
    projected = call.queries(query.size(1), query.size(3))
    if attention_mask is None and is_causal is None:
        # as in sdpa; eager always has a mask where it hides something
        is_causal = implementation != "eager" and getattr(module, "is_causal", True)
    masks = _masks(mixed, attention_mask, bool(is_causal), position_bias, query, key.size(2))
    # Whoever asks for weights asks by an argument of the model, by its config, or by "eager".
    asked = output_attentions or THREADS.own.wants_weights() or mixed.config.output_attentions

    outputs, weights = mixed.attend_in(
        module,
        query,
        key,
        value,
        projected,
        call.x,
        need_weights=asked or implementation == "eager",
        sink=s_aux,
        attn_mask=masks.added,
        key_padding_mask=masks.padding,
        causal=masks.causal,
        dropout_p=dropout,
        scale=query.size(3) ** -0.5 if scaling is None else scaling,
    )
    call.waits = False
    call.attended = True
    return outputs.contiguous(), weights  # models reshape it by `view`


def _current_call(mixed: MixedHeads, query: Tensor) -> Call:
    """Return the call of the attention that runs in this thread.

    Raise RuntimeError if its projection of queries did not give these queries [B, H, Nq, D].
    """
    class_name = type(mixed.host).__name__
    call = THREADS.own.call
    if call is None or call.host is not mixed.host or call.projected is None:
        raise RuntimeError(
            f"{class_name}: its projection of queries was not called, so there is nothing to mix by"
        )
    wanted = query.size(0), query.size(2)
    if call.projected.shape[:-1] != wanted:
        raise RuntimeError(
            f"{class_name}: its queries are {tuple(call.projected.shape[:-1])} where they are "
            f"projected, but {wanted} where they attend, so there is nothing to mix by"
        )
    return call


class _Masks(NamedTuple):
    """The masks of a call, in the form that `ops.attention` takes."""

    added: Tensor | None = None  # to the scores, broadcastable to [B, H, Nq, Nk]
    padding: Tensor | None = None  # bool [B, Nk], True hides a key
    causal: bool = False


def _masks(
    mixed: MixedHeads,
    mask: Tensor | None,
    is_causal: bool,
    position_bias: Tensor | None,
    query: Tensor,
    n_keys: int,
) -> _Masks:
    """Return the masks of a call, whose arguments are those of `mixed_attention`."""
    batch, heads, n_queries, _ = query.shape
    added = None
    padding = None
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"attention_mask is {mask.dtype}: a mask of four dimensions must be bool, True is "
            "visible, or floats, which are added"
        )
    if mask is not None and mask.is_floating_point():
        added = hide_lowest(mask)
    elif mask is not None and mask.size(1) == 1 and same_for_all_queries(mask):
        # Kernels take such a mask without one of all pairs of queries and keys.
        padding = ~mask[:, 0, 0].expand(batch, -1)  # [B, Nk]
    elif mask is not None:
        added = as_added_mask(~mask, heads, query.dtype)

    if position_bias is not None:
        added = position_bias if added is None else added + position_bias
    # Layers may share a bias, which has all heads; this attention may be pruned.
    if added is not None and added.size(1) not in (1, heads):
        added = added[:, mixed.kept["source"]]
    # One query is that of a step with a cache: it sees all keys.
    causal = mask is None and is_causal and n_queries > 1
    # The first query sees the first key alone in sdpa of transformers, the last one sees all keys
    # in flash attention, and eager hides nothing.
    if causal and n_queries != n_keys:
        raise ValueError(
            f"{type(mixed.host).__name__}: is causal, and has {n_queries} queries and {n_keys} "
            "keys; attention_mask must say which keys a query sees, because the attentions of "
            "transformers differ there"
        )
    return _Masks(added, padding, causal)


def same_for_all_queries(mask: Tensor) -> bool:
    """Return whether a mask [B, 1, Nq, Nk] has one row for all queries; `mixed_mask` makes such."""
    return mask.size(2) == 1 or mask.stride(2) == 0


def mixed_mask(**settings: Any) -> Tensor | None:
    """Return a bool mask [B, 1, Nq, Nk], True is visible; None where `mixed_attention` needs none.

    If all queries see the same keys, it is one row that stands for all.
    """
    n_queries = settings["q_length"]
    if settings["mask_function"] is bidirectional_mask_function:  # all queries see the same keys
        row = sdpa_mask(**{**settings, "q_length": 1})
        return None if row is None else row.expand(-1, -1, n_queries, -1)
    if n_queries not in (1, settings["kv_length"]):
        settings["allow_is_causal_skip"] = False  # the rest of a static cache is hidden too
    return sdpa_mask(**settings)


def register() -> None:
    """Let models of `transformers` find both by their name."""
    AttentionInterface.register(MIXHEAD, mixed_attention)
    AttentionMaskInterface.register(MIXHEAD, mixed_mask)
