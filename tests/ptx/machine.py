"""Run a program: all threads of many blocks at once, in groups of the same program counter."""

import operator
from collections import Counter
from typing import Any

import numpy as np

from tests.ptx.memory import Fault, Memory, refuse
from tests.ptx.numbers import BITS, F16, F32, TYPES, U8, U16, U32, U64, from_bf16
from tests.ptx.program import Program, Read, Step
from tests.ptx.shared import Shared

THREADS = 4096  # that run at once, about: fewer waste calls of numpy, more waste cache
REDUCTIONS = {"min": np.minimum, "max": np.maximum, "add": np.add}


def run(program: Program, blocks: int, warps: int, shared: int, values: list[Any]) -> Counter:
    """Run a launch; `values` are tensors, or the bytes of numbers. Return how many threads executed
    each opcode.
    """
    memory = Memory([value for value in values if not isinstance(value, bytes)])
    addresses = (np.uint64(tensor.address).tobytes() for tensor in memory.tensors)
    given = [value if isinstance(value, bytes) else next(addresses) for value in values]
    parameters = dict(zip(program.parameters, given))
    together = max(1, THREADS // (32 * warps))
    executed = Counter()
    with np.errstate(all="ignore"):
        for first in range(0, blocks, together):
            numbers = np.arange(first, min(blocks, first + together))
            executed += Machine(program, memory, parameters, numbers, warps, shared).run()
    memory.end()
    return executed


class Machine:
    """Hold the registers and the shared memory of some blocks.

    Its methods are the instructions that need them.

    A method gets the step, the lanes that take part, and the sources, of these lanes alone.
    """

    def __init__(
        self, program: Program, memory: Memory, parameters: dict, numbers, warps: int, shared: int
    ):
        self.program, self.memory, self.parameters = program, memory, parameters
        self.blocks, self.size = len(numbers), 32 * warps
        self.all = np.arange(self.blocks * self.size)
        block = self.all // self.size
        thread = self.all % self.size
        self.who = memory.who = np.stack([numbers[block], thread])
        self.shared = Shared(shared, self.blocks, block, thread // 32, self.who)
        special = {"%tid.x": thread.astype(U32), "%ctaid.x": numbers[block].astype(U32)}
        self.registers = program.poison | special
        self.executed: Counter[str] = Counter()  # how many threads came to each opcode

    # Control

    def run(self) -> Counter:
        """Run all threads to their end; return the counts. The first basic block goes first, so
        that threads meet.
        """
        # the next basic block; is at a barrier
        at = np.zeros(len(self.all), int)
        held = np.zeros(len(self.all), bool)
        while (at >= 0).any():
            free = (at >= 0) & ~held
            if not free.any():
                self._stuck(held & (at == at[held].min()), at[held].min())
            n = at[free].min()
            mask = free & (at == n)
            block = self.program.blocks[n]
            on = self.all if mask.all() else np.flatnonzero(mask)
            for step in block.steps:
                self._execute(step, on)
            at[on] = n + 1
            taken = self._guarded(block.end, on) if block.end else on[:0]
            if block.end and block.end.function == "barrier":
                held[taken] = True
                whole = (held & (at == n + 1)).reshape(self.blocks, -1).all(1)
                if whole.any():
                    self.shared.barrier(whole)
                    held[np.repeat(whole, self.size)] = False
            else:
                at[taken] = block.target
        return self.executed

    def _stuck(self, there, n: int) -> None:
        missing = ~there & np.repeat(there.reshape(self.blocks, -1).any(1), self.size)
        thread, block = self.who[::-1, missing.argmax()]
        site = self.program.blocks[n - 1].end
        raise Fault(
            f"a barrier that not all threads reach: {site}; thread {thread} of block {block} does "
            "not"
        )

    def _guarded(self, step: Step, on):
        """Count an instruction; return the lanes that its guard lets through."""
        self.executed[step.opcode] += len(on)
        if step.guard is None:
            return on
        guard = self._value(step.guard, on, True) ^ step.negated
        return on if guard.all() else on[guard]

    def _execute(self, step: Step, on) -> None:
        on = self._guarded(step, on)
        if len(on) == 0:
            return
        method = isinstance(step.function, str)
        sources = [self._value(source, on, method) for source in step.sources]
        call = operator.attrgetter(step.function)(self) if method else step.function
        found = call(step, on, *sources) if method else call(*sources)
        for name, value in zip(step.targets, found if isinstance(found, list) else [found]):
            if name != "_":
                self._write(name, value, on)

    def _value(self, source: Any, on, spread: bool):
        """Return an array over lanes.

        Unless it is to be spread, return a single number where all agree.
        """
        if isinstance(source, list):
            return [self._value(part, on, spread) for part in source]
        if isinstance(source, Read):
            value = self.registers[source.name]
            kind = source.kind
            if value.dtype.itemsize > kind.itemsize:
                value = value.astype(BITS[kind.itemsize])
            value = value.view(kind) if source.offset is None else value + source.offset
        elif isinstance(source, np.ndarray):
            value = source
        else:
            return source
        if len(value) == 1:
            return np.repeat(value, len(on)) if spread else value
        return value if on is self.all else value[on]

    def _write(self, name: str, value, on) -> None:
        """Set a register; what is narrower is extended by zeros or, signed, by the sign."""
        old = self.registers[name]
        if value.dtype.itemsize < old.dtype.itemsize:
            value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{old.dtype.itemsize}")
        value = value.view(old.dtype)
        if on is not self.all:
            whole = old.copy() if len(old) > 1 else np.repeat(old, len(self.all))
            whole[on] = value
            value = whole
        self.registers[name] = value

    # Memory

    def load_parameter(self, step: Step, on, place: tuple[str, int]):
        return np.frombuffer(self.parameters[place[0]], step.kind, 1, place[1])

    def load(self, step: Step, on, address) -> list:
        memory = self.memory if ".global" in step.opcode else self.shared
        return list(memory.read(step, on, address, len(step.targets), step.kind))

    def copy_async(self, step: Step, on, to, source, size: int, given: Any | None = None) -> None:
        """Copy the first `given` bytes, and fill with zeros up to `size`.

        The source is aligned to `size`.
        """
        data = np.zeros((len(on), size), U8)
        given = np.full(len(on), size) if given is None else given
        for length in np.unique(given[given > 0]):
            part = np.flatnonzero(given == length)
            odd = source[part] & U64.type(size - 1) != 0
            refuse(
                "not aligned",
                odd,
                f"a source of {size} bytes",
                source[part],
                step,
                self.who[:, on[part]],
            )
            data[part, :length] = self.memory.read(step, on[part], source[part], int(length), U8).T
        self.shared.copy(step, on, to, data)

    # Warps and tensor cores

    def whole_warps(self, step: Step, on, members=None) -> None:
        some = on[np.bincount(on // 32)[on // 32] < 32]
        if len(some):
            thread, block = self.who[::-1, some[0]]
            raise Fault(
                f"not all lanes of a warp take part: {step}, thread {thread} of block {block}"
            )
        if members is not None and (members != 0xFFFFFFFF).any():
            raise NotImplementedError(f"a part of a warp: {step}")

    def load_matrices(self, step: Step, on, address) -> list:
        """Do ldmatrix.

        Lane 4 r + c of a warp gets the numbers 2 c and 2 c + 1 of row r of each matrix.
        """
        self.whole_warps(step, on)
        count = len(step.targets)
        giving = on % 32 < 8 * count  # the address of a row
        rows = self.shared.read(step, on[giving], address[giving], 8, U16).T.reshape(
            -1, count, 8, 8
        )
        if ".trans" in step.opcode:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(U32).reshape(-1, count, 32)
        return list(words.transpose(1, 0, 2).reshape(count, -1))

    def store_matrices(self, step: Step, on, address, values: list) -> None:
        self.whole_warps(step, on)
        giving = on % 32 < 8 * len(values)
        words = np.stack([value.reshape(-1, 8, 4) for value in values], 1)  # [warps, count, 8, 4]
        rows = np.ascontiguousarray(words).view(U16)
        if ".trans" in step.opcode:
            rows = rows.swapaxes(2, 3)
        self.shared.store(step, on[giving], address[giving], list(rows.reshape(-1, 8).T))

    def shuffle(self, step: Step, on, a, b, clamp, members):
        # another clamp divides the warp
        self.whole_warps(step, on, np.where(clamp == 31, members, 0))
        lane = on % 32
        place = np.arange(len(on))
        return a[place - lane + (b & 31 if ".idx." in step.opcode else lane ^ (b & 31))]

    def reduce(self, step: Step, on, a, members):
        self.whole_warps(step, on, members)
        how = REDUCTIONS[step.opcode.split(".")[2]]
        return np.repeat(how.reduce(a.reshape(-1, 32), 1, a.dtype), 32)

    def multiply(self, step: Step, on, a: list, b: list, c: list) -> list:
        """Return D = A B + C of m16n8, float32 (PTX ISA, 'Matrix fragments').

        With g = lane / 4 and t = lane % 4, a word of A holds neighbours of row g, or g + 8 in odd
        registers; t and the pair of registers say which. B is alike: its columns are g. In C and D
        the registers hold (g, 2 t), (g, 2 t + 1), (g + 8, 2 t) and (g + 8, 2 t + 1).
        """
        self.whole_warps(step, on)
        kind = step.opcode.split(".")[-2]
        A = (
            _numbers(a, kind)
            .reshape(-1, 2, 2, 8, 4, 4 // TYPES[kind].itemsize)
            .transpose(0, 2, 3, 1, 4, 5)
        )
        B = (
            _numbers(b, kind)
            .reshape(-1, 2, 8, 4, 4 // TYPES[kind].itemsize)
            .transpose(0, 1, 3, 4, 2)
        )
        C = _numbers(c, "f32").reshape(-1, 2, 2, 8, 4).transpose(0, 1, 3, 4, 2).reshape(-1, 16, 8)
        D = A.reshape(len(C), 16, -1) @ B.reshape(len(C), -1, 8) + C
        return list(D.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1))


def _numbers(parts: list, kind: str):
    """Return the numbers of the fragments of each warp, as float32.

    They are [warps, register * lane * part of a word].
    """
    words = np.stack([part.reshape(-1, 32) for part in parts], 1).reshape(-1, 32 * len(parts))
    if kind == "bf16":
        return from_bf16(words.view(U16))
    if kind == "tf32":
        words = words & 0xFFFFE000
    return words.view(F16).astype(F32) if kind == "f16" else words.view(F32)
