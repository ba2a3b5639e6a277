"""Divide one call into blocks of queries, each with the keys that its queries may see."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mixhead_plugin.ops.blockwise.block import Block
from mixhead_plugin.ops.blockwise.masks import BlockMasks
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.precision import upcast
from mixhead_plugin.ops.rounding import ceil_div, round_up

# Scores in one block: on a CPU they stay in the cache of one core, elsewhere they fill the device.
BLOCK_SIZE_CPU = 2**18
BLOCK_SIZE_ELSEWHERE = 2**24
MIN_QUERIES = 20  # fewer make slow matrix products
# On a CPU fewer than these make slow products, too. To reach them a block is up to LARGER times as
# large, if BLOCKS_FOR_CORES remain. The number of threads must not decide, because dropout is drawn
# block by block: other blocks would drop other weights.
MANY_QUERIES = 64
LARGER = 4
BLOCKS_FOR_CORES = 16
# A causal mask hides half of a block on the diagonal. So a block has no more queries than this, if
# other sentences can take the place of the rest.
CAUSAL_QUERIES = 64
LINE = 16  # numbers; what a block keeps starts at a multiple of it


def block_size(device: torch.device) -> int:
    """Return how many scores a block holds; it holds more to have its least number of queries."""
    return BLOCK_SIZE_CPU if device.type == "cpu" else BLOCK_SIZE_ELSEWHERE


class Plan:
    """The blocks of one call that see a key, the last queries first.

    Causal blocks of later queries are larger, and threads end together if they begin with these.

    Args:
        inputs: the inputs of the call
        learned_mask: whether attn_mask needs a gradient

    Attributes:
        inputs: those of the call, in the dtype of the computation
        operands: their tensors by name, without masks and seed
        masks: which keys blocks see
        blocks: in the order of their numbers
        largest: the size of the largest block of scores or of mixed weights
        most_distances: the most pairs of a query and a distance in any block
        has_every_query: whether every query is in a block
        keeps: names of what the backward pass reads again if it was kept
        kept_numbers: how much memory that takes, for all blocks
    """

    def __init__(self, inputs: AttentionInputs, learned_mask: bool = False):
        self.inputs = _in_dtype_of_computation(inputs)
        self.operands = self.inputs.operands()
        self.masks = BlockMasks(self.inputs, learned_mask)
        self.blocks = _blocks(self.inputs, self.masks)

        self.keeps = ["P"]
        if NORMALIZERS[inputs.normalizer].grad_reads_scores:
            self.keeps.append("S")
        if inputs.score_mixing is not None:
            self.keeps.append("QK^T")

        self.largest = 0
        self.most_distances = 0
        self.kept_numbers = 0
        self._rooms: list[slice] = []  # of the kept numbers of each block
        sink = 0 if inputs.sink is None else 1  # columns of a row of scores that are no key
        planned_rows = 0  # of scores; each head of each query has one
        for block in self.blocks:
            b, h, n, k = block.shape
            mixed_heads = block.mixed_heads.stop - block.mixed_heads.start
            planned_rows += b * h * n
            self.largest = max(self.largest, b * max(h, mixed_heads) * n * (k + sink))
            self.most_distances = max(self.most_distances, b * h * n * (n + k - 1))

            room = len(self.keeps) * round_up(b * h * n * (k + sink), LINE)
            self._rooms.append(slice(self.kept_numbers, self.kept_numbers + room))
            self.kept_numbers += room
        all_rows = self.inputs.query.shape[:3].numel()
        self.has_every_query = bool(self.blocks) and planned_rows == all_rows

    def by_group(self, threads: int) -> list[Block]:
        """Return the blocks in an order in which keys and values stay in a cache.

        All blocks of as many groups as there are threads come one after the other, and among these
        the last queries come first. In the order of their numbers, all groups would take turns.
        Then their keys, values and gradients come from memory again and again.
        """
        return sorted(self.blocks, key=lambda block: (block.group // threads, block.number))

    def kept_at(self, name: str, block: Block) -> int:
        """Return where one of `keeps` of a block starts among the kept numbers."""
        room = self._rooms[block.number]
        each = (room.stop - room.start) // len(self.keeps)
        return room.start + self.keeps.index(name) * each


def _in_dtype_of_computation(inputs: AttentionInputs) -> AttentionInputs:
    dtype = upcast(inputs.query).dtype
    tensors = {name: tensor.to(dtype) for name, tensor in inputs.operands().items()}
    if inputs.relative_key is not None:
        # The rows of keys after their queries may be missing. Zeros in their place add nothing.
        distances = inputs.query.shape[2] + inputs.key.shape[2] - 1
        missing = max(0, distances - inputs.relative_key.shape[1])
        tensors["relative_key"] = F.pad(tensors["relative_key"], [0, 0, 0, missing])
    return inputs.with_tensors(tensors)


def _blocks(inputs: AttentionInputs, masks: BlockMasks) -> list[Block]:
    """Return the blocks of a call. Queries that see no key are in none; their output stays 0."""
    n_sentences, n_heads, n_queries, _ = inputs.query.shape
    if 0 in (n_sentences, n_heads, n_queries, inputs.key.shape[2]):
        return []

    sizes = _sizes(inputs)
    batches = _slices(n_sentences, sizes.sentences)
    heads = _slices(n_heads, sizes.heads)
    queries = _slices(n_queries, sizes.queries)

    visible, biased = masks.visible_and_biased(queries)
    unpadded, padded = masks.unpadded(batches)
    blocks: list[Block] = []
    # The number of the last block of each group. It adds to the same gradients of keys and values,
    # so the backward pass of a block waits for that one.
    latest: dict[int, int] = {}
    for i in reversed(range(len(queries))):
        for s in range(len(batches)):
            keys = _common(visible[i], unpadded[s])
            if inputs.causal:
                keys = _common(keys, masks.not_future(queries[i]))
            if keys.start == keys.stop:
                continue
            for h, some_heads in enumerate(heads):
                group = s * len(heads) + h
                block = Block(
                    number=len(blocks),
                    group=group,
                    previous=latest.get(group, -1),
                    batch=batches[s],
                    heads=some_heads,
                    mixed_heads=_mixed_heads(inputs, some_heads),
                    queries=queries[i],
                    keys=keys,
                    distances=_distances(queries[i], keys, n_queries),
                    biased=_common(keys, biased[i]),
                    padded=padded[s],
                )
                latest[group] = block.number
                blocks.append(block)
    return blocks


def _mixed_heads(inputs: AttentionInputs, heads: slice) -> slice:
    """Return the heads of values and outputs in a block with some heads of queries and keys."""
    if inputs.mixing is None:
        return heads
    # A block that mixes has all heads. M may turn them into more or fewer, H'.
    return slice(0, inputs.value.shape[1])


def _distances(queries: slice, keys: slice, n_queries: int) -> slice:
    """Return the span of k - t + Nq - 1 for some queries t and some keys k, of Nq queries."""
    smallest = keys.start - (queries.stop - 1) + n_queries - 1
    largest = (keys.stop - 1) - queries.start + n_queries - 1
    return slice(smallest, largest + 1)


@dataclass(frozen=True)
class BlockSizes:
    """How many sentences, heads and queries a block has; the last ones of a call may have fewer."""

    sentences: int
    heads: int
    queries: int


def _sizes(inputs: AttentionInputs) -> BlockSizes:
    """Return the sizes of a block that suit the device.

    Room is counted in rows of scores. Each head of each query of each sentence has a row, with a
    score for each key. On a CPU a block has 2^18 scores, so 2^18 / 512 = 512 rows of 512 keys. It
    may have four times as many, 2048 rows, in order to reach 64 queries. For 8 heads that mix:

        sentences x tokens      rows: usual   at most      block: heads   queries   sentences
        1 x 2048                        128       512                 8        64           1
        4 x 512                         512      2048                 8        64           1
        4 x 128, causal                2048      2048                 8        64           4

    In the first line the usual rows would give 16 queries, so the block gets larger. In the last
    line they would give 256, and the sentences have 128; a causal block takes 64 of these, and
    other sentences fill it.

    Args:
        inputs: the inputs of a call with at least one sentence, head, query and key
    """
    n_sentences, n_heads, n_queries, _ = inputs.query.shape
    usual_rows = block_size(inputs.query.device) // inputs.key.shape[2]
    most_rows = usual_rows  # to reach `wanted` queries
    wanted = MIN_QUERIES
    if inputs.query.is_cpu and n_sentences * n_queries >= BLOCKS_FOR_CORES * MANY_QUERIES:
        most_rows = LARGER * usual_rows
        wanted = MANY_QUERIES

    # All heads if they mix, else as many as leave room for the wanted queries.
    heads = n_heads
    if not inputs.mixes() and inputs.score_mixing is None:
        heads = max(1, min(n_heads, most_rows // wanted))

    # The queries that fill a block of the usual size; if these are few, those that a larger block
    # has room for.
    larger = min(wanted, most_rows // heads)
    queries = max(MIN_QUERIES, usual_rows // heads, larger)
    queries = min(n_queries, queries)

    # More sentences, if there is room for them beside all heads.
    sentences = 1
    if heads == n_heads:
        needed = ceil_div(queries, CAUSAL_QUERIES)  # to fill a causal block again
        if inputs.causal and needed <= n_sentences:
            queries = _without_small_rest(n_queries, min(queries, CAUSAL_QUERIES))
        fitting = usual_rows // (heads * queries)
        sentences = max(1, min(n_sentences, fitting))

    return BlockSizes(sentences, heads, queries)


def _without_small_rest(n_queries: int, queries: int) -> int:
    """Return `queries`, or fewer if the last block of a sentence would have very few queries."""
    rest = n_queries % queries
    if rest == 0 or rest >= MIN_QUERIES:
        return queries
    blocks = ceil_div(n_queries, queries)
    return ceil_div(n_queries, blocks)


def _slices(n: int, size: int) -> list[slice]:
    return [slice(start, min(n, start + size)) for start in range(0, n, size)]


def _common(a: slice, b: slice) -> slice:
    """Return the intersection of two slices."""
    start = max(a.start, b.start)
    stop = min(a.stop, b.stop)
    return slice(start, max(start, stop))
