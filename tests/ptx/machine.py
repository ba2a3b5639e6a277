"""Run a program: all threads of many blocks at once, in groups of the same program counter."""

import functools
from collections import Counter
from typing import Any

import numpy as np

from tests.ptx.memory import Fault, Memory, Threads
from tests.ptx.numbers import BITS, F16, F32, POISON, S64, TYPES, U8, U16, U32, from_bf16
from tests.ptx.program import Program
from tests.ptx.shared import Shared

THREADS = 4096  # that run at once, about: fewer waste calls of numpy, more waste cache
REDUCTIONS = {"min": np.minimum, "max": np.maximum, "add": np.add}


def run(program: Program, blocks: int, warps: int, shared: int, values: list[Any]) -> Counter:
    """Run a launch; `values` are tensors, or the bytes of numbers. Return how many threads executed each opcode."""
    memory, parameters, places = Memory([v for v in values if not isinstance(v, bytes)]), {}, 0
    for name, value in zip(program.kernel.parameters, values):
        if not isinstance(value, bytes):
            value, places = np.uint64(memory.tensors[places].address).tobytes(), places + 1
        parameters[name] = value
    together, visits = max(1, THREADS // (32 * warps)), np.zeros(len(program.blocks), int)
    with np.errstate(all="ignore"):
        for first in range(0, blocks, together):
            numbers = np.arange(first, min(blocks, first + together))
            visits += Machine(program, memory, parameters, blocks, numbers, warps, shared).run()
    memory.end()
    executed = Counter()
    for block, threads in zip(program.blocks, visits.tolist()):
        for instruction in block.instructions:
            executed[instruction.opcode] += threads
    return executed


class Machine:
    """Hold the registers and the shared memory of some blocks; its methods are the instructions that need them."""

    def __init__(self, program: Program, memory: Memory, parameters: dict, grid: int, numbers, warps: int, shared: int):
        self.program, self.memory, self.parameters = program, memory, parameters
        self.blocks, self.size = len(numbers), 32 * warps
        self.lanes = self.blocks * self.size
        self.all = np.arange(self.lanes)
        block, thread = self.all // self.size, self.all % self.size
        self.who = Threads(numbers[block], thread)
        self.shared = Shared(shared, self.blocks, block, (thread // 32).astype(U8), self.who)
        special = {"%tid.x": thread, "%ctaid.x": numbers[block], "%laneid": thread % 32}
        special |= {"%ntid.x": np.array([self.size]), "%nctaid.x": np.array([grid])}
        self.special = {name: value.astype(U32) for name, value in special.items()}
        kinds = [program.kind(name) for name in program.index]
        self.registers = [np.array([POISON[kind]], kind) for kind in kinds]
        self.visits = np.zeros(len(program.blocks), int)  # threads that entered each basic block

    # Control

    def run(self):
        """Run all threads to their end; return the visits. The first basic block goes first, so that threads meet."""
        waiting, parked = {0: np.ones(self.lanes, bool)}, {}

        def go(to: int, mask, places: dict = waiting) -> None:
            if mask.any():
                places[to] = places[to] | mask if to in places else mask

        while waiting or parked:
            if not waiting:
                self._stuck(parked)
            n = min(waiting)
            mask = waiting.pop(n)
            block, count = self.program.blocks[n], int(np.count_nonzero(mask))
            self.visits[n] += count
            guard = block.run(self.registers, None if count == self.lanes else mask, self)
            taken = mask if guard is None else mask & guard
            if block.end == "barrier":
                go(n + 1, mask, parked)
                self._release(n + 1, waiting, parked)
                continue
            if block.end == "branch":
                go(block.target, taken)
            go(n + 1, mask & ~taken if block.end else mask)
        return self.visits

    def _release(self, n: int, waiting: dict, parked: dict) -> None:
        """Let the blocks go on whose threads are all at one barrier."""
        free = parked[n].reshape(self.blocks, -1).all(1)
        if free.any():
            self.shared.barrier(free)
            lanes = np.repeat(free, self.size)
            waiting[n] = waiting[n] | lanes if n in waiting else lanes
            parked[n] = parked[n] & ~lanes
            if not parked[n].any():
                del parked[n]

    def _stuck(self, parked: dict) -> None:
        n, mask = next(iter(parked.items()))
        block = self.who.block[mask][0]
        missing = np.flatnonzero(~mask & (self.who.block == block))
        site = self.program.blocks[n - 1].instructions[-1]
        raise Fault(f"a barrier that not all threads reach: {site}; {self.who.of(missing)} does not")

    def keep(self, registers: list, n: int, value, mask) -> None:
        """Set a register at the end of a basic block."""
        registers[n] = value if mask is None else np.where(mask, value, registers[n])

    def active(self, mask, guard):
        """Return the threads that take part in an instruction."""
        if guard is not None:
            mask = np.broadcast_to(guard, self.lanes) if mask is None else mask & guard
        return self.all if mask is None else np.flatnonzero(mask)

    def full(self, x):
        return x if len(x) == self.lanes else np.repeat(x, self.lanes)

    def spread(self, on, found, kind: np.dtype):
        """Return [count, lanes] of numbers that some threads got; the others keep poison."""
        if len(on) == self.lanes:
            return found
        out = np.full((len(found), self.lanes), POISON[kind], kind)
        out[:, on] = found
        return out

    def whole_warps(self, site: Any, on) -> None:
        if len(on) < self.lanes:
            there = np.bincount(on // 32, minlength=self.lanes // 32)
            if (there % 32).any():
                lane = on[there[on // 32] < 32]
                raise Fault(f"not all lanes of a warp take part: {site}, {self.who.of(lane)}")

    def move(self, site: Any, on, values: list) -> list:
        """Join numbers, the first the lowest, and take them apart for the results."""
        whole = np.stack(np.broadcast_arrays(*values), -1)
        apart = np.ascontiguousarray(whole).view(site.kind) if whole.dtype != site.kind else whole
        return [np.ascontiguousarray(apart[:, n]) for n in range(site.count)]

    # Memory

    def load_parameter(self, site: Any, on, place: tuple[str, int]) -> list:
        name, offset = place
        return [np.frombuffer(self.parameters[name], site.kind, 1, offset)]

    def load_global(self, site: Any, on, address):
        found = self.memory.load(site, self.full(address)[on], site.count, site.kind, self.who.of(on))
        return self.spread(on, found, site.kind)

    def store_global(self, site: Any, on, address, values: list) -> None:
        values = [self.full(value).view(site.kind)[on] for value in values]
        self.memory.store(site, self.full(address)[on], values, site.kind, self.who.of(on))

    def load_shared(self, site: Any, on, address):
        found = self.shared.load(site, on, self.full(address)[on], site.count, site.kind)
        return self.spread(on, found, site.kind)

    def store_shared(self, site: Any, on, address, values: list) -> None:
        data = np.stack([self.full(value).view(site.kind)[on] for value in values], 1).view(U8)
        self.shared.store(site, on, self.full(address)[on], data)

    def copy_async(self, site: Any, on, to, source, size: int, given: Any | None = None) -> None:
        """Copy the first `given` bytes, and fill with zeros up to `size`."""
        data, given = np.zeros((len(on), size), U8), self.full(np.array([size], U32) if given is None else given)[on]
        source = self.full(source)[on]
        for length in np.unique(given):
            if length:
                part = np.flatnonzero(given == length)
                found = self.memory.load(site, source[part], int(length), BITS[1], self.who.of(on[part]))
                data[part, :length] = found.T
        self.shared.copy(site, on, self.full(to)[on], data)

    def commit(self, site: Any, on) -> None:
        self.shared.commit(on)

    def wait(self, site: Any, on, pending: int) -> None:
        self.shared.wait(pending, on)

    # Warps and tensor cores

    def _rows(self, site: Any, on, address, count: int):
        """Return the lanes that give the address of a row, ordered by warp and row, and their addresses."""
        self.whole_warps(site, on)
        lanes = on[on % 32 < 8 * count]
        return lanes, self.full(address)[lanes]

    def load_matrices(self, site: Any, on, address) -> list:
        """ldmatrix: lane 4 r + c of a warp gets the numbers 2 c and 2 c + 1 of row r of each matrix."""
        lanes, address = self._rows(site, on, address, site.count)
        rows = self.shared.load(site, lanes, address, 8, U16).T.reshape(-1, site.count, 8, 8)
        if ".trans" in site.instruction.opcode:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(U32).reshape(-1, site.count, 32)
        return self.spread(on, words.transpose(1, 0, 2).reshape(site.count, -1), U32)

    def store_matrices(self, site: Any, on, address, values: list) -> None:
        lanes, address = self._rows(site, on, address, len(values))
        words = np.stack([self.full(value)[on].reshape(-1, 8, 4) for value in values], 1)  # [warps, count, 8, 4]
        rows = np.ascontiguousarray(words).view(U16)
        if ".trans" in site.instruction.opcode:
            rows = np.ascontiguousarray(rows.swapaxes(2, 3))
        self.shared.store(site, lanes, address, rows.reshape(-1, 8).view(U8))

    def shuffle(self, site: Any, on, a, b, clamp, members):
        self._members(site, on, members)
        if (self.full(clamp)[on] != 31).any():
            raise NotImplementedError(f"a part of a warp: {site}")
        lane, b = self.all % 32, self.full(b).astype(S64) & 31
        return self.full(a)[self.all - lane + (b if ".idx." in site.instruction.opcode else lane ^ b)]

    def reduce(self, site: Any, on, a, members):
        self._members(site, on, members)
        how = REDUCTIONS[site.instruction.opcode.split(".")[2]]
        return np.repeat(how.reduce(self.full(a).reshape(-1, 32), 1, a.dtype), 32)

    def warp_barrier(self, site: Any, on, members) -> None:
        self._members(site, on, members)

    def _members(self, site: Any, on, members) -> None:
        self.whole_warps(site, on)
        if (self.full(members)[on] != 0xFFFFFFFF).any():
            raise NotImplementedError(f"a part of a warp: {site}")

    def multiply(self, site: Any, on, a: list, b: list, c: list) -> list:
        """Return D = A B + C of m16n8, float32; `fragment` says who holds what."""
        self.whole_warps(site, on)
        inner, kind = int(site.instruction.opcode.split("k")[1].split(".")[0]), site.instruction.opcode.split(".")[-2]
        per_word = 4 // TYPES[kind].itemsize if kind != "tf32" else 1
        A = self._matrix(a, kind)[:, fragment("A", inner, per_word)]
        B = self._matrix(b, kind)[:, fragment("B", inner, per_word)]
        C = self._matrix(c, "f32")[:, fragment("C", inner, 1)]
        D = (A @ B + C).reshape(len(A), 128)[:, np.argsort(fragment("C", inner, 1).ravel())]  # [warps, register * lane]
        return list(D.reshape(-1, 4, 32).swapaxes(0, 1).reshape(4, -1))

    def _matrix(self, parts: list, kind: str):
        """Return the numbers of the fragments of each warp, [warps, register * lane * part of a word], as float32."""
        words = np.stack([self.full(part) for part in parts]).reshape(len(parts), -1, 32).swapaxes(0, 1)
        words = np.ascontiguousarray(words).reshape(len(words), -1)
        if kind == "bf16":
            return from_bf16(words.view(U16))
        if kind == "tf32":
            words = words & 0xFFFFE000
        return words.view(F16).astype(F32) if kind == "f16" else words.view(F32)


@functools.cache
def fragment(name: str, inner: int, per_word: int):
    """Return where the numbers of a matrix lie among [register, lane, part of a word] (PTX ISA, 'Matrix fragments').

    With g = lane / 4 and t = lane % 4, a word of A holds numbers of row g, or g + 8 in odd registers, and of columns
    from t * per_word on, further by 4 * per_word in each second pair of registers. B is alike: its columns are g. In C
    and D the registers hold (g, 2 t), (g, 2 t + 1), (g + 8, 2 t) and (g + 8, 2 t + 1).
    """
    at = np.empty({"A": (16, inner), "B": (inner, 8), "C": (16, 8)}[name], int)
    for number, (register, lane, part) in enumerate(np.ndindex(at.size // (32 * per_word), 32, per_word)):
        g, t = lane // 4, lane % 4
        if name == "C":
            at[g + 8 * (register // 2), 2 * t + register % 2] = number
        elif name == "A":
            at[g + 8 * (register % 2), t * per_word + part + 4 * per_word * (register // 2)] = number
        else:
            at[t * per_word + part + 4 * per_word * register, g] = number
    return at
