"""The global memory of a launch: its tensors, each in a range of addresses of its own."""

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.ptx.numbers import BITS, S64, U64

RANGE = 40  # bits of the addresses of one tensor


class Fault(Exception):
    """Say what an instruction may not do, with its text, thread and address."""


class Threads(NamedTuple):
    """The blocks and the numbers of the threads of some accesses."""

    block: Any
    thread: Any

    def of(self, some) -> "Threads":
        return Threads(self.block[some], self.thread[some])

    def __str__(self):
        return f"thread {self.thread[0]} of block {self.block[0]}"


class _Tensor:
    def __init__(self, tensor: Any, n: int):
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        self.item, self.tensor, start = tensor.element_size(), tensor, tensor.data_ptr()
        self.bytes = (extent if tensor.numel() else 0) * self.item
        self.name = f"argument {n}, {tuple(tensor.shape)} of {tensor.dtype}"
        self.address, self.low = (2 * n + 3 << RANGE - 1) + start % 4096, start % 16  # in the middle of its range
        # Views of all widths begin at a multiple of 16; what lies before and behind the tensor is never touched.
        memory = (ctypes.c_uint8 * (-(-(self.low + self.bytes) // 16) * 16)).from_address(start - self.low)
        self.views = {kind: np.frombuffer(memory, kind) for kind in BITS.values()}
        self.inside = None
        if tensor.numel() < extent:  # there are gaps between its numbers
            self.inside = np.zeros(extent, bool)
            np.lib.stride_tricks.as_strided(self.inside, tensor.shape, tensor.stride())[...] = True
        self.writer, self.written = None, {}  # the block that wrote each number, -1 for none; its last instruction
        self.reads = []  # (instruction, first bytes, size, threads)

    def items(self, offset, size: int):
        """Return the numbers that accesses touch, [accesses, numbers]."""
        return (offset // self.item)[:, None] + np.arange(-(-size // self.item))


class Memory:
    """Find the tensor of each access; refuse accesses outside, in a gap or not aligned, and races between blocks."""

    def __init__(self, tensors: list[Any]):
        self.tensors = [_Tensor(tensor, n) for n, tensor in enumerate(tensors)]

    def load(self, site: Any, address, count: int, kind: np.dtype, who: Threads):
        """Return [count, threads] of numbers."""
        found, size = np.empty((count, len(address)), kind), kind.itemsize * count
        for tensor, some, offset in self._places(site, address, size, who):
            tensor.reads.append((site, offset, size, who.of(some)))
            for n in range(count):
                found[n, some] = tensor.views[kind][(offset + tensor.low) // kind.itemsize + n]
        return found

    def store(self, site: Any, address, values: list, kind: np.dtype, who: Threads) -> None:
        for tensor, some, offset in self._places(site, address, kind.itemsize * len(values), who):
            mine = who.of(some)
            self._claim(site, tensor, offset, kind.itemsize * len(values), mine)
            view, at = tensor.views[kind], (offset + tensor.low) // kind.itemsize
            for n, value in enumerate(values):
                view[at + n] = value[some]
                other = view[at + n] != value[some]
                self._check("two threads store different numbers", other, site, tensor, offset, mine)

    def end(self) -> None:
        """Refuse reads of what another block wrote, whatever the order in which they ran here."""
        for tensor in self.tensors:
            for site, offset, size, who in tensor.reads if tensor.writer is not None else ():
                writer = tensor.writer[tensor.items(offset, size)]
                for n in np.flatnonzero(((writer >= 0) & (writer != who.block[:, None])).any(1))[:1]:
                    place = f"{who.of(slice(n, None))}, reads byte {offset[n]} of {tensor.name}"
                    other = f"{tensor.written[int(writer[n].max())]} of block {writer[n].max()}"
                    raise Fault(f"race: {site}, {place}, where {other} writes")

    def _places(self, site: Any, address, size: int, who: Threads) -> Iterator[tuple]:
        """Yield each tensor with its accesses (an index) and their offsets in bytes."""
        numbers = address >> U64.type(RANGE)
        for number in np.unique(numbers):
            some = slice(None) if (numbers == number).all() else np.flatnonzero(numbers == number)
            mine, at = who.of(some), address[some]
            if not 1 <= number <= len(self.tensors):
                raise Fault(f"address {at[0]:#x} is in no tensor: {site}, {mine}")
            tensor = self.tensors[int(number) - 1]
            offset = at.astype(S64) - tensor.address
            self._check("outside", (offset < 0) | (offset + size > tensor.bytes), site, tensor, offset, mine)
            self._check("not aligned", (at & U64.type(size - 1)) != 0, site, tensor, offset, mine)
            if tensor.inside is not None:
                gap = ~tensor.inside[tensor.items(offset, size)].all(1)
                self._check("in a gap of a strided tensor", gap, site, tensor, offset, mine)
            yield tensor, some, offset

    def _claim(self, site: Any, tensor: _Tensor, offset, size: int, who: Threads) -> None:
        """Note which block writes; refuse a second one."""
        if tensor.writer is None:
            tensor.writer = np.full(-(-tensor.bytes // tensor.item), -1, np.int32)
        items, blocks = tensor.items(offset, size), who.block[:, None]
        before = tensor.writer[items]
        tensor.writer[items] = blocks
        other = (before >= 0) & (before != blocks) | (tensor.writer[items] != blocks)
        self._check("race: two blocks write", other.any(1), site, tensor, offset, who)
        tensor.written.update(dict.fromkeys(np.unique(blocks).tolist(), site))

    def _check(self, what: str, bad, site: Any, tensor: _Tensor, offset, who: Threads) -> None:
        for n in np.flatnonzero(bad)[:1]:
            place = f"byte {offset[n]} of {tensor.name} ({tensor.bytes} bytes)"
            raise Fault(f"{what}: {place}: {site}, {who.of(slice(n, None))}")
