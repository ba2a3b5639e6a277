"""Write and run kernels of a few instructions."""

from tests.ptx.machine import run
from tests.ptx.program import Program

PREFIX = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}  # of registers, by their bytes
REGISTERS = ".reg .pred %p<99>; .reg .b16 %rs<99>; .reg .b32 %r<99>; .reg .b64 %rd<99>;"
CONSTANT = bytes(range(8))  # the parameter `constant`


def assemble(body: str, *sizes: int) -> str:
    """Return a kernel; each tensor has so many bytes for each thread.

    %rd1, %rd2, ... are the addresses of the tensors, %rd11, %rd12, ... of the thread's part, %r1 is
    its number.
    """
    lines = [REGISTERS, "mov.u32 %r1, %tid.x"]
    for n, size in enumerate(sizes, 1):
        lines += [f"ld.param.u64 %rd{n}, [p{n}]", f"mad.wide.u32 %rd1{n}, %r1, {size}, %rd{n}"]
    parameters = "".join(f".param .u64 p{n}, " for n in range(1, n + 1)) + ".param .u64 constant"
    return f".entry micro({parameters})\n{{\n" + ";\n".join([*lines, body]) + "\nret;\n}\n"


def execute(text: str, *tensors, warps: int = 1, blocks: int = 1, shared: int = 0) -> None:
    run(Program(text), blocks, warps, shared, [*tensors, CONSTANT])


def words(first: int, count: int, prefix: str = "%r") -> str:
    names = [f"{prefix}{first + n}" for n in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"
