"""The global memory of a launch: its tensors, each in a range of addresses of its own."""

import ctypes
from typing import Any, Iterator, NamedTuple

import numpy as np

from tests.ptx.numbers import BITS, S64, U8, U64

RANGE = 40  # bits of the addresses of one tensor


class Fault(Exception):
    """Say what an instruction may not do, with its text, thread and address."""


class Thread(NamedTuple):
    """Name a thread in an error."""

    block: int
    thread: int

    def __str__(self):
        return f"thread {self.thread} of block {self.block}"


class _Tensor:
    def __init__(self, tensor: Any, n: int):
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        self.item, self.tensor, start = tensor.element_size(), tensor, tensor.data_ptr()
        self.bytes = (extent if tensor.numel() else 0) * self.item
        self.name = f"argument {n}, {tuple(tensor.shape)} of {tensor.dtype}"
        self.address, self.low = (n + 1 << RANGE) + start % 4096, start % 16
        # Views of all widths begin at a multiple of 16; what lies before and behind the tensor is never touched.
        memory = (ctypes.c_uint8 * (-(-(self.low + self.bytes) // 16) * 16)).from_address(start - self.low)
        self.views = {kind: np.frombuffer(memory, kind) for kind in BITS.values()}
        self.inside = None
        if tensor.numel() < extent:  # there are gaps between its numbers
            self.inside = np.zeros(extent, bool)
            np.lib.stride_tricks.as_strided(self.inside, tensor.shape, tensor.stride())[...] = True
        self.writer, self.written = None, {}  # the block that wrote each number, -1 for none; the last instruction
        self.reads = []  # (instruction, first bytes, size, blocks)

    def items(self, offset, size: int):
        """Return the numbers that accesses touch, [accesses, numbers]."""
        return (offset // self.item)[:, None] + np.arange(-(-size // self.item))


class Memory:
    """Find the tensor of each access; refuse accesses outside, in a gap or not aligned, and races between blocks."""

    def __init__(self, tensors: list[Any]):
        self.tensors = [_Tensor(tensor, n) for n, tensor in enumerate(tensors)]

    def load(self, site: Any, address, count: int, kind: np.dtype, who: Any):
        """Return [count, threads] of numbers; `who` gives the blocks and the threads of the accesses."""
        found = np.empty((count, len(address)), kind)
        size = kind.itemsize * count
        for tensor, some, offset in self._places(site, address, size, who):
            tensor.reads.append((site, offset, size, who.block[some]))
            at = (offset + tensor.low) // kind.itemsize
            for n in range(count):
                found[n, some] = tensor.views[kind][at + n]
        return found

    def store(self, site: Any, address, values: list, kind: np.dtype, who: Any) -> None:
        for tensor, some, offset in self._places(site, address, kind.itemsize * len(values), who):
            self._claim(site, tensor, offset, kind.itemsize * len(values), who, some)
            view, at = tensor.views[kind], (offset + tensor.low) // kind.itemsize
            for n, value in enumerate(values):
                view[at + n] = value[some]
                if (lost := view[at + n] != value[some]).any():
                    self._refuse("two threads store different numbers", site, tensor, offset, some, lost, who)

    def add(self, site: Any, address, value, who: Any):
        """Return the old numbers and add to them; neighbours see one another's, and blocks may meet."""
        old = np.empty_like(value)
        for tensor, some, offset in self._places(site, address, value.itemsize, who):
            view = tensor.views[BITS[value.itemsize]].view(value.dtype)
            for lane, at in zip(np.arange(len(value))[some], (offset + tensor.low) // value.itemsize):
                old[lane], view[at] = view[at], view[at] + value[lane]
        return old

    def end(self) -> None:
        """Refuse reads of what another block wrote, whatever the order in which they ran here."""
        for tensor in self.tensors:
            for site, offset, size, blocks in tensor.reads if tensor.writer is not None else ():
                writer = tensor.writer[tensor.items(offset, size)]
                if (other := ((writer >= 0) & (writer != blocks[:, None])).any(1)).any():
                    n = int(np.flatnonzero(other)[0])
                    write = tensor.written[int(writer[n].max())]
                    raise Fault(f"race: {site} of block {blocks[n]} reads byte {offset[n]} of {tensor.name}, "
                                f"where {write} of block {writer[n].max()} writes")

    def _places(self, site: Any, address, size: int, who: Any) -> Iterator[tuple]:
        """Yield each tensor with its accesses (an index) and their offsets in bytes."""
        numbers = address >> U64.type(RANGE)
        for number in np.unique(numbers):
            some = slice(None) if (numbers == number).all() else np.flatnonzero(numbers == number)
            if not 1 <= number <= len(self.tensors):
                raise Fault(f"address {address[some][0]:#x} is in no tensor: {site}, {who.first(some)}")
            tensor = self.tensors[int(number) - 1]
            offset = address[some].astype(S64) - tensor.address
            outside = (offset < 0) | (offset + size > tensor.bytes)
            if outside.any():
                self._refuse("outside", site, tensor, offset, some, outside, who)
            if (skew := (address[some] & U64.type(size - 1)) != 0).any():
                self._refuse("not aligned", site, tensor, offset, some, skew, who)
            if tensor.inside is not None and (gap := ~tensor.inside[tensor.items(offset, size)].all(1)).any():
                self._refuse("in a gap of a strided tensor", site, tensor, offset, some, gap, who)
            yield tensor, some, offset

    def _claim(self, site: Any, tensor: _Tensor, offset, size: int, who: Any, some) -> None:
        """Note which block writes; refuse a second one."""
        if tensor.writer is None:
            tensor.writer = np.full(-(-tensor.bytes // tensor.item), -1, np.int32)
        items, blocks = tensor.items(offset, size), who.block[some][:, None]
        before = tensor.writer[items]
        tensor.writer[items] = blocks
        other = ((before >= 0) & (before != blocks) | (tensor.writer[items] != blocks)).any(1)
        if other.any():
            self._refuse("race: two blocks write", site, tensor, offset, some, other, who)
        tensor.written.update(dict.fromkeys(np.unique(blocks).tolist(), site))

    def _refuse(self, what: str, site: Any, tensor: _Tensor, offset, some, bad, who: Any) -> None:
        n = int(np.flatnonzero(bad)[0])
        lanes = np.arange(len(who.block))[some]
        raise Fault(f"{what}: byte {offset[n]} of {tensor.name} ({tensor.bytes} bytes): {site}, {who.first(lanes[n:])}")


class Threads(NamedTuple):
    """The blocks and the numbers of the threads of some accesses."""

    block: Any
    thread: Any

    def first(self, some) -> Thread:
        return Thread(int(self.block[some][0]), int(self.thread[some][0]))
