"""How large a tile each kernel takes: everything that depends on the device's size, and nothing else, is here.

The tables give a few candidates for each kernel, head size and dtype, the likeliest first. Where there is a choice, the
first call on a GPU times them, and its choice is kept for the process.
"""

import functools
import inspect
import statistics
from typing import Any, Callable, Dict, FrozenSet, Hashable, Iterator, List, NamedTuple, Optional, Tuple

import torch
from triton.runtime.errors import OutOfResources


def ceil_div(a: int, b: int) -> int:
    """triton.cdiv takes 40 times as long, at every call of the attention."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest that is at least n; triton.next_power_of_2 takes as long."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


@functools.lru_cache(None)
def names_of(function: Callable[..., Any]) -> Tuple[FrozenSet[str], Tuple[str, ...]]:
    """The names of a kernel's arguments, and those among them that a tile sets

    Of the function that triton compiles: hashing what it makes of that takes a microsecond.
    """
    names = frozenset(inspect.signature(function).parameters)
    return names, tuple(name for name in ("BM", "BN", "HC", "HK", "HG") if name in names)


class Tile(NamedTuple):
    """The sizes that a kernel is compiled for."""

    BM: int  # queries
    BN: int  # keys
    warps: int
    stages: int
    HC: int = 1  # heads computed at once
    HG: int = 1  # heads that a program adds to

    @property
    def HK(self) -> int:
        """HC as the mixing sees it: tensor cores multiply 16 at a time"""
        return max(16, self.HC)

    def options(self, kernel: Any) -> Dict[str, int]:
        """The kernel's own sizes and the compiler's options"""
        options = {name: getattr(self, name) for name in names_of(kernel.fn)[1]}
        options.update(num_warps=self.warps, num_stages=self.stages)
        return options


# Heads apart: (BM, BN, warps, stages) by the padded head size, for two and for four bytes a number.
_APART = {
    "forward": {
        2: {
            64: [(128, 64, 4, 3), (128, 128, 8, 3)],
            128: [(128, 64, 8, 3), (128, 32, 4, 3)],
            256: [(128, 32, 8, 2), (64, 32, 4, 2)],
        },
        4: {64: [(64, 16, 8, 2)], 128: [(32, 16, 8, 2)], 256: [(16, 16, 8, 1)]},
    },
    "query_grad": {
        2: {
            64: [(128, 64, 8, 2), (64, 64, 4, 3)],
            128: [(128, 32, 8, 2), (64, 64, 4, 2)],
            256: [(64, 16, 4, 2), (128, 32, 8, 1)],
        },
        4: {64: [(32, 16, 8, 1)], 128: [(32, 16, 8, 1)], 256: [(16, 16, 8, 1)]},
    },
    "key_grad": {
        2: {64: [(64, 128, 8, 2), (64, 64, 4, 3)], 128: [(32, 128, 8, 2)], 256: [(64, 32, 8, 1), (32, 32, 8, 1)]},
        4: {64: [(16, 32, 8, 1)], 128: [(16, 32, 8, 1)], 256: [(16, 16, 8, 1)]},
    },
}


def apart(kernel: str, head_dim: int, itemsize: int) -> List[Tile]:
    """Tiles of the kernels in flash.py for a padded head size"""
    table = _APART[kernel][itemsize]
    return [Tile(*sizes) for sizes in table[min(size for size in table if size >= head_dim)]]


# Heads mixed: (BM, BN, warps, stages, HC, HG) by the largest numbers of heads and of the padded head size, first fit.
_MIXED = {
    "forward": {
        2: {
            (4, 64): [(64, 32, 8, 2, 4, 4), (32, 32, 4, 2, 4, 4)],
            (8, 64): [(64, 16, 8, 2, 8, 8), (32, 32, 8, 2, 8, 8)],
            (8, 128): [(32, 16, 8, 2, 8, 8)],
            (16, 64): [(32, 16, 8, 2, 16, 16)],
            (64, 16): [(16, 16, 8, 2, 16, 32)],
            (64, 64): [(32, 16, 8, 1, 16, 16)],
            (64, 128): [(16, 16, 8, 1, 8, 8)],
            (64, 256): [(16, 16, 8, 2, 4, 4)],
        },
        4: {
            (16, 16): [(16, 16, 8, 1, 16, 16)],
            (64, 64): [(16, 16, 8, 1, 8, 8)],
            (64, 128): [(16, 16, 8, 1, 4, 4)],
            (64, 256): [(16, 16, 8, 1, 2, 2)],
        },
    },
    "mixing_grad": {
        2: {
            (4, 64): [(32, 32, 4, 2, 4, 4), (64, 32, 8, 2, 4, 4)],
            (8, 64): [(32, 32, 8, 2, 8, 8), (64, 16, 8, 2, 8, 8)],
            (8, 128): [(32, 16, 8, 1, 8, 8), (16, 16, 8, 2, 8, 8)],
            (16, 64): [(32, 16, 8, 1, 16, 16), (16, 32, 8, 1, 16, 16)],
            (64, 16): [(16, 16, 8, 1, 32, 32)],
            (64, 64): [(16, 16, 8, 1, 16, 16)],
            (64, 128): [(16, 16, 8, 1, 8, 8)],
            (64, 256): [(16, 16, 8, 1, 4, 4)],
        },
        4: {
            (64, 32): [(16, 16, 8, 1, 8, 8)],
            (64, 128): [(16, 16, 8, 1, 4, 4)],
            (64, 256): [(16, 16, 8, 1, 2, 2)],
        },
    },
    "query_grad": {
        2: {
            (4, 64): [(32, 16, 4, 2, 4, 4), (32, 32, 4, 1, 4, 4)],
            (8, 64): [(32, 16, 8, 2, 8, 8), (32, 32, 8, 1, 8, 8)],
            (8, 128): [(16, 16, 8, 2, 8, 8), (32, 16, 8, 2, 8, 4)],
            (16, 64): [(32, 16, 8, 2, 16, 8), (16, 16, 8, 2, 16, 16)],
            (64, 16): [(16, 16, 8, 1, 16, 32)],
            (64, 64): [(16, 16, 8, 1, 16, 16)],
            (64, 128): [(16, 16, 8, 1, 8, 8)],
            (64, 256): [(16, 16, 8, 2, 4, 4)],
        },
        4: {
            (64, 32): [(16, 16, 8, 1, 8, 8)],
            (64, 128): [(16, 16, 8, 1, 4, 4)],
            (64, 256): [(16, 16, 8, 1, 2, 2)],
        },
    },
    "key_grad": {
        2: {
            (4, 64): [(32, 16, 4, 2, 4, 4), (32, 32, 8, 1, 4, 4)],
            (8, 64): [(16, 32, 8, 2, 8, 8), (32, 16, 8, 2, 8, 8), (16, 32, 8, 1, 8, 8)],
            (8, 128): [(16, 16, 8, 2, 8, 8), (16, 16, 8, 1, 8, 8)],
            (16, 64): [(16, 16, 8, 1, 16, 16), (16, 16, 8, 2, 16, 16)],
            (64, 16): [(16, 16, 8, 1, 16, 16)],
            (64, 64): [(16, 16, 8, 1, 16, 8)],
            (64, 128): [(16, 16, 8, 1, 8, 4)],
            (64, 256): [(16, 16, 8, 1, 4, 2)],
        },
        4: {
            (64, 32): [(16, 16, 8, 1, 8, 8)],
            (64, 128): [(16, 16, 8, 1, 4, 4)],
            (64, 256): [(16, 16, 8, 1, 2, 2)],
        },
    },
}


def mixed(kernel: str, heads: int, head_dim: int, itemsize: int) -> List[Tile]:
    """Tiles of the kernels in heads_mixed.py for a padded head size"""
    table = _MIXED[kernel][itemsize]
    sizes = next(sizes for limits, sizes in table.items() if heads <= limits[0] and head_dim <= limits[1])
    together = power_of_2(heads)
    return [Tile(*rest, min(chunk, together), min(group, together)) for *rest, chunk, group in sizes]


_chosen: Dict[Hashable, Tile] = {}
_QUEUEING = 5_000_000  # clocks of the device, some 3 ms: the host starts a kernel in a fraction of one


def run(key: Hashable, tiles: List[Tile], launch: Callable[[Tile], Any], device: torch.device) -> Any:
    """What `launch` returns for the fastest of the tiles; `key` tells calls apart for which another may be best.

    It is the first that fits where none may be timed, while a CUDA graph is captured, and where the choice must be the
    same in every process, under `torch.use_deterministic_algorithms`.
    """
    first = device.type != "cuda" or torch.are_deterministic_algorithms_enabled()
    key = (key, device, first)
    if key in _chosen:
        try:
            return launch(_chosen[key])
        except OutOfResources:  # nothing was started; the call that it was chosen for needed less
            pass
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return next(_fitting(tiles, launch))[1]
    if first:
        _chosen[key], result = next(_fitting(tiles, launch))
        return result
    _chosen[key] = _fastest(tiles, launch)
    return launch(_chosen[key])


def _fitting(tiles: List[Tile], launch: Callable[[Tile], Any]) -> Iterator[Tuple[Tile, Any]]:
    """The tiles the device has room for, each with what `launch` returned; if none, one made from the last."""
    left, found = list(tiles), False
    while left:
        tile = left.pop(0)
        try:
            result = launch(tile)
        except OutOfResources:  # a smaller device than the tables were made for
            smaller = _smaller(tile)
            if left or found:
                continue
            if smaller is None:
                raise
            left.append(smaller)
        else:
            found = True
            yield tile, result


def _fastest(tiles: List[Tile], launch: Callable[[Tile], Any]) -> Tile:
    fitting = [tile for tile, _ in _fitting(tiles, launch)]
    if len(fitting) == 1:
        return fitting[0]
    times = {tile: _milliseconds(lambda tile=tile: launch(tile)) for tile in fitting}
    return min(times, key=times.get)


def _smaller(tile: Tile) -> Optional[Tile]:
    """One that needs about half of the memory"""
    if tile.stages > 1:
        return tile._replace(stages=1)
    if max(tile.BM, tile.BN) > 16:
        return tile._replace(BM=max(16, tile.BM // 2), BN=max(16, tile.BN // 2))
    if max(tile.HC, tile.HG) > 1:
        return tile._replace(HC=max(1, tile.HC // 2), HG=max(1, tile.HG // 2))
    return None


def _milliseconds(function: Callable[[], Any], repeats: int = 3, launches: int = 5) -> float:
    """The device's time for one of several launches, which wait in its queue while the host makes them"""
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_QUEUEING)
        begin.record()
        for _ in range(launches):
            function()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / launches)
    return statistics.median(found)
