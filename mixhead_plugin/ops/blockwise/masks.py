"""The masks of a call, block by block."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mixhead_plugin.ops.blockwise.block import NARROW, Block
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.masks import with_four_dimensions

INF = float("inf")


class BlockMasks:
    """Find the keys that blocks see, and add masks to their scores.

    Args:
        inputs: those of the call
        learned: whether attn_mask needs a gradient, for its zeros as well

    Attributes:
        every_query_sees_a_key: whether that is known, so that no row of scores is hidden whole
    """

    def __init__(self, inputs: AttentionInputs, learned: bool):
        self.causal = inputs.causal
        self.learned = learned
        self.like = inputs.query
        self.n_keys = inputs.key.shape[2]
        self.past = self.n_keys - inputs.query.shape[2]  # keys before the first query
        self.futures: dict[tuple[int, int, int], Tensor] = {}

        self.attn_mask = None
        if inputs.attn_mask is not None:
            self.attn_mask = with_four_dimensions(inputs.attn_mask)
        self.padding = inputs.key_padding_mask
        if self.padding is not None:  # as floats that are added: 0, and -inf where a key is hidden
            zeros = self.like.new_zeros(self.padding.shape)
            self.padding = zeros.masked_fill_(self.padding, -INF)
        self.every_query_sees_a_key = self._every_query_sees_the_first_key()

    def _every_query_sees_the_first_key(self) -> bool:
        """Return whether every query is known to see the first key.

        A query that sees another key instead is not looked for. It would cost more than what the
        normalizers save if they know that every query sees one.
        """
        if self.n_keys == 0:
            return False
        if self.causal and self.past < 0:  # the first queries come before the first key
            return False
        for mask in (self.attn_mask, self.padding):
            if mask is None:
                continue
            of_first_key = mask[..., 0].to(self.like.dtype)
            if bool((of_first_key == -INF).any()):
                return False
        return True

    def unpadded(self, batches: Sequence[slice]) -> tuple[list[slice], list[bool]]:
        """Return the span of keys that any sentence has, and whether any lacks a key in the span.

        Both have an entry for each slice of the batch.
        """
        if self.padding is None:
            return [slice(0, self.n_keys)] * len(batches), [False] * len(batches)
        # 0 where a sentence of the slice has the key, -inf where none has it; [slices, Nk]
        largest = torch.stack([self.padding[some].amax(0) for some in batches])
        spans = [self._wide(span) for span in _spans(largest != -INF)]
        # 0 where no key in the span is hidden, else -inf
        sums = [self.padding[some, span].sum() for some, span in zip(batches, spans)]
        padded = torch.stack(sums) != 0
        return spans, padded.tolist()

    def _wide(self, span: slice) -> slice:
        """Return a span with at least NARROW keys, if it is not empty and there are so many."""
        if span.start == span.stop or self.n_keys < NARROW:
            return span
        start = min(span.start, self.n_keys - NARROW)
        return slice(start, max(span.stop, start + NARROW))

    def visible_and_biased(self, queries: Sequence[slice]) -> tuple[list[slice], list[slice]]:
        """Return for each slice of queries the keys that attn_mask shows, and those it changes."""
        everything = [slice(0, self.n_keys)] * len(queries)
        nothing = [slice(0, 0)] * len(queries)
        mask = self.attn_mask  # [1 or B, 1 or H, 1 or Nq, 1 or Nk]
        if mask is None:
            return everything, nothing
        # Only a plain mask [Nq, Nk], like a causal one, is worth the search.
        by_query_and_key = mask.shape[2] > 1 and mask.shape[3] > 1
        by_sentence_or_head = mask.shape[0] * mask.shape[1] > 1
        if by_sentence_or_head or not by_query_and_key:
            return everything, everything

        masks = [mask[0, 0, some] for some in queries]  # of each slice, [queries, Nk]
        largest = torch.stack([m.amax(0) for m in masks]).to(self.like.dtype)  # [slices, Nk]
        visible = _spans(largest != -INF)
        if self.learned:
            return visible, everything  # a number that is 0 now has a gradient, too
        smallest = torch.stack([m.amin(0) for m in masks])
        return visible, _spans((largest != 0) | (smallest != 0))

    def not_future(self, queries: slice) -> slice:
        """Return the keys up to the position of the last of some queries, for a causal mask."""
        return slice(0, max(0, queries.stop + self.past))

    def add_to(self, scores: Tensor, block: Block) -> None:
        """Hide keys and add biases in place.

        Args:
            scores: [b, h, n, k]
            block: the block of these scores
        """
        if self.attn_mask is not None:
            _biased(scores, block).add_(_part(self.attn_mask, block))
        if self.causal:
            # The first key that the block's first query does not see. The other queries see it or
            # not, but all see the keys before it, so these need no mask.
            first_hidden = block.queries.start + self.past + 1
            start = max(first_hidden, block.keys.start)
            if start < block.keys.stop:
                columns = block.keys.stop - start
                future = self._future(scores.shape[2], columns, first_hidden - start)
                scores[..., start - block.keys.start :].add_(future)
        if block.padded and self.padding is not None:
            scores.add_(self.padding[block.batch, None, None, block.keys])

    def _future(self, queries: int, keys: int, diagonal: int) -> Tensor:
        """Return -inf on and above a diagonal, [queries, keys].

        Nearly all blocks share one tensor. Threads need no lock for it: a dict stays whole when two
        of them set the same key, and both have made the same numbers.
        """
        shape = (queries, keys)
        key = (*shape, diagonal)
        future = self.futures.get(key)
        if future is None:
            future = self.like.new_full(shape, -INF).triu(diagonal)
            self.futures[key] = future
        return future


def add_mask_grad(d_attn_mask: Tensor, d_scores: Tensor, block: Block) -> None:
    """Add the block's d_scores [b, h, n, k] to the gradient of attn_mask [four dimensions]."""
    part = _part(d_attn_mask, block)
    part.add_(_biased(d_scores, block).sum_to_size(part.shape))


def _part(mask: Tensor, block: Block) -> Tensor:
    """Return a view of attn_mask, or of its gradient, for the block's biased keys.

    A dimension of 1, which is broadcast, stays.
    """
    for dim, cut in enumerate((block.batch, block.heads, block.queries, block.biased)):
        if mask.shape[dim] > 1:
            mask = mask.narrow(dim, cut.start, cut.stop - cut.start)
    return mask


def _biased(scores: Tensor, block: Block) -> Tensor:
    """Return a view of scores [b, h, n, k] for the block's biased keys."""
    start = block.biased.start - block.keys.start
    stop = block.biased.stop - block.keys.start
    return scores[..., start:stop]


def _spans(true: Tensor) -> list[slice]:
    """Return for each row of a bool [rows, n] the slice from its first True to its last.

    The slice of a row without True is empty.
    """
    n = true.shape[1]
    number = true.to(torch.int8)  # argmax takes no bool; it returns the first of equal numbers
    found = true.any(1)
    first = torch.where(found, number.argmax(1), 0)
    after = torch.where(found, n - number.flip(1).argmax(1), 0)
    bounds = torch.stack([first, after], 1).tolist()  # one transfer from the device
    return [slice(start, stop) for start, stop in bounds]
