"""Parse the PTX of one kernel: parameters, registers, and instructions with their operands.

An operand is the name of a register (with %) or of a symbol, the bits of a number, an `Address`, or a list of operands.
"""

import functools
import re
from typing import Any, NamedTuple


class Address(NamedTuple):
    base: str
    offset: int


class Kernel:
    """Hold the only kernel of a text; refuse what is no register, label, directive of lines or instruction."""

    STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)

    def __init__(self, text: str):
        plain = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
        entry = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)[^{]*{(.*?)\n}", plain, re.S)
        body = re.sub(r"^\s*\.(loc|file|pragma)\b.*$", "", entry[3], flags=re.M)
        body = re.sub(r"^\s*([\w$]+):", r"\1:;", body, flags=re.M)
        self.name, self.parameters = entry[1], re.findall(r"\.param\s+[^,]*?([\w$]+)\s*(?:,|$)", entry[2])
        self.registers: dict[str, str] = {}  # types by prefix
        self.instructions: list[tuple] = []  # the groups of STATEMENT behind the text
        self.labels: dict[str, int] = {}  # the numbers of the instructions that follow them
        for statement in filter(None, (part.strip() for part in body.split(";"))):
            if declared := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%\w+)<\d+>", statement):
                self.registers[declared[2]] = declared[1]
            elif statement[-1] == ":":
                self.labels[statement[:-1]] = len(self.instructions)
            elif found := self.STATEMENT.fullmatch(statement):
                self.instructions.append((statement, *found.groups()[:3], _operands(found[4])))
            else:
                raise NotImplementedError(f"no instruction of PTX is known in `{statement}`")


def _operands(text: str) -> list:
    """Parse what stands between the commas outside of braces."""
    return [_operand(part.strip()) for part in re.split(r",(?![^{]*})", text) if part.strip()]


@functools.cache
def _operand(text: str) -> Any:
    if text[0] == "{":
        return _operands(text[1:-1])
    if text[0] == "[":
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return Address(base, int(offset or "0", 0))
    if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", text):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0) if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", text) else text
