"""Parse the PTX of one kernel.

It becomes basic blocks of steps, which are instructions with decoded operands.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.ptx.numbers import BITS, POISON, PRED, TYPES, U32
from tests.ptx.table import CONTROL, TABLE

REGISTERS = {"%tid.x": U32, "%ctaid.x": U32}  # that no kernel declares
SHARED = "global_smem"  # shared memory begins at 0
INSTRUCTION = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)


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
    """Hold the blocks of the only kernel of a text; refuse what is unknown."""

    def __init__(self, text: str):
        plain = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
        entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)[^{]*{(.*?)\n}", plain, re.S)
        body = re.sub(r"^\s*\.(loc|file|pragma)\b.*$", "", entry[3], flags=re.M)
        body = re.sub(r"^\s*([\w$]+):", r"\1:;", body, flags=re.M)
        self.text, self.name = text, entry[1]
        self.parameters = re.findall(r"\.param\s+[^,]*?([\w$]+)\s*(?:,|$)", entry[2])
        self.types: dict[str, np.dtype] = {}  # of registers, by their prefix
        self.poison: dict[str, Any] = {}  # of each register
        steps: list[Step] = []
        labels: dict[str, int] = {}  # the numbers of the steps that follow them
        for statement in filter(None, (part.strip() for part in body.split(";"))):
            if declared := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%\w+)<\d+>", statement):
                self.types[declared[2]] = TYPES[declared[1]]
            elif statement[-1] == ":":
                labels[statement[:-1]] = len(steps)
            else:
                steps.append(
                    self._step(
                        f"instruction {len(steps)} `{statement}`", INSTRUCTION.fullmatch(statement)
                    )
                )
        ends = {n + 1 for n, step in enumerate(steps) if step.function in CONTROL}
        starts = sorted(({0, *labels.values()} | ends) - {len(steps)})
        self.blocks = []
        for a, b in zip(starts, [*starts[1:], len(steps)]):
            end = steps[b - 1] if b in ends else None
            to = starts.index(labels[end.sources[0]]) if end and end.function == "branch" else -1
            self.blocks.append(Block(steps[a : b - 1 if end else b], end, to))

    def _step(self, site: str, found: re.Match | None) -> Step:
        if found is None or found[3] not in TABLE:
            raise NotImplementedError(f"{self.name}: the table has no opcode of {site}")
        negated, guard, opcode, operands = found.groups()
        row = TABLE[opcode]
        given = [part.strip() for part in re.split(r",(?![^{]*})", operands) if part.strip()]
        count = len(row.results)
        most = len(row.results + row.sources)
        if not most - row.sources.count("u32?") <= len(given) <= most:
            raise NotImplementedError(
                f"{self.name}: other operands than those of the table: {site}"
            )
        targets = [name for operand in given[:count] for name in _parts(operand)]
        for name in set(targets) - {"_"}:
            self._width(name)
        kind = next((TYPES[part] for part in reversed(opcode.split(".")) if part in TYPES), None)
        sources = [
            self._source(spec.rstrip("?"), operand, kind)
            for spec, operand in zip(row.sources, given[count:])
        ]
        function = row.function
        if function == "move":
            function = functools.partial(move, BITS[kind.itemsize // len(targets)], len(targets))
        read = self._read(guard, PRED) if guard else None
        return Step(site, opcode, read, bool(negated), function, sources, targets, kind)

    def _source(self, spec: str, operand: str, last: np.dtype | None) -> Any:
        """Return a source as the machine takes it; `last` is the last type of the opcode."""
        if spec in ("int", "label"):
            return operand if spec == "label" else _number(operand)
        if spec == "address":
            base, _, offset = operand.strip("[ ]").replace(" ", "").partition("+")
            if base in self.parameters:
                return base, int(offset or "0")
            if base == SHARED:
                return np.array([int(offset or "0")], U32)
            kind = self._width(base)
            return Read(
                base, kind, kind.type(int(offset) % 2 ** (8 * kind.itemsize)) if offset else None
            )
        parts = _parts(operand)
        if spec == "parts":
            kind = last if len(parts) == 1 else BITS[last.itemsize // len(parts)]
        else:
            kind = TYPES[spec.rstrip("*")]
        found = [self._read(part, kind) for part in parts]
        return found if spec == "parts" or spec.endswith("*") else found[0]

    def _read(self, operand: str, kind: np.dtype) -> Any:
        if (number := _number(operand)) is not None:
            size = kind.itemsize
            return np.array(
                [number != 0 if kind == PRED else number % 2 ** (8 * size)], BITS[size]
            ).view(kind)
        if self._width(operand).itemsize < kind.itemsize:
            raise NotImplementedError(f"{operand} as {kind}")
        return Read(operand, kind)

    def _width(self, name: str) -> np.dtype:
        """Return the type that holds a register: bits of its width. Note what it holds at first."""
        if name in REGISTERS:
            return REGISTERS[name]
        if (prefix := name.rstrip("0123456789")) not in self.types:
            raise NotImplementedError(f"{self.name}: no register is {name}")
        kind = self.types[prefix]
        kind = kind if kind == PRED else BITS[kind.itemsize]
        self.poison[name] = np.array([POISON[kind]], kind)
        return kind


def _parts(operand: str) -> list[str]:
    return re.findall(r"[^{},\s]+", operand)


@functools.cache
def _number(text: str) -> int | None:
    """Return a constant, a float by its bits; None is for a register."""
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
        return int(text[2:], 16)
    if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    return 0 if text == SHARED else None


def move(kind: np.dtype, count: int, values: list) -> list:
    """Join numbers, the first the lowest, and take them apart again."""
    if len(values) == count:
        return values
    whole = np.stack(np.broadcast_arrays(*values), -1)
    return list(np.ascontiguousarray(whole).view(kind).T)
