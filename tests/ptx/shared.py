"""The shared memory of blocks that run together: what is written, by whom, and what is still being copied."""

from typing import Any

import numpy as np

from tests.ptx.memory import Fault, Threads
from tests.ptx.numbers import BITS, S64, U8

NEVER, WRITTEN, COPYING = 0, 1, 2  # what a byte holds
SEVERAL = 255  # more than one warp; else the number of the warp + 1, or 0


class Shared:
    """Hold the bytes of all blocks, each block's a `pitch` apart. Between two barriers of a block a race is refused:

    two warps touch one byte and one of them writes, in whatever order they ran here. Equal numbers are no race.
    """

    def __init__(self, size: int, blocks: int, block_of, warp_of, who: Threads):
        self.size, self.pitch = size, -(-max(size, 1) // 16) * 16
        self.bytes = np.full(blocks * self.pitch, 0x7F, U8)
        self.state, self.writer, self.reader = (np.zeros(blocks * self.pitch, U8) for _ in range(3))
        self.base, self.warp, self.who = block_of.astype(S64) * self.pitch, warp_of + 1, who
        self.reads, self.stores = [], []  # since the last barrier: (site, first bytes, size, lanes)
        self.marked = False  # whether a byte has a writer or a reader
        self.copies = []  # on their way: (site, first bytes, lanes, data, groups)
        self.groups = np.zeros(len(block_of), S64)  # how many each thread has committed

    def load(self, site: Any, on, address, count: int, kind: np.dtype):
        """Return [count, threads] of numbers."""
        size = kind.itemsize * count
        at = self._places(site, on, address, size)
        self._readable(site, on, at, size)
        return self._wide(self.bytes, at, size, kind).T

    def store(self, site: Any, on, address, data) -> None:
        """Store bytes [threads, size]."""
        at = self._places(site, on, address, data.shape[1])
        self._claim(site, on, at, data)
        self._write(site, on, at, data)

    def copy(self, site: Any, on, address, data) -> None:
        """Begin a copy of bytes [threads, size]; it is made as late as a wait allows."""
        at = self._places(site, on, address, data.shape[1])
        self._claim(site, on, at, data)
        self._scatter(self.state, at, data.shape[1], COPYING)
        self.copies.append((site, at, on, data, self.groups[on].copy()))

    def commit(self, on) -> None:
        self.groups[on] += 1

    def wait(self, pending: int, on) -> None:
        """Make the copies of all groups of the threads but the last `pending`."""
        waiting, left = np.zeros(len(self.base), bool), []
        waiting[on] = True
        for site, at, lanes, data, group in self.copies:
            done = waiting[lanes] & (group < self.groups[lanes] - pending)
            if done.any():  # from now on it counts as a store of its warp
                self._mark(site, lanes[done], at[done], data.shape[1])
                self._write(site, lanes[done], at[done], data[done])
            if not done.all():
                left.append((site, at[~done], lanes[~done], data[~done], group[~done]))
        self.copies = left

    def barrier(self, blocks) -> None:
        """Forget who touched what in the blocks of a mask, before their next interval."""
        for marks in (self.writer, self.reader) if self.marked else ():
            marks.reshape(len(blocks), self.pitch)[blocks] = 0
        self.marked &= not blocks.all()
        for log in (self.reads, self.stores):
            kept = []
            for site, at, size, lanes in log if not blocks.all() else ():
                stay = ~blocks[self.base[lanes] // self.pitch]
                if stay.any():
                    kept.append((site, at[stay], size, lanes[stay]))
            log[:] = kept

    def _places(self, site: Any, on, address, size: int):
        address = address.astype(S64)
        bad = (address < 0) | (address + size > self.size) | (address % size != 0)
        if bad.any():
            n = int(np.flatnonzero(bad)[0])
            what = "not aligned" if 0 <= address[n] <= self.size - size else "outside"
            raise Fault(f"{what}: byte {address[n]} of {self.size} of shared memory: {site}, {self.who.of(on[n:])}")
        return self.base[on] + address

    def _readable(self, site: Any, on, at, size: int) -> None:
        """Refuse to read what is not written, not yet copied, or written by another warp since the barrier."""
        if (bad := self._gather(self.state, at, size) != WRITTEN).any():
            copying = (self._gather(self.state, at, size) == COPYING).any(1)
            what = "reads before its wait what a cp.async copies" if copying.any() else "reads what nothing wrote"
            self._refuse(what, site, on, at, copying if copying.any() else bad.any(1))
        if self.stores:
            writer, own = self._gather(self.writer, at, size), self.warp[on][:, None]
            for n in np.flatnonzero(((writer != 0) & (writer != own)).any(1)):
                for byte in np.flatnonzero((writer[n] != 0) & (writer[n] != own[n])):
                    self._own_or_race(site, on[n:], at[n], at[n] + byte)
        self.reads.append((site, at, size, on))

    def _own_or_race(self, site: Any, on, at: int, byte: int) -> None:
        """Refuse a read of a byte that another warp wrote, unless the reading warp stored the same number itself."""
        wrote = {}
        for store, first, size, lanes in self.stores:
            for n in np.flatnonzero((first <= byte) & (byte < first + size)):
                wrote[int(self.warp[lanes[n]])] = store
        if int(self.warp[on[0]]) not in wrote:
            warp, store = next(iter(wrote.items()))
            here = f"byte {at % self.pitch} of shared memory: {site}, {self.who.of(on)}"
            raise Fault(f"race: reads what warp {warp - 1} writes by {store} without a barrier: {here}")

    def _claim(self, site: Any, on, at, data) -> None:
        """Refuse to change what another warp has read or written since the barrier; note the writer."""
        size, own = data.shape[1], self.warp[on][:, None]
        if (copying := self._gather(self.state, at, size) == COPYING).any():
            self._refuse("writes where a copy is on its way", site, on, at, copying.any(1))
        for _, first, width, lanes in self.reads:
            warp, before = self.warp[lanes][:, None], self._gather(self.reader, first, width)
            marks = np.where((before == 0) | (before == warp), warp, SEVERAL)
            self._scatter(self.reader, first, width, marks)
            lost = (self._gather(self.reader, first, width) != marks).any(1)
            self._scatter(self.reader, first[lost], width, SEVERAL)
        self.reads.clear()
        reader, writer = self._gather(self.reader, at, size), self._gather(self.writer, at, size)
        touched = ((reader != 0) & (reader != own)) | ((writer != 0) & (writer != own))
        race = (touched & (self._gather(self.bytes, at, size) != data)).any(1)
        if race.any():
            self._refuse("race: writes what another warp touches without a barrier", site, on, at, race)
        self._mark(site, on, at, size)

    def _mark(self, site: Any, on, at, size: int) -> None:
        self.marked = True
        self._scatter(self.writer, at, size, self.warp[on][:, None])
        self.stores.append((site, at, size, on))

    def _write(self, site: Any, on, at, data) -> None:
        size = data.shape[1]
        self._scatter(self.bytes, at, size, data)
        # Lanes of one warp may store copies of a sum that differ in the last bit: any of them is right.
        other = self._gather(self.writer, at, size) != self.warp[on][:, None]
        if (lost := (other & (self._gather(self.bytes, at, size) != data)).any(1)).any():
            self._refuse("race: two warps write different numbers at once", site, on, at, lost)
        self._scatter(self.state, at, size, WRITTEN)

    def _refuse(self, what: str, site: Any, on, at, bad) -> None:
        n = int(np.flatnonzero(bad)[0])
        raise Fault(f"{what}: byte {at[n] % self.pitch} of shared memory: {site}, {self.who.of(on[n:])}")

    @staticmethod
    def _wide(bytes_, at, size: int, kind: np.dtype):
        """Return [threads, numbers] of aligned accesses."""
        count = size // kind.itemsize
        return bytes_.view(kind).reshape(-1, count)[at // size] if count > 1 else bytes_.view(kind)[at // size][:, None]

    def _gather(self, marks, at, size: int):
        """Return the bytes of accesses, [threads, size]."""
        kind = BITS[min(size, 8)]
        return np.ascontiguousarray(self._wide(marks, at, size, kind)).view(U8)

    @staticmethod
    def _scatter(marks, at, size: int, values) -> None:
        kind = BITS[min(size, 8)]
        values = np.ascontiguousarray(np.broadcast_to(np.asarray(values, U8), (len(at), size))).view(kind)
        marks.view(kind).reshape(-1, size // kind.itemsize)[at // size] = values
