"""Parse the PTX of one kernel: parameters, registers, and instructions with their operands."""

import re
from typing import NamedTuple


class Register(NamedTuple):
    name: str


class Number(NamedTuple):
    bits: int
    form: str  # "int", or "f32" or "f64" for the bits of a float


class Symbol(NamedTuple):
    name: str


class Address(NamedTuple):
    base: Register | Symbol
    offset: int


class Vector(NamedTuple):
    parts: tuple


class Instruction(NamedTuple):
    number: int  # in the text of the kernel
    text: str
    guard: Register | None
    negated: bool
    opcode: str
    operands: tuple

    def __str__(self):
        return f"instruction {self.number} `{self.text}`"


class Kernel(NamedTuple):
    name: str
    parameters: dict[str, str]  # their types
    registers: dict[str, str]  # types by prefix
    instructions: list[Instruction]
    labels: dict[str, int]  # the numbers of the instructions that follow them


STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)


def parse(text: str) -> Kernel:
    """Return the only kernel of a text; refuse what is no register, label, directive of lines or instruction."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)[^{]*{(.*?)\n}", text, re.S)
    parameters = {name: kind for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?([\w$]+)\s*(?:,|$)", entry[2])}
    body = re.sub(r"^\s*\.(loc|file|pragma)\b.*$", "", entry[3], flags=re.M)
    body = re.sub(r"^\s*([\w$]+):", r"\1:;", body, flags=re.M)
    registers, labels, instructions = {}, {}, []
    for statement in filter(None, (part.strip() for part in body.split(";"))):
        if declared := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%\w+)<\d+>", statement):
            registers[declared[2]] = declared[1]
        elif statement[-1] == ":":
            labels[statement[:-1]] = len(instructions)
        elif found := STATEMENT.fullmatch(statement):
            negated, guard, opcode, operands = found.groups()
            guard = Register(guard) if guard else None
            parts = tuple(map(_operand, _split(operands)))
            instructions.append(Instruction(len(instructions), statement, guard, bool(negated), opcode, parts))
        else:
            raise NotImplementedError(f"no instruction of PTX is known in `{statement}`")
    return Kernel(entry[1], parameters, registers, instructions, labels)


def _split(text: str) -> list[str]:
    """Split at the commas outside of braces."""
    return [part.strip() for part in re.split(r",(?![^{]*})", text) if part.strip()]


def _operand(text: str):
    if text[0] == "{":
        return Vector(tuple(_operand(part.strip()) for part in text[1:-1].split(",")))
    if text[0] == "[":
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return Address(_operand(base), int(offset or "0", 0))
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
        return Number(int(text[2:], 16), "f32")
    if re.fullmatch(r"0[dD][0-9A-Fa-f]{16}", text):
        return Number(int(text[2:], 16), "f64")
    if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text):
        return Number(int(text.rstrip("U"), 0), "int")
    return Register(text) if text[0] == "%" else Symbol(text)


def registers_in(operand) -> list[str]:
    """Return the names of the registers of an operand."""
    if isinstance(operand, Register):
        return [operand.name]
    if isinstance(operand, Vector):
        return [name for part in operand.parts for name in registers_in(part)]
    return registers_in(operand.base) if isinstance(operand, Address) else []
