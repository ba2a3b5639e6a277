"""attn_mask as the kernels read it, and the spans of keys by which they skip tiles."""

import torch
from torch import Tensor

from mixhead_plugin.ops.masks import with_four_dimensions
from mixhead_plugin.ops.rounding import ceil_div
from mixhead_plugin.ops.triton import programs
from mixhead_plugin.ops.triton.records import strided
from mixhead_plugin.ops.triton.rows import spans_kernel
from mixhead_plugin.ops.triton.tuning import Tile


def readable_mask(attn_mask: Tensor) -> Tensor:
    """Return attn_mask with four dimensions, in a dtype that the kernels read."""
    attn_mask = with_four_dimensions(attn_mask)
    for dim, stride in enumerate(attn_mask.stride()):
        # Made by `expand`: one row in memory stands for all, and is kept as one.
        if stride == 0 and attn_mask.shape[dim] > 1:
            attn_mask = attn_mask.narrow(dim, 0, 1)
    if attn_mask.dtype == torch.float64:
        return attn_mask.float()
    return attn_mask


def has_spans(mask: Tensor) -> bool:
    """Return whether to search a mask [1 or B, 1 or H, 1 or Nq, 1 or Nk] for spans.

    Not one that is broadcast over queries or keys, and not one that differs by sentence or head:
    there the search could cost more than it saves.
    """
    return mask.shape[:2] == (1, 1) and 1 not in mask.shape[2:]


def spans_of(mask: Tensor) -> Tensor:
    """Return start and stop of the keys that a mask leaves visible, and of those it changes.

    With them a causal mask of floats, as fairseq passes it, skips the tiles that `causal` skips.

    Args:
        mask: [1, 1, Nq, Nk], or transposed for the spans of queries

    Returns:
        int32 [Nq, 4], or [Nk, 4] of a transposed mask
    """
    n_rows, n = mask.shape[2:]
    spans = torch.empty(n_rows, 4, dtype=torch.int32, device=mask.device)
    tile = Tile(16, 256, 4, 1)
    arguments = {"mask": strided(mask), "spans": spans, "n_rows": n_rows, "n": n}
    sizes = {"BM": tile.BM, "BN": tile.BN}
    programs.start(spans_kernel, ceil_div(n_rows, tile.BM), {**arguments, **sizes}, tile)
    return spans
