"""The shared memory of blocks that run together.

It notes what is written, by whom, and what is still being copied.
"""

from typing import Any

import numpy as np

from tests.ptx.memory import refuse
from tests.ptx.numbers import BITS, S64, U8

NEVER, WRITTEN, COPYING = 0, 1, 2  # what a byte holds


class Shared:
    """Hold the bytes of all blocks, each block's a `pitch` apart. Between two barriers of a block a
    race is refused:

    two warps touch one byte and one of them writes, in whatever order they ran here. Equal numbers
    are no race.
    """

    def __init__(self, size: int, blocks: int, block_of, warp_of, who):
        if warp_of.max() > 7:
            raise NotImplementedError("more than 8 warps in a block")
        self.size, self.pitch = size, -(-max(size, 1) // 16) * 16
        self.bytes = np.full(blocks * self.pitch, 0x7F, U8)
        self.state = np.zeros_like(self.bytes)
        # The warps that touched a byte since the last barrier, one bit each.
        self.readers, self.writers = np.zeros_like(self.bytes), np.zeros_like(self.bytes)
        self.base, self.bit, self.who = (
            block_of.astype(S64) * self.pitch,
            (1 << warp_of).astype(U8),
            who,
        )
        self.copies = []  # on their way: (site, first bytes, lanes, data, groups)
        self.groups = np.zeros(len(block_of), S64)  # how many each thread has committed

    def read(self, site: Any, on, address, count: int, kind: np.dtype):
        """Return [count, threads] of numbers."""
        size = kind.itemsize * count
        at = self._places(site, on, address, size)
        if ((state := self._gather(self.state, at, size)) != WRITTEN).any():
            self._refuse(
                "reads before its wait what a cp.async copies", state == COPYING, site, on, at
            )
            self._refuse("reads what nothing wrote", state == NEVER, site, on, at)
        if (writers := self._gather(self.writers, at, size)).any():
            own = self.bit[on][:, None]
            # if both wrote it, the numbers are equal
            another = (writers & ~own != 0) & (writers & own == 0)
            self._refuse(
                "race: reads what another warp writes without a barrier", another, site, on, at
            )
        self._mark(self.readers, at, size, on)
        return self._gather(self.bytes, at, size).view(kind).T

    def store(self, site: Any, on, address, values: list) -> None:
        data = np.stack(values, 1).view(U8)  # [threads, size]
        self._write(site, on, self._claim(site, on, address, data), data)

    def copy(self, site: Any, on, address, data) -> None:
        """Begin a copy of bytes [threads, size]; it is made as late as a wait allows."""
        at = self._claim(site, on, address, data)
        self._scatter(self.state, at, np.full_like(data, COPYING))
        self.copies.append((site, at, on, data, self.groups[on]))

    def commit(self, site: Any, on) -> None:
        self.groups[on] += 1

    def wait(self, site: Any, on, pending: int) -> None:
        """Make the copies of all groups of the threads but the last `pending`."""
        waiting = np.zeros(len(self.base), bool)
        left = []
        waiting[on] = True
        for copy, at, lanes, data, group in self.copies:
            done = waiting[lanes] & (group < self.groups[lanes] - pending)
            if done.any():  # from now on it counts as a store of its warp
                self._write(copy, lanes[done], at[done], data[done])
            if not done.all():
                left.append((copy, at[~done], lanes[~done], data[~done], group[~done]))
        self.copies = left

    def barrier(self, blocks) -> None:
        """Forget who touched what in the blocks of a mask, before their next interval."""
        for marks in (self.readers, self.writers):
            marks.reshape(len(blocks), self.pitch)[blocks] = 0

    def _places(self, site: Any, on, address, size: int):
        address = address.astype(S64)
        base = self.base[on]
        self._refuse(
            "outside", (address < 0) | (address + size > self.size), site, on, base + address
        )
        self._refuse("not aligned", address % size != 0, site, on, base + address)
        return base + address

    def _claim(self, site: Any, on, address, data):
        """Return the places.

        Refuse to change what another warp has touched since the barrier, or what is copied.
        """
        at = self._places(site, on, address, data.shape[1])
        copying = self._gather(self.state, at, data.shape[1]) == COPYING
        self._refuse("writes where a copy is on its way", copying, site, on, at)
        self._alone("race: writes what another warp touches without a barrier", site, on, at, data)
        return at

    def _alone(self, what: str, site: Any, on, at, data) -> None:
        touched = self._gather(self.readers, at, data.shape[1]) | self._gather(
            self.writers, at, data.shape[1]
        )
        if (touched := touched & ~self.bit[on][:, None] != 0).any():
            self._refuse(
                what, touched & (self._gather(self.bytes, at, data.shape[1]) != data), site, on, at
            )

    def _write(self, site: Any, on, at, data) -> None:
        self._scatter(self.bytes, at, data)
        self._mark(self.writers, at, data.shape[1], on)
        # Lanes of one warp may store copies of a sum that differ in the last bit: any of them is
        # right.
        self._alone("race: two warps write different numbers at once", site, on, at, data)
        self._scatter(self.state, at, np.full_like(data, WRITTEN))

    def _mark(self, marks, at, size: int, on) -> None:
        """Add each lane's warp; one warp at a time, for many may touch one byte."""
        for bit in np.unique(self.bit[on]):
            mine = at[self.bit[on] == bit]
            self._scatter(marks, mine, self._gather(marks, mine, size) | bit)

    def _refuse(self, what: str, bad, site: Any, on, at) -> None:
        if bad.any():
            place = f"{self.size} of shared memory"
            refuse(
                what,
                bad.reshape(len(on), -1).any(1),
                place,
                at - self.base[on],
                site,
                self.who[:, on],
            )

    @staticmethod
    def _gather(marks, at, size: int):
        """Return the bytes of aligned accesses, [threads, size]."""
        kind = BITS[min(size, 8)]
        return marks.view(kind).reshape(-1, size // kind.itemsize)[at // size].view(U8)

    @staticmethod
    def _scatter(marks, at, values) -> None:
        kind = BITS[min(values.shape[1], 8)]
        marks.view(kind).reshape(-1, values.shape[1] // kind.itemsize)[at // values.shape[1]] = (
            values.view(kind)
        )
