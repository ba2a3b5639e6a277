"""Refuse calls of a `MixedAttention` whose tensors do not fit.

Where `nn.MultiheadAttention` refuses a call, too, the words are those of torch.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class ShapeError(ValueError, AssertionError, RuntimeError):
    """Say which shape or type was expected.

    torch's module raises one of the last two, this project the first.
    """


def check_nested(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    need_weights: bool,
    batch_first: bool,
    must_be_none: Mapping[str, object],
) -> None:
    """Raise ShapeError if a call with a nested query asks for what it cannot have.

    Args:
        query: as in `MixedAttention.forward`
        key: likewise
        value: likewise
        need_weights: likewise
        batch_first: whether the module takes [B, N, C]
        must_be_none: the arguments by name that such a call cannot have
    """
    if query is not key or query is not value or need_weights or not batch_first:
        raise ShapeError(
            "nested query: must be key and value, too, with batch_first and need_weights=False"
        )
    for name, argument in must_be_none.items():
        if argument is not None:
            raise ShapeError(f"{name}: must be None with a nested query")


def check_dims(query: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> None:
    """Raise ShapeError for wrong numbers of dimensions, and for masks of whole numbers.

    Args:
        query: [Nq, B, C] or [B, Nq, C], or [Nq, C] without a batch
        key_padding_mask: [B, Nk], or [Nk] without a batch
        attn_mask: [Nq, Nk] or [B * H, Nq, Nk]
    """
    dims = query.dim()
    if dims not in (2, 3):
        raise ShapeError(
            f"query should be unbatched 2D or batched 3D tensor but received {dims}-D query tensor"
        )
    if key_padding_mask is not None and key_padding_mask.dim() != dims - 1:
        raise ShapeError(
            f"{_expected(dims)} `key_padding_mask` to be `None` or {dims - 1}-D but found "
            f"{key_padding_mask.dim()}-D tensor instead"
        )
    for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            raise ShapeError(f"only bool and floating types of {name} are supported")
    if attn_mask is not None and attn_mask.dim() not in (2, 3):
        raise ShapeError(
            f"{_expected(dims)} `attn_mask` to be `None`, 2-D or 3-D but found "
            f"{attn_mask.dim()}-D tensor instead"
        )


def _expected(dims: int) -> str:
    """Return how messages about a query of so many dimensions begin."""
    kind = "batched" if dims == 3 else "unbatched"
    return f"For {kind} ({dims}-D) `query`, expected"


def check_query(query: Tensor, embed_dim: int) -> None:
    """Raise ShapeError if a query [..., C] has not the features that the module was built for."""
    if query.size(-1) != embed_dim:
        raise ShapeError(
            f"was expecting embedding dimension of {embed_dim}, but got {query.size(-1)}"
        )


def check_keys_and_values(
    query: Tensor, key: Tensor, value: Tensor, kdim: int, vdim: int, batch_first: bool
) -> None:
    """Raise ShapeError if keys and values do not fit the module, each other or the query.

    Args:
        query: [Nq, B, C] or [B, Nq, C], or [Nq, C] without a batch
        key: [Nk, B, kdim], likewise
        value: [Nk, B, vdim], likewise
        kdim: what the module was built for
        vdim: likewise
        batch_first: whether the batch is the first dimension, not the second
    """
    dims = query.dim()
    if key.dim() != dims or value.dim() != dims:
        raise ShapeError(
            f"{_expected(dims)} `key` and `value` to be {dims}-D but found {key.dim()}-D and "
            f"{value.dim()}-D tensors respectively"
        )
    if key.size(-1) != kdim:
        raise ShapeError(f"key shape {key.shape}: its last size must be kdim {kdim}")
    if value.size(-1) != vdim:
        raise ShapeError(f"value shape {value.shape}: its last size must be vdim {vdim}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ShapeError(
            f"key shape {key.shape} and value shape {value.shape}: must have as many positions and "
            "sentences"
        )
    if dims == 2:
        return
    batch_dim = 0 if batch_first else 1
    batch = query.size(batch_dim)
    if key.size(batch_dim) != batch:
        raise ShapeError(
            f"key shape {key.shape}: must have as many sentences as the query, {batch}"
        )


def check_masks(
    queries: Tensor,
    n_keys: int,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
) -> None:
    """Raise ShapeError if a mask is not of the queries and keys of a call.

    Args:
        queries: [B, H, Nq, D]
        n_keys: Nk, those of the cache included
        key_padding_mask: must be [B, Nk]
        attn_mask: must be [Nq, Nk] or [B * H, Nq, Nk]
    """
    batch, heads, n_queries, _ = queries.shape
    if attn_mask is not None:
        wanted: tuple[int, ...] = n_queries, n_keys
        if attn_mask.dim() == 3:
            wanted = batch * heads, n_queries, n_keys
        if attn_mask.shape != wanted:
            raise ShapeError(f"Expected `attn_mask` shape to be {wanted} but got {attn_mask.shape}")
    if key_padding_mask is not None and key_padding_mask.shape != (batch, n_keys):
        raise ShapeError(
            f"Expected `key_padding_mask` shape to be {(batch, n_keys)} but got "
            f"{key_padding_mask.shape}"
        )
