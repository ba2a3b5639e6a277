"""The global memory of a launch: its tensors, each in a range of addresses of its own."""

import ctypes
from typing import Any

import numpy as np

from tests.ptx.numbers import BITS, S64, U64

RANGE = 40  # bits of the addresses of one tensor


class Fault(Exception):
    """Say what an instruction may not do, with its text, thread and address."""


def refuse(what: str, bad, place: str, first, site: Any, who) -> None:
    """Raise the first fault of some accesses.

    `who` holds the blocks of their threads and the threads' numbers.
    """
    for n in np.flatnonzero(bad)[:1]:
        thread = f"thread {who[1, n]} of block {who[0, n]}"
        raise Fault(f"{what}: byte {first[n]} of {place}: {site}, {thread}")


class _Tensor:
    def __init__(self, tensor: Any, n: int):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        extent = 1 + last if tensor.numel() else 0
        self.item, self.tensor, start = tensor.element_size(), tensor, tensor.data_ptr()
        self.bytes = extent * self.item
        self.name = f"argument {n}, {tuple(tensor.shape)} of {tensor.dtype} ({self.bytes} bytes)"
        # in the middle of its range
        self.address, self.low = (2 * n + 1 << RANGE - 1) + start % 4096, start % 16
        # Views of all widths begin at a multiple of 16; what lies before and behind the tensor is
        # never touched.
        memory = (ctypes.c_uint8 * (-(-(self.low + self.bytes) // 16) * 16)).from_address(
            start - self.low
        )
        self.views = {kind: np.frombuffer(memory, kind) for kind in BITS.values()}
        self.writer = np.full(extent, -1, np.int32)  # the block that wrote each number
        self.reads = []  # (instruction, threads, first bytes, size)

    def items(self, offset, size: int):
        """Return the numbers that accesses touch, [accesses, numbers]."""
        return (offset // self.item)[:, None] + np.arange(-(-size // self.item))


class Memory:
    """Find the tensor of each access.

    Refuse accesses outside or not aligned, and races between blocks.
    """

    def __init__(self, tensors: list[Any]):
        self.tensors = [_Tensor(tensor, n) for n, tensor in enumerate(tensors)]
        self.who: Any = None  # the threads that run now, [2, lanes]

    def read(self, site: Any, on, address, count: int, kind: np.dtype):
        """Return [count, threads] of numbers."""
        who = self.who[:, on]
        tensor, offset = self._place(site, who, address, kind.itemsize * count)
        tensor.reads.append((site, who, offset, kind.itemsize * count))
        at = (offset + tensor.low) // kind.itemsize
        return tensor.views[kind][at + np.arange(count)[:, None]]

    def store(self, site: Any, on, address, values: list) -> None:
        kind = values[0].dtype
        who = self.who[:, on]
        blocks = who[0][:, None]
        tensor, offset = self._place(site, who, address, kind.itemsize * len(values))
        items = tensor.items(offset, kind.itemsize * len(values))
        before = tensor.writer[items]
        tensor.writer[items] = blocks
        other = (before >= 0) & (before != blocks) | (tensor.writer[items] != blocks)
        refuse("race: two blocks write", other.any(1), tensor.name, offset, site, who)
        view = tensor.views[kind]
        at = (offset + tensor.low) // kind.itemsize
        for n, value in enumerate(values):
            view[at + n] = value
            refuse(
                "two threads store different numbers",
                view[at + n] != value,
                tensor.name,
                offset,
                site,
                who,
            )

    def end(self) -> None:
        """Refuse reads of what another block wrote, whatever the order in which they ran here."""
        for tensor in self.tensors:
            for site, who, offset, size in tensor.reads if (tensor.writer >= 0).any() else ():
                writer = tensor.writer[tensor.items(offset, size)]
                other = ((writer >= 0) & (writer != who[0][:, None])).any(1)
                refuse(
                    "race: reads what another block writes", other, tensor.name, offset, site, who
                )

    def _place(self, site: Any, who, address, size: int) -> tuple[_Tensor, Any]:
        """Return the tensor of some accesses, and their offsets in bytes."""
        number = int(address[0] >> U64.type(RANGE))
        if number >= len(self.tensors):
            refuse("outside", [True], f"no tensor ({address[0]:#x})", address, site, who)
        tensor = self.tensors[number]
        offset = address.astype(S64) - tensor.address
        refuse(
            "outside", (offset < 0) | (offset + size > tensor.bytes), tensor.name, offset, site, who
        )
        refuse(
            "not aligned",
            (address & U64.type((size & -size) - 1)) != 0,
            tensor.name,
            offset,
            site,
            who,
        )
        return tensor, offset
