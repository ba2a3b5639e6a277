"""Divide one call into blocks of queries, each with the keys that its queries may see."""

import torch
import torch.nn.functional as F

from mixhead_plugin.ops.blockwise.masks import Block, BlockMasks
from mixhead_plugin.ops.inputs import AttentionInputs
from mixhead_plugin.ops.normalizers import NORMALIZERS
from mixhead_plugin.ops.precision import upcast

# Scores in one block: on a CPU they stay in the cache of one core, elsewhere they fill the device.
BLOCK_SIZE = {"cpu": 2**18}
BLOCK_SIZE_ELSEWHERE = 2**24
MIN_QUERIES = 20  # fewer make slow matrix products
# On a CPU fewer make slow products too: to avoid them a block is up to LARGER times as large, if 16
# blocks remain for the cores. The number of threads must not decide, because dropout is drawn block
# by block.
MANY_QUERIES = 64
LARGER = 4
# A causal mask hides half of a block on the diagonal. So a block has no more queries than this, if
# other sentences can take the place of the rest.
CAUSAL_QUERIES = 64
LINE = 16  # numbers; what a block keeps starts at a multiple of it


def block_size(device: torch.device) -> int:
    """Return how many scores a block holds, but for its least numbers of queries."""
    return BLOCK_SIZE.get(device.type, BLOCK_SIZE_ELSEWHERE)


class Plan:
    """The blocks of one call that see a key, the last queries first.

    Causal blocks of later queries are larger.

    Attributes:
        inputs: those of the call, in the dtype of the computation
        given: their tensors by name, without masks and seed
        largest: the size of the largest block of scores or of mixed weights
        most_distances: the most pairs of a query and a distance in any block
        complete: whether every query is in a block
        keeps: names of what the backward pass reads again if it was kept
        kept_numbers: how much memory that takes, for all blocks
    """

    def __init__(self, inputs: AttentionInputs, learned_mask: bool = False):
        self.inputs = inputs = _in_dtype_of_computation(inputs)
        self.given = inputs.given()
        self.masks = BlockMasks(inputs, learned_mask)
        self.blocks = _blocks(inputs, self.masks)

        self.keeps = ["weights"]
        if NORMALIZERS[inputs.normalizer].grad_reads_scores:
            self.keeps.append("scores")
        if inputs.score_mixing is not None:
            self.keeps.append("products")

        self.largest = 0
        self.most_distances = 0
        self.kept_numbers = 0
        self._rooms: list[slice] = []  # of the kept numbers of each block
        queries = 0
        sink = 0 if inputs.sink is None else 1
        for block in self.blocks:
            b, h, n, k = block.shape
            mixed_heads = block.mixed_heads.stop - block.mixed_heads.start
            queries += b * h * n
            self.largest = max(self.largest, b * max(h, mixed_heads) * n * (k + sink))
            self.most_distances = max(self.most_distances, b * h * n * (n + k - 1))

            room = len(self.keeps) * _whole_lines(b * h * n * (k + sink))
            self._rooms.append(slice(self.kept_numbers, self.kept_numbers + room))
            self.kept_numbers += room
        self.complete = bool(self.blocks) and queries == inputs.query.shape[:3].numel()

    def kept_at(self, name: str, block: Block) -> int:
        """Return where one of `keeps` of a block starts among the kept numbers."""
        room = self._rooms[block.number]
        each = (room.stop - room.start) // len(self.keeps)
        return room.start + self.keeps.index(name) * each


def _whole_lines(numbers: int) -> int:
    return -(-numbers // LINE) * LINE


def _in_dtype_of_computation(inputs: AttentionInputs) -> AttentionInputs:
    dtype = upcast(inputs.query).dtype
    tensors = {name: tensor.to(dtype) for name, tensor in inputs.given().items()}
    if inputs.relative_key is not None:
        distances = inputs.query.shape[2] + inputs.key.shape[2] - 1
        missing = max(0, distances - inputs.relative_key.shape[1])  # of keys after their queries
        tensors["relative_key"] = F.pad(tensors["relative_key"], [0, 0, 0, missing])
    return inputs.with_tensors(tensors)


def _blocks(inputs: AttentionInputs, masks: BlockMasks) -> list[Block]:
    n_keys = inputs.key.shape[2]
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
            for some_heads in heads:
                mixed_heads = some_heads
                if inputs.mixing is not None:
                    mixed_heads = slice(0, inputs.value.shape[1])
                site = (s, some_heads.start)
                block = Block(
                    number=len(blocks),
                    previous=latest.get(site, -1),
                    batch=some,
                    heads=some_heads,
                    mixed_heads=mixed_heads,
                    queries=rows,
                    keys=keys,
                    distances=_distances(rows, keys, inputs.query.shape[2]),
                    biased=_common(keys, biased[t]),
                    padded=padded[s],
                )
                latest[site] = block.number
                blocks.append(block)
    return blocks


def _distances(queries: slice, keys: slice, n_queries: int) -> slice:
    """Return the distances k - t + Nq - 1 from some queries t to some keys k."""
    smallest = keys.start - (queries.stop - 1) + n_queries - 1
    largest = (keys.stop - 1) - queries.start + n_queries - 1
    return slice(smallest, largest + 1)


def _cut(inputs: AttentionInputs) -> tuple[list[slice], list[slice], list[slice]]:
    """Return slices of batches, heads and queries for blocks of the size that suits the device."""
    batch, heads, n_queries, _ = inputs.query.shape
    pairs = block_size(inputs.query.device) // max(1, inputs.key.shape[2])  # of a head and a query
    most, wanted = _room_for_queries(inputs, pairs)

    together = _heads_together(inputs, most, wanted)
    rows = _queries_together(n_queries, together, pairs, most, wanted)
    may_share = together == heads and not _mixes_by_query(inputs)
    if inputs.causal and may_share and rows <= batch * CAUSAL_QUERIES:
        rows = min(rows, CAUSAL_QUERIES)
    some = 1
    if together == heads:
        some = _sentences_together(inputs, pairs // (max(1, together) * rows))
    return _slices(batch, some), _slices(heads, together), _slices(n_queries, rows)


def _room_for_queries(inputs: AttentionInputs, pairs: int) -> tuple[int, int]:
    """Return how many pairs of a head and a query a block may have, and the queries wanted.

    A block may have that many pairs in order to reach the wanted number of queries.
    """
    positions = inputs.query.shape[0] * inputs.query.shape[2]
    if inputs.query.is_cpu and positions >= 16 * MANY_QUERIES:
        return LARGER * pairs, MANY_QUERIES
    return pairs, MIN_QUERIES


def _heads_together(inputs: AttentionInputs, most: int, wanted: int) -> int:
    """Return the heads of a block: all if heads mix, else as many as leave room for the queries."""
    heads = inputs.query.shape[1]
    if inputs.mixes() or inputs.score_mixing is not None:
        return max(1, heads)
    return max(1, min(heads, most // wanted))


def _queries_together(n_queries: int, heads: int, pairs: int, most: int, wanted: int) -> int:
    """Return the queries of a block, at least MIN_QUERIES unless there are fewer."""
    fitting = pairs // heads
    larger = min(wanted, most // heads)
    rows = max(MIN_QUERIES, fitting, larger)
    return max(1, min(n_queries, rows))


def _sentences_together(inputs: AttentionInputs, fitting: int) -> int:
    """Return the sentences of a block, if `fitting` have the size of one."""
    some = max(1, min(inputs.query.shape[0], fitting))
    if _mixes_by_query(inputs) and some < 4:
        return 1  # mixing several sentences copies them, which costs more than further blocks
    return some


def _mixes_by_query(inputs: AttentionInputs) -> bool:
    """Return whether each query has an M or L of its own."""
    if inputs.factors() is not None:
        return True
    return any(m is not None and m.dim() == 4 for m in (inputs.mixing, inputs.score_mixing))


def _slices(n: int, size: int) -> list[slice]:
    return [slice(start, min(n, start + size)) for start in range(0, n, size)]


def _common(a: slice, b: slice) -> slice:
    """Return the intersection of two slices."""
    start = max(a.start, b.start)
    stop = min(a.stop, b.stop)
    return slice(start, max(start, stop))
