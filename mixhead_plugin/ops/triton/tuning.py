"""How large a tile each kernel takes: everything that depends on the device's size, and nothing else, is here.

The tables give a few candidates for each kernel, head size and dtype, the likeliest first. Where there is a choice, the
first call on a GPU times them, and its choice is kept for the process.
"""

import statistics
from typing import Any, Callable, Dict, Hashable, List, NamedTuple, Optional

import torch
import triton
from triton.runtime.errors import OutOfResources


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
        sizes = {name: getattr(self, name) for name in ("BM", "BN", "HC", "HK", "HG") if name in kernel.arg_names}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


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
    """Tiles of the kernels in heads_apart.py for a padded head size"""
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
            (4, 64): [(32, 32, 4, 2, 4, 4), (64, 16, 8, 2, 4, 4)],
            (8, 64): [(32, 32, 8, 2, 8, 8), (32, 16, 8, 2, 8, 8)],
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
            (4, 64): [(32, 16, 4, 2, 4, 4), (32, 32, 8, 2, 4, 4)],
            (8, 64): [(16, 32, 8, 2, 8, 8), (32, 16, 8, 2, 8, 8)],
            (8, 128): [(16, 16, 8, 2, 8, 8)],
            (16, 64): [(16, 16, 8, 2, 16, 16), (16, 16, 8, 2, 16, 8)],
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
    together = triton.next_power_of_2(heads)
    return [Tile(*rest, min(chunk, together), min(group, together)) for *rest, chunk, group in sizes]


_chosen: Dict[Hashable, Tile] = {}


def run(key: Hashable, tiles: List[Tile], launch: Callable[[Tile], Any], device: torch.device) -> Any:
    """What `launch` returns for the fastest of the tiles; `key` tells calls apart for which another may be best."""
    key = (key, device)
    if key not in _chosen:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return launch(tiles[0])  # nothing may be timed
        _chosen[key] = _fastest(tiles, launch) if device.type == "cuda" else tiles[0]
    return launch(_chosen[key])


def _fastest(tiles: List[Tile], launch: Callable[[Tile], Any]) -> Tile:
    fitting = []
    for tile in tiles:
        try:
            launch(tile)
            fitting.append(tile)
        except OutOfResources as error:  # a smaller device than the tables were made for
            problem = error
    if not fitting:
        smaller = _smaller(tiles[-1])
        if smaller is None:
            raise problem
        return _fastest([smaller], launch)
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


def _milliseconds(function: Callable[[], Any], repeats: int = 5) -> float:
    found = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found)
