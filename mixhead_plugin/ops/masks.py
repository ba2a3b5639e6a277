"""The three ways of hiding a key: as one additive mask, or for one block of queries after the other."""

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor


def additive_mask(
    causal: bool,
    attn_mask: Optional[Tensor],
    key_padding_mask: Optional[Tensor],
    n_queries: int,
    n_keys: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Optional[Tensor]:
    """The sum of all masks, ``-inf`` where a key is hidden; None if every key is visible.

    Args:
        causal: query t sees the keys up to t + (n_keys - n_queries)
        attn_mask: additive floats, broadcastable to [B, H, Nq, Nk]
        key_padding_mask: bool [B, Nk], True hides a key
        dtype: of the result, float32 or float64

    Returns:
        a tensor broadcastable to [B, H, Nq, Nk], or None
    """
    mask = attn_mask if attn_mask is None else attn_mask.to(dtype)
    if causal:
        future = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).triu(1 + n_keys - n_queries)  # [Nq, Nk]
        if mask is None:
            mask = torch.zeros(1, 1, n_queries, n_keys, dtype=dtype, device=device)
        mask = mask.masked_fill(future, float("-inf"))
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None, :]  # [B, 1, 1, Nk]
        if mask is None:
            mask = torch.zeros(1, 1, 1, n_keys, dtype=dtype, device=device)
        mask = mask.masked_fill(padding, float("-inf"))
    return mask


class Block(NamedTuple):
    """Some queries of some heads of some sentences, with the keys that any of them may see."""

    sentences: slice
    heads: slice
    queries: slice
    keys: slice  # all keys outside of it are hidden from all these queries
    biased: slice  # part of `keys`: attn_mask is 0 outside of it
    padded: bool  # whether the padding hides any of `keys`


class BlockMasks:
    """The masks of one attention call, block by block.

    Args:
        causal, attn_mask, key_padding_mask: as in `additive_mask`
        n_queries, n_keys: of the whole call
        sentences, heads, queries: the slices into which the batch, the heads and the queries are cut
        like: a tensor of the dtype, float32 or float64, and on the device of the scores
        learned: whether attn_mask wants a gradient; then its zeros count as well

    Attributes:
        blocks: all blocks, the last queries first, for causal blocks are the larger the later; a block whose queries
            see nothing has an empty slice of keys
        seen: whether every query is known to see a key, the first one
    """

    def __init__(
        self,
        causal: bool,
        attn_mask: Optional[Tensor],
        key_padding_mask: Optional[Tensor],
        n_queries: int,
        n_keys: int,
        sentences: Sequence[slice],
        heads: Sequence[slice],
        queries: Sequence[slice],
        like: Tensor,
        learned: bool,
    ):
        self.causal = causal
        self.attn_mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
        self.padding: Optional[Tensor] = None
        if key_padding_mask is not None:
            self.padding = torch.zeros(key_padding_mask.shape, dtype=like.dtype, device=like.device)
            self.padding.masked_fill_(key_padding_mask, float("-inf"))  # [B, Nk]
        self.past = n_keys - n_queries  # keys before the first query
        self.like = like
        self.diagonals: Dict[Tuple[int, int, int], Tensor] = {}
        self.learned = learned
        self.seen = n_keys > 0 and self._all_see_the_first()
        self.blocks = self._blocks(n_keys, sentences, heads, queries)

    def _blocks(
        self, n_keys: int, sentences: Sequence[slice], heads: Sequence[slice], queries: Sequence[slice]
    ) -> List[Block]:
        if not (sentences and heads and queries and n_keys):
            return []
        visible, biased = self._visible_and_biased(n_keys, queries)
        unpadded, padded = self._unpadded(n_keys, sentences)
        blocks = []
        for t, rows in reversed(list(enumerate(queries))):
            for c, some in enumerate(sentences):
                keys = _common(visible[t], unpadded[c])
                if self.causal:
                    keys = _common(keys, slice(0, max(0, rows.stop + self.past)))
                for some_heads in heads:
                    blocks.append(Block(some, some_heads, rows, keys, _common(keys, biased[t]), padded[c]))
        return blocks

    def _all_see_the_first(self) -> bool:
        if self.causal and self.past < 0:
            return False
        masks = [mask[..., 0].to(self.like.dtype) for mask in (self.attn_mask, self.padding) if mask is not None]
        hidden = [mask == float("-inf") for mask in masks]
        return not any(bool(some.any()) for some in hidden)

    def _unpadded(self, n_keys: int, sentences: Sequence[slice]) -> Tuple[List[slice], List[bool]]:
        """For some sentences each, the span of the keys that any of them has, and whether any lacks one in there."""
        if self.padding is None:
            return [slice(0, n_keys)] * len(sentences), [False] * len(sentences)
        spans = _spans(torch.stack([self.padding[some].amax(0) for some in sentences]) != float("-inf"))
        padded = [self.padding[some, span].sum() for some, span in zip(sentences, spans)]
        return spans, (torch.stack(padded) != 0).tolist()

    def _visible_and_biased(self, n_keys: int, queries: Sequence[slice]) -> Tuple[List[slice], List[slice]]:
        """For each slice of the queries, the keys that attn_mask shows, and those whose scores it changes."""
        everything = [slice(0, n_keys)] * len(queries)
        mask = self.attn_mask
        if mask is None:
            return everything, [slice(0, 0)] * len(queries)
        if mask.shape[2] == 1 or mask.shape[3] == 1 or mask[:, :, :1, :1].numel() > 1:
            return everything, everything  # no mask of the plain [Nq, Nk] kind, like a causal one
        rows = [mask[0, 0, some] for some in queries]
        largest = torch.stack([r.amax(0) for r in rows]).to(self.like.dtype)  # [blocks, Nk]
        visible = _spans(largest != float("-inf"))
        if self.learned:
            return visible, everything
        smallest = torch.stack([r.amin(0) for r in rows])
        return visible, _spans((largest != 0) | (smallest != 0))

    def add_to(self, scores: Tensor, block: Block) -> None:
        """Hide keys and add biases in place; scores [b, h, n, k] of the block's sentences, heads, queries and keys."""
        if self.attn_mask is not None:
            _part(scores, block).add_(self._attn_mask_part(self.attn_mask, block))
        if self.causal:
            first = block.queries.start + self.past + 1  # the first key that the first query does not see
            start = max(first, block.keys.start)
            if start < block.keys.stop:
                future = self._future(scores.shape[2], block.keys.stop - start, first - start)
                scores[..., start - block.keys.start :].add_(future)
        if block.padded:
            scores.add_(self.padding[block.sentences, None, None, block.keys])

    def _future(self, rows: int, columns: int, diagonal: int) -> Tensor:
        """-inf on and above a diagonal, [rows, columns]; nearly all blocks share one"""
        key = (rows, columns, diagonal)
        if key not in self.diagonals:
            self.diagonals[key] = self.like.new_full((rows, columns), float("-inf")).triu(diagonal)
        return self.diagonals[key]

    def add_grad(self, d_attn_mask: Tensor, d_scores: Tensor, block: Block) -> None:
        """Add to the gradient of attn_mask, of its shape in four dimensions, what these scores contribute to it."""
        part = self._attn_mask_part(d_attn_mask, block)
        part.add_(_part(d_scores, block).sum_to_size(part.shape))

    @staticmethod
    def _attn_mask_part(mask: Tensor, block: Block) -> Tensor:
        """What of attn_mask, or of its gradient, belongs to the block's biased keys."""
        for dim, part in enumerate((block.sentences, block.heads, block.queries, block.biased)):
            if mask.shape[dim] > 1:
                mask = mask.narrow(dim, part.start, part.stop - part.start)
        return mask


def _part(scores: Tensor, block: Block) -> Tensor:
    """Scores [b, h, n, k] of the block's biased keys"""
    return scores[..., block.biased.start - block.keys.start : block.biased.stop - block.keys.start]


def _spans(true: Tensor) -> List[slice]:
    """For each row of a bool [rows, n] the slice from its first True to its last; an empty one where there is none."""
    n = true.shape[1]
    if n == 0:
        return [slice(0, 0)] * true.shape[0]
    number = true.to(torch.int8)
    first = number.argmax(1)
    after = n - number.flip(1).argmax(1)
    found = true.any(1)
    bounds = torch.stack([first * found, after * found], 1).tolist()  # one transfer, wherever the mask lives
    return [slice(start, stop) for start, stop in bounds]


def _common(a: slice, b: slice) -> slice:
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, max(start, stop))
