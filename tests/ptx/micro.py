"""Write and run kernels of a few instructions: by hand for memory and warps, from the table for arithmetic."""

from collections import Counter

import torch

from tests.ptx.machine import run
from tests.ptx.numbers import BITS, TYPES
from tests.ptx.program import Program
from tests.ptx.table import TABLE

PREFIX = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}  # registers of 1, 2, 4 and 8 bytes


def assemble(arguments: int, body: str, name: str = "micro") -> str:
    """Return a kernel; %rd1, %rd2, ... are the addresses of its tensors, %r1 is the thread's number."""
    parameters = ", ".join(f".param .u64 p{n}" for n in range(1, arguments + 1))
    loads = "".join(f"    ld.param.u64 %rd{n}, [p{n}];\n" for n in range(1, arguments + 1))
    kinds = "".join(f"    .reg .{kind} {p}<999>;\n" for p, kind in (("%p", "pred"), ("%rs", "b16"), ("%r", "b32"), ("%rd", "b64")))
    lines = "".join(f"    {line.strip()}\n" for line in body.strip().splitlines())
    return f".visible .entry {name}({parameters})\n{{\n{kinds}{loads}    mov.u32 %r1, %tid.x;\n{lines}    ret;\n}}\n"


def execute(text: str, *tensors: torch.Tensor, warps: int = 1, blocks: int = 1, shared: int = 0) -> Counter:
    return run(Program(text), blocks, warps, shared, list(tensors))


def at(register: str, base: str, size: int, index: str = "%r1") -> str:
    """Return the lines that compute the address of element `index` of tensor `base`."""
    return f"mul.wide.u32 {register}, {index}, {size};\nadd.s64 {register}, {base}, {register};\n"


def arithmetic() -> dict[str, tuple[str, list[str], str]]:
    """Return, for each opcode of the table that is a plain function, its kernel, and the types of sources and result.

    Tensor n holds the sources n; the last one takes the results. A predicate is a number of four bytes, 0 or 1.
    """
    found = {}
    for opcode, row in TABLE.items():
        if isinstance(row.function, str):
            continue
        sources, body, operands = [kind for kind in row.sources if kind != "int"], "", []
        for n, kind in enumerate(row.sources, 1):
            if kind == "int":
                operands.append("0xE8")
                continue
            size = 4 if kind == "pred" else TYPES[kind].itemsize
            register = f"{PREFIX[size]}{100 + n}"
            body += at(f"%rd{100 + n + 10}", f"%rd{n}", size) + f"ld.global.b{8 * size} {register}, [%rd{110 + n}];\n"
            if kind == "pred":
                body += f"setp.ne.b32 %p{n}, {register}, 0;\n"
                register = f"%p{n}"
            operands.append(register)
        result = row.results[0]
        size = 4 if result == "pred" else TYPES[result].itemsize
        register = f"{PREFIX[size]}200"
        body += f"{opcode} {'%p200' if result == 'pred' else register}, {', '.join(operands)};\n"
        if result == "pred":
            body += f"selp.b32 {register}, 1, 0, %p200;\n"
        body += at("%rd300", f"%rd{len(sources) + 1}", size) + f"st.global.b{8 * size} [%rd300], {register};\n"
        found[opcode] = assemble(len(sources) + 1, body), sources, result
    return found


def copies() -> dict[str, str]:
    """Return kernels that carry a vector of each width from a tensor through shared memory to another one."""
    found = {}
    for count, size in ((count, size) for count in (1, 2, 4) for size in BITS):
        if count * size > 16:
            continue
        form, registers = f"{'' if count == 1 else f'.v{count}'}.b{8 * size}", [f"{PREFIX[size]}{20 + n}" for n in range(count)]
        vector = registers[0] if count == 1 else "{" + ", ".join(registers) + "}"
        body = at("%rd10", "%rd1", count * size) + at("%rd11", "%rd2", count * size)
        body += f"""
            ld.global{form} {vector}, [%rd10];
            mul.lo.u32 %r2, %r1, {count * size};
            st.shared{form} [%r2], {vector};
            bar.sync 0;
            xor.b32 %r2, %r2, {32 * count * size};
            ld.shared{form} {vector}, [%r2];
            st.global{form} [%rd11], {vector};"""
        found[form] = assemble(2, body)
    return found


def in_warps(opcode: str, sources: str, result: str = "%r20") -> str:
    """Return a kernel that applies an instruction to numbers of four bytes; %r10 and %r11 come from two tensors."""
    body = at("%rd10", "%rd1", 4) + at("%rd11", "%rd2", 4) + at("%rd12", "%rd3", 4)
    return assemble(3, body + f"""
        ld.global.b32 %r10, [%rd10];
        ld.global.b32 %r11, [%rd11];
        {opcode} {result}, {sources};
        st.global.b32 [%rd12], %r20;""")


def matrices(opcode: str) -> str:
    """Return a kernel that takes rows of 16 bytes through ldmatrix or stmatrix; a lane has four words of each tensor."""
    count = int(opcode.split(".x")[1][0])
    registers = [f"%r{20 + n}" for n in range(4)]
    part, words = "{" + ", ".join(registers[:count]) + "}", "{" + ", ".join(registers) + "}"
    body = at("%rd10", "%rd1", 16) + at("%rd11", "%rd2", 16) + f"shl.b32 %r2, %r1, 4;\nld.global.v4.b32 {words}, [%rd10];\n"
    if opcode.startswith("ld"):
        body += f"st.shared.v4.b32 [%r2], {words};\nbar.warp.sync -1;\n{opcode} {part}, [%r2];\n"
    else:
        zero = "{%r30, %r30, %r30, %r30}"
        body += f"mov.b32 %r30, 0;\nst.shared.v4.b32 [%r2], {zero};\n{opcode} [%r2], {part};\nld.shared.v4.b32 {words}, [%r2];\n"
    return assemble(2, body + f"st.global.v4.b32 [%rd11], {words};")


def product(opcode: str, a: int, b: int) -> str:
    """Return a kernel of one mma; each lane's words of A, B, C and D lie together."""
    body = "".join(at(f"%rd1{n}", f"%rd{n}", 4 * words) for n, words in ((1, a), (2, b), (3, 4), (4, 4)))
    for tensor, first, words in ((1, 20, a), (2, 30, b), (3, 40, 4)):
        body += "".join(f"ld.global.b32 %r{first + n}, [%rd1{tensor}+{4 * n}];\n" for n in range(words))
    listed = ["{" + ", ".join(f"%r{first + n}" for n in range(words)) + "}" for first, words in ((50, 4), (20, a), (30, b), (40, 4))]
    return assemble(4, body + f"{opcode} {', '.join(listed)};\nst.global.v4.b32 [%rd14], {listed[0]};")


COPY = """
    shl.b32 %r2, %r1, 4;
    mov.b32 %r3, 0;
    min.u32 %r4, %r1, 16;
    {opcode} [%r2], [%rd10], 16, %r4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r2];
    st.global.v4.b32 [%rd11], {{%r10, %r11, %r12, %r13}};"""
# The lanes count to their number: odd ones leave the loop early, and meet the others at a barrier.
LOOP = """
    mov.b32 %r2, 0;
    setp.lt.u32 %p1, %r1, 48;
    @!%p1 bra LATE;
    TOP:
    add.s32 %r2, %r2, 3;
    setp.lt.u32 %p2, %r2, %r1;
    @%p2 bra TOP;
    bra.uni LATE;
    LATE:
    bar.sync 0;
    st.global.b32 [%rd10], %r2;
    setp.eq.b32 %p3, %r1, 5;
    @%p3 exit;
    st.global.b32 [%rd11], %r2;"""
MOVES = """
    ld.global.b64 %rd20, [%rd10];
    mov.b64 {%r2, %r3}, %rd20;
    mov.b32 {%rs2, %rs3}, %r2;
    mov.b32 %r4, {%rs3, %rs2};
    mov.b64 %rd21, {%r4, %r3};
    mov.u16 %rs4, %rs3;
    mov.b16 %rs5, %rs4;
    mov.u32 %r5, %r4;
    mov.s32 %r6, %r5;
    mov.f32 %r7, %r6;
    mov.u64 %rd22, %rd21;
    mov.pred %p1, -1;
    @%p1 st.global.b64 [%rd11], %rd22;"""
