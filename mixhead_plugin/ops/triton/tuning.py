"""Choose the tile of each kernel: everything that depends on the size of the device.

The tables give a few candidates for each kernel, head size and dtype, the likeliest first. Where
there are several, the first call on a GPU times them and keeps the fastest for the process.
"""

import statistics
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from mixhead_plugin.ops.environment import bytes_from


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n, faster than triton.next_power_of_2."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


class Tile(NamedTuple):
    """The sizes that a kernel is compiled for."""

    BM: int  # queries
    BN: int  # keys
    warps: int
    stages: int


# (BM, BN, warps, stages) by the bytes of a number and the larger head size: first fit. Only the
# first three kernels have several candidates: some of those that mix write over what they read, so
# they cannot be launched again to be timed.
_BY_HEAD_DIM = {
    "flash_fwd_kernel": {
        2: {
            64: [(128, 64, 4, 3), (128, 128, 8, 3)],
            128: [(128, 64, 8, 3), (128, 32, 4, 3)],
            256: [(128, 32, 8, 2), (64, 32, 4, 2)],
        },
        4: {64: [(64, 16, 8, 2)], 128: [(32, 16, 8, 2)], 256: [(16, 16, 8, 1)]},
    },
    "flash_bwd_dq_kernel": {
        2: {
            64: [(128, 64, 8, 2), (64, 64, 4, 3)],
            128: [(128, 32, 8, 2), (64, 64, 4, 2)],
            256: [(64, 32, 4, 1), (64, 16, 4, 2)],
        },
        4: {64: [(32, 16, 8, 1)], 128: [(32, 16, 8, 1)], 256: [(16, 16, 8, 1)]},
    },
    "flash_bwd_dkv_kernel": {
        2: {
            64: [(64, 128, 8, 2), (64, 64, 4, 3)],
            128: [(32, 128, 8, 2)],
            256: [(64, 32, 8, 1), (32, 32, 8, 1)],
        },
        4: {64: [(16, 32, 8, 1)], 128: [(16, 32, 8, 1)], 256: [(16, 16, 8, 1)]},
    },
    "mixed_weights_kernel": {
        2: {128: [(64, 128, 4, 1)], 256: [(64, 64, 8, 1)]},
        4: {256: [(32, 32, 8, 1)]},
    },
    "mixed_bwd_dw_kernel": {
        2: {128: [(64, 128, 8, 1)], 256: [(64, 64, 8, 1)]},
        4: {256: [(32, 32, 8, 1)]},
    },
    "product_over_keys_kernel": {
        2: {128: [(64, 64, 4, 3)], 256: [(64, 64, 4, 3)]},
        4: {256: [(32, 32, 8, 2)]},
    },
    "product_over_queries_kernel": {
        2: {128: [(64, 64, 4, 3)], 256: [(64, 64, 4, 3)]},
        4: {256: [(32, 32, 8, 2)]},
    },
}
# The same by the number of heads, of kernels whose programs have all of them
_BY_HEADS = {
    "mix_kernel": {
        2: {64: [(16, 128, 4, 4)]},
        4: {16: [(16, 128, 4, 2)], 64: [(16, 64, 4, 2)]},
    },
    "mixed_bwd_ds_kernel": {
        2: {64: [(16, 128, 4, 3)]},
        4: {16: [(16, 128, 4, 2)], 64: [(16, 64, 4, 2)]},
    },
    "mixed_bwd_dm_kernel": {
        2: {8: [(1, 128, 1, 2)], 64: [(4, 128, 2, 3)]},
        4: {16: [(4, 128, 4, 2)], 64: [(4, 64, 4, 2)]},
    },
}
_TILES = {**_BY_HEAD_DIM, **_BY_HEADS}


def strip_bytes() -> int:
    """Return the bytes that all strips of a call may take: MIXHEAD_STRIP_MIB, or 512 MiB."""
    return bytes_from("MIXHEAD_STRIP_MIB", 512)


def tiles_for(kernel: str, heads: int, head_dim: int, itemsize: int) -> list[Tile]:
    """Return the candidates of a kernel, the likeliest first.

    Args:
        kernel: its name
        heads: H
        head_dim: the larger one of both head sizes
        itemsize: bytes of a number
    """
    size = heads if kernel in _BY_HEADS else head_dim
    by_size = _TILES[kernel][itemsize]
    smallest = min(most for most in by_size if most >= size)
    return [Tile(*sizes) for sizes in by_size[smallest]]


_chosen: dict[Hashable, Tile] = {}
_QUEUEING = 5_000_000  # clocks of the device, some 3 ms; the host launches a kernel in much less
_REPEATS = 3  # of a measurement
_LAUNCHES = 5  # that are timed together


def run(
    key: Hashable, tiles: list[Tile], launch: Callable[[Tile], Any], device: torch.device
) -> Any:
    """Return what `launch` returns for the fastest of the tiles, chosen once for each `key`.

    Off the GPU and while a CUDA graph is captured nothing can be timed. Under
    `torch.use_deterministic_algorithms` every process must choose alike. In these cases the first
    tile that fits is taken.

    Args:
        key: what the calls have in common for which the same tile is fastest
        tiles: the candidates, the likeliest first
        launch: launches the kernel with a tile
        device: the device of the call
    """
    untimed = device.type != "cuda" or torch.are_deterministic_algorithms_enabled()
    key = (key, device, untimed)
    if key in _chosen:
        try:
            return launch(_chosen[key])
        except OutOfResources:
            # The call that chose this tile needed less memory. Nothing was launched; choose again.
            pass
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return first_fitting(tiles, launch)[1]
    # A single tile is not timed. Its kernel may write over what it reads, so it is launched once.
    if untimed or len(tiles) == 1:
        _chosen[key], result = first_fitting(tiles, launch)
        return result
    _chosen[key] = _fastest(tiles, launch)
    return launch(_chosen[key])


def most_candidates(heads: int, head_dim: int, itemsize: int) -> int:
    """Return the length of the longest list that `tiles_for` returns for such heads.

    Kernels that have all heads have one candidate each.
    """
    return max(len(tiles_for(kernel, heads, head_dim, itemsize)) for kernel in _BY_HEAD_DIM)


def first_fitting(tiles: list[Tile], launch: Callable[[Tile], Any]) -> tuple[Tile, Any]:
    """Return the first tile that fits the device, with what `launch` returned."""
    return next(_fitting(tiles, launch))


def _fitting(tiles: list[Tile], launch: Callable[[Tile], Any]) -> Iterator[tuple[Tile, Any]]:
    """Yield the tiles that fit the device, with what `launch` returned.

    If none fits, the last one is made smaller until it does.
    """
    left = list(tiles)
    found = False
    while left:
        tile = left.pop(0)
        try:
            result = launch(tile)
        except OutOfResources:
            if not left and not found:
                smaller = _smaller(tile)
                if smaller is None:
                    raise
                left.append(smaller)
            continue
        found = True
        yield tile, result


def _fastest(tiles: list[Tile], launch: Callable[[Tile], Any]) -> Tile:
    fitting = [tile for tile, _ in _fitting(tiles, launch)]
    if len(fitting) == 1:
        return fitting[0]
    return min(fitting, key=lambda tile: _milliseconds(partial(launch, tile)))


def _smaller(tile: Tile) -> Tile | None:
    """Return a tile that needs about half of the memory, or None."""
    if tile.stages > 1:
        return tile._replace(stages=1)
    if max(tile.BM, tile.BN) > 16:
        return tile._replace(BM=_halved(tile.BM), BN=_halved(tile.BN))
    return None


def _halved(size: int) -> int:
    return size // 2 if size > 16 else size


def _milliseconds(function: Callable[[], Any]) -> float:
    """Return the median time of one launch on the device.

    The launches wait in its queue while the host makes them.
    """
    found = []
    for _ in range(_REPEATS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_QUEUEING)
        begin.record()
        for _ in range(_LAUNCHES):
            function()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / _LAUNCHES)
    return statistics.median(found)
