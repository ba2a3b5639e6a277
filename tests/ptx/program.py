"""Turn a kernel into Python: a function for each basic block, whose lines call the functions of the table."""

import re
from typing import Callable, NamedTuple, Optional

import numpy as np

from tests.ptx.numbers import BITS, PRED, TYPES, U32
from tests.ptx.table import CONTROL, TABLE
from tests.ptx.text import Address, Instruction, Number, Register, Sink, Symbol, Vector, parse, registers_in

SPECIAL = ("%tid.x", "%ctaid.x", "%nctaid.x", "%ntid.x", "%laneid")
SYMBOLS = {"global_smem": 0}  # shared memory begins at 0


class Site(NamedTuple):
    """What a method of the machine knows of its instruction."""

    instruction: Instruction
    kind: np.dtype  # of one number, as bits
    count: int  # of the results

    def __str__(self):
        return str(self.instruction)

    @property
    def opcode(self) -> str:
        return self.instruction.opcode


class Block(NamedTuple):
    run: Callable  # of the registers, the mask of threads and the machine; it returns the guard of the last instruction
    instructions: list[Instruction]
    end: str  # "branch", "end", "barrier" or "": what the last instruction does
    target: Optional[int]  # the block that a branch goes to


class Program:
    """Hold the blocks of a kernel; refuse unknown instructions."""

    def __init__(self, text: str):
        self.kernel = parse(text)
        for instruction in self.kernel.instructions:
            if instruction.opcode not in TABLE:
                raise NotImplementedError(f"{self.kernel.name}: the table has no opcode of {instruction}")
        self.names = {"np": np}  # what the functions of blocks refer to
        groups, targets = self._groups()
        after = [self._successors(n, group, targets) for n, group in enumerate(groups)]
        live_in, live_out = self._liveness(groups, after)
        self.index = {name: n for n, name in enumerate(sorted(set().union(*live_in, *live_out)))}
        sources = [_Coder(self, n, group, live_out[n]).source() for n, group in enumerate(groups)]
        exec(compile("\n".join(sources), f"<ptx of {self.kernel.name}>", "exec"), self.names)
        self.blocks = []
        for n, group in enumerate(groups):
            end = TABLE[group[-1].opcode].function
            end = end if end in CONTROL else ""
            target = targets[group[-1].operands[0].name] if end == "branch" else None
            self.blocks.append(Block(self.names[f"block_{n}"], group, end, target))

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

    def _successors(self, n: int, group: list[Instruction], targets: dict[str, int]) -> list[int]:
        last = group[-1]
        end = TABLE[last.opcode].function
        found = [targets[last.operands[0].name]] if end == "branch" else []
        return found + ([n + 1] if end not in ("branch", "end") or last.guard else [])

    def _liveness(self, groups, after) -> tuple[list[set[str]], list[set[str]]]:
        """Return the registers that each block needs from before, and those that others need from it."""
        uses, defines = [set() for _ in groups], [set() for _ in groups]
        for n, group in enumerate(groups):
            for instruction in group:
                uses[n] |= _reads(instruction) - defines[n]
                defines[n] |= _writes(instruction)
        live_in, live_out, changed = [set(used) for used in uses], [set() for _ in groups], True
        while changed:
            changed = False
            for n in reversed(range(len(groups))):
                live_out[n] = set().union(*(live_in[m] for m in after[n]))
                needed = uses[n] | live_out[n] - defines[n]
                changed |= needed != live_in[n]
                live_in[n] = needed
        return live_in, live_out


def _writes(instruction: Instruction) -> set[str]:
    results = len(TABLE[instruction.opcode].results)
    return {name for operand in instruction.operands[:results] for name in registers_in(operand)}


def _reads(instruction: Instruction) -> set[str]:
    """Return what an instruction reads; a guard keeps the old results, so it reads them, too."""
    results = len(TABLE[instruction.opcode].results)
    found = {name for operand in instruction.operands[results:] for name in registers_in(operand)}
    if instruction.guard:
        found |= {instruction.guard.name} | _writes(instruction)
    return found - set(SPECIAL)


class _Coder:
    """Write the function of one block: `def block_n(R, M, K)`, of registers, mask (None: all threads) and machine."""

    def __init__(self, program: Program, n: int, group: list[Instruction], live_out: set[str]):
        self.program, self.head, self.lines, self.forms = program, f"def block_{n}(R, M, K):\n", [], {}
        self.values: dict[str, tuple[str, np.dtype]] = {}  # of registers: the variable and its type
        self.written: set[str] = set()
        self.last = "None"
        for instruction in group:
            self.add(instruction)
        for name in sorted(self.written & live_out):
            self.lines.append(f"K.keep(R, {program.index[name]}, {self.read(name, program.kind(name))}, M)")
        self.lines.append(f"return {self.last}")

    def source(self) -> str:
        return self.head + "".join(f"    {line}\n" for line in self.lines)

    def add(self, instruction: Instruction) -> None:
        row = TABLE[instruction.opcode]
        results, operands = instruction.operands[: len(row.results)], instruction.operands[len(row.results) :]
        if row.function in CONTROL:
            self.last = self.guard(instruction)
            return
        count = len(results[0].parts) if results and isinstance(results[0], Vector) else 1
        if row.function == "move" and count == 1 and not isinstance(operands[0], Vector) and not instruction.guard:
            kind = TYPES[instruction.opcode.split(".")[-1]]
            self.write(results[0], self.source_of(operands[0], kind), kind)
            return
        spec = [(s, o) for s, o in zip(row.sources, operands)]
        arguments = [self.argument(instruction, s.rstrip("?"), operand) for s, operand in spec]
        kind = self.result_kind(instruction, row.results, count)
        if isinstance(row.function, str):
            site = self.name("site", Site(instruction, kind if kind in (None, PRED) else BITS[kind.itemsize], count))
            call = f"K.{row.function}({site}, K.active(M, {self.guard(instruction)}), {', '.join(arguments)})"
        else:
            call = f"{self.name('f', row.function)}({', '.join(arguments)})"
        found = self.new(call)
        if not results:
            return
        listed = row.results[0].endswith("*") or row.results[0] == "parts"
        parts = results[0].parts if isinstance(results[0], Vector) else (results[0],)
        for n, part in enumerate(parts):
            if not isinstance(part, Sink):
                value = f"{found}[{n}]" if listed else found
                if isinstance(row.function, str):  # memory holds bits
                    value = self.new(f"{value}.view({self.name('t', kind)})")
                if instruction.guard:
                    value = self.new(f"np.where({self.guard(instruction)}, {value}, {self.read(part.name, kind)})")
                self.write(part, value, kind)

    def result_kind(self, instruction: Instruction, results: list[str], count: int) -> Optional[np.dtype]:
        if not results:
            kinds = [TYPES[part] for part in instruction.opcode.split(".") if part in TYPES]
            return kinds[-1] if kinds else None
        if results[0] == "parts":
            kind = TYPES[instruction.opcode.split(".")[-1]]
            return kind if count == 1 else BITS[kind.itemsize // count]
        return TYPES[results[0].rstrip("*")]

    def argument(self, instruction: Instruction, spec: str, operand) -> str:
        if spec == "int":
            return str(operand.bits)
        if spec == "address":
            base, offset = operand if isinstance(operand, Address) else (operand, 0)
            if isinstance(base, Symbol) and base.name in self.program.kernel.parameters:
                return repr((base.name, offset))
            kind = U32 if isinstance(base, Symbol) else self.program.kind(base.name)
            value = self.source_of(base, kind)
            return self.new(f"{value} + {self.constant(Number(offset, 'int'), kind)}") if offset else value
        if spec == "parts":
            kind = TYPES[instruction.opcode.split(".")[-1]]
            parts = operand.parts if isinstance(operand, Vector) else (operand,)
            kind = kind if len(parts) == 1 else BITS[kind.itemsize // len(parts)]
            return f"[{', '.join(self.source_of(part, kind) for part in parts)}]"
        if spec.endswith("*"):
            parts = operand.parts if isinstance(operand, Vector) else (operand,)
            return f"[{', '.join(self.source_of(part, TYPES[spec[:-1]]) for part in parts)}]"
        return self.source_of(operand, TYPES[spec])

    def source_of(self, operand, kind: np.dtype) -> str:
        if isinstance(operand, Register):
            return self.read(operand.name, kind)
        if isinstance(operand, Symbol):
            operand = Number(SYMBOLS[operand.name], "int")
        return self.constant(operand, kind)

    def guard(self, instruction: Instruction) -> str:
        if instruction.guard is None:
            return "None"
        name = self.read(instruction.guard.name, PRED)
        return self.form(f"~{name}") if instruction.negated else name

    def read(self, name: str, kind: np.dtype) -> str:
        """Return the variable of a register as a type; a register wider than the type is cut."""
        if name in SPECIAL:
            return self.form(f"K.special[{name!r}].view({self.name('t', kind)})")
        if name not in self.values:
            self.values[name] = self.new(f"R[{self.program.index[name]}]"), self.program.kind(name)
        value, have = self.values[name]
        if have.itemsize > kind.itemsize and kind != PRED:
            value, have = self.form(f"{value}.astype({self.name('t', BITS[kind.itemsize])})"), BITS[kind.itemsize]
        if have.itemsize != kind.itemsize or PRED in (have, kind) and have != kind:
            raise NotImplementedError(f"{name} as {kind}")
        return value if have == kind else self.form(f"{value}.view({self.name('t', kind)})")

    def write(self, target, value: str, kind: np.dtype) -> None:
        """Set a register; what is narrower is extended by zeros or, signed, by the sign."""
        if isinstance(target, Sink):
            return
        own = self.program.kind(target.name)
        if own.itemsize > kind.itemsize:
            kind = np.dtype(f"{'i' if kind.kind == 'i' else 'u'}{own.itemsize}")
            value = self.new(f"{value}.astype({self.name('t', kind)})")
        self.values[target.name] = value, kind
        self.written.add(target.name)

    def constant(self, number: Number, kind: np.dtype) -> str:
        if number.form != "int" or kind == PRED:
            bits = np.array([number.bits], {"f32": "u4", "f64": "u8", "int": "i8"}[number.form])
            value = bits.view(kind) if kind != PRED else bits != 0
        else:
            bits = BITS[kind.itemsize]
            value = np.array([number.bits % 2 ** (8 * kind.itemsize)], bits).view(kind)
        return self.name("c", value)

    def name(self, prefix: str, value) -> str:
        """Return a name of a value that the block's function refers to."""
        key = f"{prefix}{len(self.program.names)}"
        if isinstance(value, np.dtype):
            key = f"t_{value.name}"
        elif isinstance(value, np.ndarray):
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
