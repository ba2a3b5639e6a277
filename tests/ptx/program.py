"""Turn a kernel into Python: a function for each basic block, whose lines call the functions of the table."""

import re
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.ptx.numbers import BITS, PRED, TYPES, U32
from tests.ptx.table import CONTROL, TABLE
from tests.ptx.text import Address, Instruction, Number, Register, Symbol, Vector, parse, registers_in

SPECIAL = ("%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x", "%laneid")
SYMBOLS = {"global_smem": 0}  # shared memory begins at 0


class Site(NamedTuple):
    """An instruction as the methods of the machine get it."""

    instruction: Instruction
    kind: np.dtype  # of one number, as bits
    count: int  # of the results

    def __str__(self):
        return str(self.instruction)


class Block(NamedTuple):
    run: Callable  # of the registers, the mask of threads and the machine; it returns the guard of the last instruction
    instructions: list[Instruction]
    end: str  # "branch", "end", "barrier" or "": what the last instruction does
    target: int | None  # the block that a branch goes to


class Program:
    """Hold the blocks of a kernel; refuse unknown instructions."""

    def __init__(self, text: str):
        self.kernel = parse(text)
        for instruction in self.kernel.instructions:
            if instruction.opcode not in TABLE:
                raise NotImplementedError(f"{self.kernel.name}: the table has no opcode of {instruction}")
        self.names = {"np": np}  # what the functions of blocks refer to
        groups, targets = self._groups()
        blocks = Counter(name for group in groups for name in set().union(*map(_registers, group)))
        self.index = {name: n for n, name in enumerate(blocks)}
        self.kept = {name for name, count in blocks.items() if count > 1}  # by more than one block
        sources = [_Coder(self, n, group).source() for n, group in enumerate(groups)]
        exec(compile("\n".join(sources), f"<ptx of {self.kernel.name}>", "exec"), self.names)
        ends = [TABLE[group[-1].opcode].function for group in groups]
        self.blocks = [
            Block(
                self.names[f"block_{n}"],
                group,
                end if end in CONTROL else "",
                targets[group[-1].operands[0].name] if end == "branch" else None,
            )
            for n, (group, end) in enumerate(zip(groups, ends))
        ]

    def kind(self, name: str) -> np.dtype:
        """Return the type that a register holds between blocks: bits of its width."""
        kind = TYPES[self.kernel.registers[re.match(r"%[a-z]+", name)[0]]]
        return kind if kind == PRED else BITS[kind.itemsize]

    def _groups(self) -> tuple[list[list[Instruction]], dict[str, int]]:
        """Return the instructions by basic block, and the blocks of the labels."""
        instructions = self.kernel.instructions
        ends = {i.number + 1 for i in instructions if TABLE[i.opcode].function in CONTROL}
        starts = sorted(({0, *self.kernel.labels.values()} | ends) - {len(instructions)})
        groups = [instructions[a:b] for a, b in zip(starts, [*starts[1:], len(instructions)])]
        return groups, {name: starts.index(at) for name, at in self.kernel.labels.items() if at < len(instructions)}


def _registers(instruction: Instruction) -> set[str]:
    found = {name for operand in (*instruction.operands, instruction.guard) for name in registers_in(operand)}
    return found - set(SPECIAL)


class _Coder:
    """Write the function of one block: `def block_n(R, M, K)`, of registers, mask (None: all threads) and machine."""

    def __init__(self, program: Program, n: int, group: list[Instruction]):
        self.program, self.head, self.lines, self.forms = program, f"def block_{n}(R, M, K):\n", [], {}
        self.values: dict[str, tuple[str, np.dtype]] = {}  # of registers: the variable and its type
        self.written: set[str] = set()
        self.last = "None"
        for instruction in group:
            self.add(instruction)
        for name in sorted(self.written & program.kept):
            self.lines.append(f"K.keep(R, {program.index[name]}, {self.read(name, program.kind(name))}, M)")
        self.lines.append(f"return {self.last}")

    def source(self) -> str:
        return self.head + "".join(f"    {line}\n" for line in self.lines)

    def add(self, instruction: Instruction) -> None:
        row = TABLE[instruction.opcode]
        results, operands = instruction.operands[: len(row.results)], instruction.operands[len(row.results) :]
        guard = self.guard(instruction)
        if row.function in CONTROL:
            self.last = guard
            return
        kinds = [TYPES[part] for part in instruction.opcode.split(".") if part in TYPES]
        parts = results[0].parts if results and isinstance(results[0], Vector) else results
        kind = kinds[-1] if kinds else None
        if row.function == "move" and guard == "None" and not any(isinstance(x, Vector) for x in instruction.operands):
            self.write(results[0], self.source_of(operands[0], kind), kind)
            return
        arguments = [self.argument(spec.rstrip("?"), operand, kind) for spec, operand in zip(row.sources, operands)]
        if results:
            named = row.results[0].rstrip("*")
            kind = TYPES[named] if named != "parts" else kind if len(parts) == 1 else BITS[kind.itemsize // len(parts)]
        method = isinstance(row.function, str)
        if method:
            site = Site(instruction, kind if kind in (None, PRED) else BITS[kind.itemsize], len(parts))
            arguments = [self.name("site", site), f"K.active(M, {guard})", *arguments]
        function = f"K.{row.function}" if method else self.name("f", row.function)
        found = self.new(f"{function}({', '.join(arguments)})")
        for n, part in enumerate(parts):
            value = f"{found}[{n}]" if row.results[0].endswith("*") or row.results[0] == "parts" else found
            if method:  # memory holds bits
                value = self.new(f"{value}.view({self.name('t', kind)})")
            if guard != "None":
                value = self.new(f"np.where({guard}, {value}, {self.read(part.name, kind)})")
            if part != Symbol("_"):
                self.write(part, value, kind)

    def argument(self, spec: str, operand, last: np.dtype | None) -> str:
        """Return the expression of a source; `last` is the last type of the opcode."""
        if spec == "int":
            return str(operand.bits)
        if spec == "address":
            base, offset = operand if isinstance(operand, Address) else (operand, 0)
            if isinstance(base, Symbol) and base.name in self.program.kernel.parameters:
                return repr((base.name, offset))
            kind = U32 if isinstance(base, Symbol) else self.program.kind(base.name)
            value = self.source_of(base, kind)
            return self.new(f"{value} + {self.source_of(Number(offset, 'int'), kind)}") if offset else value
        parts = operand.parts if isinstance(operand, Vector) else (operand,)
        if spec == "parts":
            kind = last if len(parts) == 1 else BITS[last.itemsize // len(parts)]
        else:
            kind = TYPES[spec.rstrip("*")]
        values = [self.source_of(part, kind) for part in parts]
        return f"[{', '.join(values)}]" if spec == "parts" or spec.endswith("*") else values[0]

    def guard(self, instruction: Instruction) -> str:
        if instruction.guard is None:
            return "None"
        name = self.read(instruction.guard.name, PRED)
        return self.form(f"~{name}") if instruction.negated else name

    def source_of(self, operand, kind: np.dtype) -> str:
        """Return the variable of a register, or the constant of a number, as a type."""
        if isinstance(operand, Register):
            return self.read(operand.name, kind)
        bits, form = (SYMBOLS[operand.name], "int") if isinstance(operand, Symbol) else operand
        if kind == PRED:
            return self.name("c", np.array([bits != 0]))
        if form == "int":
            return self.name("c", np.array([bits % 2 ** (8 * kind.itemsize)], BITS[kind.itemsize]).view(kind))
        return self.name("c", np.array([bits], {"f32": "u4", "f64": "u8"}[form]).view(kind))

    def read(self, name: str, kind: np.dtype) -> str:
        """Return the variable of a register as a type; a register wider than the type is cut."""
        if name in SPECIAL:
            return self.form(f"K.special[{name!r}].view({self.name('t', kind)})")
        if name not in self.values:
            self.values[name] = self.new(f"R[{self.program.index[name]}]"), self.program.kind(name)
        value, have = self.values[name]
        if have.itemsize > kind.itemsize and kind != PRED:
            value, have = self.form(f"{value}.astype({self.name('t', BITS[kind.itemsize])})"), BITS[kind.itemsize]
        if have.itemsize != kind.itemsize or (PRED in (have, kind) and have != kind):
            raise NotImplementedError(f"{name} as {kind}")
        return value if have == kind else self.form(f"{value}.view({self.name('t', kind)})")

    def write(self, target, value: str, kind: np.dtype) -> None:
        """Set a register; what is narrower is extended by zeros or, signed, by the sign."""
        own = self.program.kind(target.name)
        if own.itemsize > kind.itemsize:
            kind = np.dtype(f"{'i' if kind.kind == 'i' else 'u'}{own.itemsize}")
            value = self.new(f"{value}.astype({self.name('t', kind)})")
        self.values[target.name] = value, kind
        self.written.add(target.name)

    def name(self, prefix: str, value) -> str:
        """Return a name of a value that the block's function refers to."""
        key = f"t_{value.name}" if isinstance(value, np.dtype) else f"{prefix}{len(self.program.names)}"
        if isinstance(value, np.ndarray):
            key = f"c_{value.dtype.name}_{value.tobytes().hex()}"
        self.program.names[key] = value
        return key

    def new(self, expression: str) -> str:
        self.lines.append(f"v{len(self.lines)} = {expression}")
        return f"v{len(self.lines) - 1}"

    def form(self, expression: str) -> str:
        """Return a variable of an expression of other variables, computed once."""
        if expression not in self.forms:
            self.forms[expression] = self.new(expression)
        return self.forms[expression]
