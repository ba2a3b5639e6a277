"""The order in which blocks of several threads add to one gradient."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from mixhead_plugin.ops.blockwise.block import Block
from mixhead_plugin.ops.blockwise.sharing import Sharing


class Turns:
    """Let blocks add to the same memory in the order of their numbers.

    Sums of floats depend on the order, so without turns two equal calls could differ.

    A block waits only for blocks that threads take before it. So another thread is at work on those
    already, and no two wait for one another.

    Args:
        blocks: those of the call
        shared: how they share each gradient
    """

    def __init__(self, blocks: Sequence[Block], shared: Mapping[str, Sharing]):
        self.shared = shared
        self.done: dict[str, list[threading.Event]] = {}
        for name, kind in shared.items():
            if kind in (Sharing.BY_GROUP, Sharing.BY_ALL):
                self.done[name] = [threading.Event() for _ in blocks]

    @contextmanager
    def turn(self, name: str, block: Block) -> Iterator[None]:
        """Wait for the last block before this one that adds to the same memory."""
        previous = block.number - 1
        if self.shared[name] is Sharing.BY_GROUP:
            # Blocks of other sentences or heads add to other memory.
            previous = block.previous
        if previous >= 0:
            self.done[name][previous].wait()
        try:
            yield
        finally:
            self.done[name][block.number].set()

    def give_up(self, block: Block) -> None:
        """Let later blocks pass, because this one will never have its turn."""
        for events in self.done.values():
            events[block.number].set()
