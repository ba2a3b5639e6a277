"""How the work of a kernel is split into programs, and how they are started."""

from typing import Any, NamedTuple

from mixhead_plugin.ops.rounding import ceil_div
from mixhead_plugin.ops.triton.tuning import Tile


class Grid(NamedTuple):
    """How the work of a kernel is split among its programs; `rows.split_program` reads it."""

    parts: int  # B * H: a program has one head of one sentence; B: it has all heads of one
    queries: int = 1  # a program has a tile of them; 1: it has all
    keys: int = 1  # as queries

    def programs(self, tile: Tile) -> int:
        """Return how many programs there are."""
        return self.parts * ceil_div(self.queries, tile.BM) * ceil_div(self.keys, tile.BN)


def start(kernel: Any, programs: int, arguments: dict[str, Any], tile: Tile) -> Any:
    """Launch a kernel and return what triton compiled, if it did; all launches pass here."""
    return kernel[(programs,)](**arguments, num_warps=tile.warps, num_stages=tile.stages)
