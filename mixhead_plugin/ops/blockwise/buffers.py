"""Memory that serves one block after the other."""

import math

from torch import Tensor


class Buffers:
    """The memory of one thread for what a block computes on its way.

    Every block reuses it, because fresh pages of the system cost as much time as computing what is
    written to them.

    A buffer has the name of what it holds. One step of a block writes it, and later steps of the
    same block read it. Where a step takes a buffer that has held something else, a comment says who
    has read that for the last time. A test gives each use memory of its own: nothing changes.

    Args:
        like: a tensor of the dtype and on the device of the buffers
        largest: numbers in the largest block of scores or of mixed weights
    """

    def __init__(self, like: Tensor, largest: int):
        self.like = like
        self.largest = largest
        self.memory: dict[str, Tensor] = {}  # of each buffer, by its name
        self.views: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # by name and shape

    def get(self, name: str, shape: tuple[int, ...], most: int | None = None) -> Tensor:
        """Return a buffer; what stands in it is left from some block before.

        Args:
            name: name of what it will hold
            shape: its shape in this block
            most: numbers in the largest block; None for the scores of the largest block
        """
        view = self.views.get((name, shape))
        if view is not None:
            return view
        if name not in self.memory:
            self.memory[name] = self.like.new_empty(most or self.largest)
        view = self.memory[name][: math.prod(shape)].view(shape)
        self.views[name, shape] = view
        return view
