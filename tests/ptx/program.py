"""Turn a kernel into basic blocks of steps: instructions with decoded operands."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.ptx.numbers import BITS, POISON, PRED, TYPES, U32
from tests.ptx.table import CONTROL, TABLE
from tests.ptx.text import Address, Kernel

REGISTERS = {"%tid.x": U32, "%ctaid.x": U32}  # that no kernel declares
SYMBOLS = {"global_smem": 0}  # shared memory begins at 0


class Read(NamedTuple):
    """A register that is read as a type; an address also has an offset."""

    name: str
    kind: np.dtype
    offset: Any = None


class Step(NamedTuple):
    text: str
    opcode: str
    guard: Read | None
    negated: bool
    function: Callable | str  # the name of a method of the machine
    sources: list[Any]  # Read, a constant, or a list of them
    targets: list[str]  # registers
    kind: np.dtype | None  # the last type of the opcode

    def __str__(self):
        return self.text


class Block(NamedTuple):
    steps: list[Step]
    end: Step | None  # a branch, a barrier, or the end of threads
    target: int  # the block that a branch goes to; -1 for no other


class Program:
    """Hold the blocks of a kernel; refuse unknown instructions."""

    def __init__(self, text: str):
        self.text, self.kernel = text, Kernel(text)
        self.poison: dict[str, Any] = {}  # of each register
        steps = [self._step(n, *parts) for n, parts in enumerate(self.kernel.instructions)]
        ends = {n + 1 for n, step in enumerate(steps) if step.function in CONTROL}
        starts = sorted(({0, *self.kernel.labels.values()} | ends) - {len(steps)})
        self.blocks = []
        for a, b in zip(starts, [*starts[1:], len(steps)]):
            end = steps[b - 1] if b in ends else None
            to = starts.index(self.kernel.labels[end.sources[0]]) if end and end.function == "branch" else -1
            self.blocks.append(Block(steps[a : b - 1 if end else b], end, to))

    def _step(self, n: int, text: str, negated: str, guard: str | None, opcode: str, operands: list) -> Step:
        site = f"instruction {n} `{text}`"
        if opcode not in TABLE:
            raise NotImplementedError(f"{self.kernel.name}: the table has no opcode of {site}")
        row = TABLE[opcode]
        targets, operands = operands[: len(row.results)], operands[len(row.results) :]
        targets = targets[0] if targets and isinstance(targets[0], list) else targets
        kinds = [TYPES[part] for part in opcode.split(".") if part in TYPES]
        kind = kinds[-1] if kinds else None
        sources = [self._source(spec.rstrip("?"), operand, kind) for spec, operand in zip(row.sources, operands)]
        function = row.function
        if function == "move":
            function = functools.partial(move, BITS[kind.itemsize // len(targets)], len(targets))
        for name in set(targets) - {"_"}:
            self._width(name)
        read = self._read(guard, PRED) if guard else None
        return Step(site, opcode, read, bool(negated), function, sources, targets, kind)

    def _source(self, spec: str, operand: Any, last: np.dtype | None) -> Any:
        """Return a source as the machine takes it; `last` is the last type of the opcode."""
        if spec in ("int", "label"):
            return operand
        if spec == "address":
            base, offset = operand if isinstance(operand, Address) else (operand, 0)
            if base in self.kernel.parameters:
                return base, offset
            if base in SYMBOLS:
                return np.array([SYMBOLS[base] + offset], U32)
            kind = self._width(base)
            return Read(base, kind, kind.type(offset % 2 ** (8 * kind.itemsize)) if offset else None)
        parts = operand if isinstance(operand, list) else [operand]
        if spec == "parts":
            kind = last if len(parts) == 1 else BITS[last.itemsize // len(parts)]
        else:
            kind = TYPES[spec.rstrip("*")]
        found = [self._read(part, kind) for part in parts]
        return found if spec == "parts" or spec.endswith("*") else found[0]

    def _read(self, operand: str | int, kind: np.dtype) -> Any:
        operand = SYMBOLS.get(operand, operand)
        if isinstance(operand, int):
            size = kind.itemsize
            return np.array([operand != 0 if kind == PRED else operand % 2 ** (8 * size)], BITS[size]).view(kind)
        if self._width(operand).itemsize < kind.itemsize:
            raise NotImplementedError(f"{operand} as {kind}")
        return Read(operand, kind)

    def _width(self, name: str) -> np.dtype:
        """Return the type that holds a register: bits of its width. Note what it holds at first."""
        if name in REGISTERS:
            return REGISTERS[name]
        kind = TYPES[self.kernel.registers[re.match(r"%[a-z]+", name)[0]]]
        kind = kind if kind == PRED else BITS[kind.itemsize]
        self.poison[name] = np.array([POISON[kind]], kind)
        return kind


def move(kind: np.dtype, count: int, values: list) -> list:
    """Join numbers, the first the lowest, and take them apart again."""
    if len(values) == count:
        return values
    whole = np.stack(np.broadcast_arrays(*values), -1)
    return list(np.ascontiguousarray(whole).view(kind).T)
