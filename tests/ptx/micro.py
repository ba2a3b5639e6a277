"""Write and run kernels of a few instructions."""

from collections import Counter

from tests.ptx.machine import run
from tests.ptx.program import Program

PREFIX = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}  # of registers, by their bytes
REGISTERS = ".reg .pred %p<99>; .reg .b16 %rs<99>; .reg .b32 %r<99>; .reg .b64 %rd<99>;"


def assemble(arguments: int, body: str) -> str:
    """Return a kernel; %rd1, %rd2, ... are the addresses of its tensors, %r1 is the thread's number."""
    parameters = ", ".join(f".param .u64 p{n}" for n in range(1, arguments + 1))
    lines = [REGISTERS, *(f"ld.param.u64 %rd{n}, [p{n}];" for n in range(1, arguments + 1)), "mov.u32 %r1, %tid.x;"]
    return f".entry micro({parameters})\n{{\n" + "\n".join([*lines, body, "ret;"]) + "\n}\n"


def execute(text: str, *values, warps: int = 1, blocks: int = 1, shared: int = 0) -> Counter:
    """Run a kernel on tensors, or on bytes of numbers."""
    return run(Program(text), blocks, warps, shared, list(values))


def at(n: int, size: int) -> str:
    """Return the lines that make %rd1n the address of the thread's element of tensor n."""
    return f"mul.wide.u32 %rd1{n}, %r1, {size};\nadd.s64 %rd1{n}, %rd{n}, %rd1{n};\n"


def words(first: int, count: int, prefix: str = "%r") -> str:
    names = [f"{prefix}{first + n}" for n in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"
