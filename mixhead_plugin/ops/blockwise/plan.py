"""Divide one call into blocks of queries, each with the keys that its queries may see."""

import torch
import torch.nn.functional as F

from mixhead_plugin.ops.blockwise.masks import Block, BlockMasks
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.reference import upcast

# Scores in one block: on a CPU they stay in the cache of one core, elsewhere they fill the device.
BLOCK_SIZE = {"cpu": 2**18}
BLOCK_SIZE_ELSEWHERE = 2**24
MIN_QUERIES = 20  # fewer make slow matrix products
# On a CPU fewer make slow products too: to avoid them a block is up to LARGER times as large, if 16
# blocks remain for the cores. The number of threads must not decide, because dropout is drawn block
# by block.
MANY_QUERIES = 64
LARGER = 4


def block_size(device: torch.device) -> int:
    """Return how many scores a block holds, but for its least numbers of queries."""
    return BLOCK_SIZE.get(device.type, BLOCK_SIZE_ELSEWHERE)


class Plan:
    """The blocks of one call that see a key, the last queries first: causal blocks of later queries
    are larger.

    `largest` is the size of the largest block of scores or of mixed weights, `most_distances` the
    most pairs of a query and a distance in any block. The plan is `complete` if every query is in a
    block.
    """

    def __init__(self, inputs: AttentionInputs, learned_mask: bool = False):
        self.inputs = inputs = _in_dtype_of_computation(inputs)
        self.masks = BlockMasks(inputs, learned_mask)
        self.blocks = _blocks(inputs, self.masks)
        self.largest = self.most_distances = queries = 0
        for block in self.blocks:
            b, h, n, k = block.shape
            queries += b * h * n
            mixed_heads = block.mixed_heads.stop - block.mixed_heads.start
            self.largest = max(
                self.largest, b * max(h, mixed_heads) * n * (k + (inputs.sink is not None))
            )
            self.most_distances = max(self.most_distances, b * h * n * (n + k - 1))
        self.complete = bool(self.blocks) and queries == inputs.query.shape[:3].numel()


def _in_dtype_of_computation(inputs: AttentionInputs) -> AttentionInputs:
    dtype = upcast(inputs.query).dtype
    tensors = {name: tensor.to(dtype) for name, tensor in inputs.given().items()}
    if inputs.relative_key is not None:
        distances = inputs.query.shape[2] + inputs.key.shape[2] - 1
        missing = max(0, distances - inputs.relative_key.shape[1])  # of keys after their queries
        tensors["relative_key"] = F.pad(tensors["relative_key"], [0, 0, 0, missing])
    return inputs.with_tensors(tensors)


def _blocks(inputs: AttentionInputs, masks: BlockMasks) -> list[Block]:
    n_queries, n_keys = inputs.query.shape[2], inputs.key.shape[2]
    batches, heads, queries = _cut(inputs)
    if not (batches and heads and queries and n_keys):
        return []
    visible, biased = masks.visible_and_biased(queries)
    unpadded, padded = masks.unpadded(batches)
    blocks: list[Block] = []
    # the number of the last block, by site: its batch elements and heads
    latest: dict[tuple[int, int], int] = {}
    for t in reversed(range(len(queries))):
        rows = queries[t]
        for s, some in enumerate(batches):
            keys = _common(visible[t], unpadded[s])
            if inputs.causal:
                keys = _common(keys, slice(0, max(0, rows.stop + masks.past)))
            if keys.start == keys.stop:
                continue
            distances = slice(
                keys.start - rows.stop + n_queries, keys.stop - rows.start + n_queries - 1
            )
            for some_heads in heads:
                site, number = (s, some_heads.start), len(blocks)
                mixed_heads = (
                    some_heads if inputs.mixing is None else slice(0, inputs.value.shape[1])
                )
                parts = (
                    some,
                    some_heads,
                    mixed_heads,
                    rows,
                    keys,
                    distances,
                    _common(keys, biased[t]),
                )
                blocks.append(Block(number, latest.get(site, -1), *parts, padded[s]))
                latest[site] = number
    return blocks


def _cut(inputs: AttentionInputs) -> tuple[list[slice], list[slice], list[slice]]:
    """Return slices of the batches, the heads and the queries for blocks of the size that suits the
    device.
    """
    batch, heads, n_queries, _ = inputs.query.shape
    room = block_size(inputs.query.device) // max(1, inputs.key.shape[2])
    mixes = inputs.mixing is not None or inputs.score_mixing is not None
    long = inputs.query.is_cpu and batch * n_queries >= 16 * MANY_QUERIES
    larger, many = (LARGER * room, MANY_QUERIES) if long else (room, MIN_QUERIES)
    together = max(1, heads if mixes else min(heads, larger // many))
    rows = max(MIN_QUERIES, room // together, min(many, larger // together))
    rows = max(1, min(n_queries, rows))
    some = max(1, min(batch, room // (together * rows))) if together == heads else 1
    by_query = any(m is not None and m.dim() == 4 for m in (inputs.mixing, inputs.score_mixing))
    # mixing several batches copies them, which costs more than further blocks
    if by_query and some < 4:
        some = 1
    return _slices(batch, some), _slices(heads, together), _slices(n_queries, rows)


def _slices(n: int, size: int) -> list[slice]:
    return [slice(start, min(n, start + size)) for start in range(0, n, size)]


def _common(a: slice, b: slice) -> slice:
    """Return the intersection of two slices."""
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return slice(start, max(start, stop))
