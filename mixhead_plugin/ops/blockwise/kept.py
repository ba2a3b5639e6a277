"""Memory for the weights that calls keep from their forward pass for their backward pass.

All calls of a process share one stretch of memory. MIXHEAD_KEPT_MIB gives its length, the budget:

    | call 1 | call 2 |  free  | call 4 |        free        |
    0                                                  budget

A call gets one piece of it for all its weights, or nothing. It holds its piece by a `handle`, a
tensor without elements that autograd saves. Once nothing refers to the handle any more, after the
backward pass or because activation checkpointing never saved it, the piece is free. A copy of a
handle is another tensor, and holds nothing; then the backward pass computes the weights again.

Pages of fresh memory cost more time than computing the weights again. So the stretch stays with the
process, and calls use the same pages again and again. The system provides those that were used.

The budget is read at each call. A smaller one counts at once for the calls that follow. For a
larger one the stretch has to be another, so it counts once no call waits for its backward pass.
"""

import os
import threading

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from mixhead_plugin.ops.environment import bytes_from
from mixhead_plugin.ops.rounding import round_up

# One causal call of 4,096 tokens and 8 heads needs a little more, so it keeps nothing.
DEFAULT_MIB = 256
ALIGNMENT = 64  # bytes, a line of the cache


class Memory:
    """A stretch of memory, and the pieces of it that handles hold."""

    def __init__(self) -> None:
        self.storage: UntypedStorage | None = None
        self.pieces: dict[StorageWeakRef, slice] = {}  # in bytes
        self.lock = threading.Lock()

    def reserve(self, size: int) -> Tensor:
        """Return a handle; it holds `size` bytes if a piece of that length is free.

        Raises:
            ValueError: if MIXHEAD_KEPT_MIB is no number of MiB
            RuntimeError: if it is more than the machine has
        """
        most = budget()
        handle = new_handle()
        with self.lock:
            self._forget_dropped()
            if self.storage is not None and self.storage.nbytes() != most and not self.pieces:
                self.storage = None
            if self.storage is not None:
                most = min(most, self.storage.nbytes())
            start = self._first_gap(size, most)
            if start is not None:
                if self.storage is None:
                    self.storage = _new_stretch(most)
                self.pieces[StorageWeakRef(handle.untyped_storage())] = slice(start, start + size)
        return handle

    def piece(self, handle: Tensor, size: int, dtype: torch.dtype) -> Tensor | None:
        """Return the numbers that a handle holds, if they take `size` bytes; None if not."""
        held = self.pieces.get(StorageWeakRef(handle.untyped_storage()))
        if held is None or self.storage is None or held.stop - held.start != size:
            return None
        numbers = torch.empty(0, dtype=dtype, device="cpu")
        length = size // dtype.itemsize
        return numbers.set_(self.storage, held.start // dtype.itemsize, (length,), (1,))

    def _forget_dropped(self) -> None:
        dropped = [handle for handle in self.pieces if handle.expired()]
        for handle in dropped:
            del self.pieces[handle]

    def _first_gap(self, size: int, most: int) -> int | None:
        """Return where the first free piece of `size` bytes starts; None if there is none.

        Args:
            size: bytes of the piece
            most: the bytes of the stretch that may be used
        """
        start = 0
        for piece in sorted(self.pieces.values(), key=lambda piece: piece.start):
            if start + size <= piece.start:
                break
            start = round_up(piece.stop, ALIGNMENT)
        return start if start + size <= most else None


def budget() -> int:
    """Return the bytes that all calls of this process may keep together; 0 for none."""
    return bytes_from("MIXHEAD_KEPT_MIB", DEFAULT_MIB)


def _new_stretch(size: int) -> UntypedStorage:
    """Return fresh memory of `size` bytes."""
    try:
        return UntypedStorage(size)
    except (RuntimeError, ValueError):  # the latter where torch has no integer for the size
        raise RuntimeError(
            f"MIXHEAD_KEPT_MIB={size / 2**20:g}: this machine has not so much memory; must be "
            "less, or 0 to keep no weights"
        ) from None


MEMORY = Memory()


def new_handle() -> Tensor:
    """Return a handle that holds nothing."""
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _after_fork() -> None:
    """Forget what the parent holds; a thread of the parent may even hold the lock."""
    MEMORY.lock = threading.Lock()
    MEMORY.pieces.clear()


os.register_at_fork(after_in_child=_after_fork)
