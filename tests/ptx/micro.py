"""Write and run kernels of a few instructions: by hand for memory and warps, from the table for arithmetic."""


from tests.ptx.machine import run
from tests.ptx.numbers import TYPES
from tests.ptx.program import Program
from tests.ptx.table import TABLE

PREFIX = {1: "%rs", 2: "%rs", 4: "%r", 8: "%rd"}  # of registers, by their bytes
KINDS = {"%p": "pred", "%rs": "b16", "%r": "b32", "%rd": "b64"}


def assemble(arguments: int, body: str) -> str:
    """Return a kernel; %rd1, %rd2, ... are the addresses of its tensors, %r1 is the thread's number."""
    parameters = ", ".join(f".param .u64 p{n}" for n in range(1, arguments + 1))
    lines = [f".reg .{kind} {prefix}<999>;" for prefix, kind in KINDS.items()]
    lines += [f"ld.param.u64 %rd{n}, [p{n}];" for n in range(1, arguments + 1)]
    return f".entry micro({parameters})\n{{\n" + "\n".join([*lines, "mov.u32 %r1, %tid.x;", body, "ret;"]) + "\n}\n"


def execute(text: str, *values, warps: int = 1, blocks: int = 1, shared: int = 0):
    """Run a kernel on tensors, or on bytes of numbers."""
    return run(Program(text), blocks, warps, shared, list(values))


def at(n: int, size: int, index: str = "%r1") -> str:
    """Return the lines that make %rd1n the address of element `index` of tensor n."""
    return f"mul.wide.u32 %rd1{n}, {index}, {size};\nadd.s64 %rd1{n}, %rd{n}, %rd1{n};\n"


def words(first: int, count: int, prefix: str = "%r") -> str:
    names = [f"{prefix}{first + n}" for n in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


def arithmetic(opcode: str) -> str:
    """Return a kernel of an opcode that is a plain function; tensor n holds the sources n, the last one the results.

    A predicate is a number of four bytes, 0 or 1.
    """
    row, body, operands = TABLE[opcode], "", []
    for n, kind in enumerate([*row.sources, *row.results], 1):
        size = 4 if kind == "pred" else TYPES[kind].itemsize
        register, body = f"{PREFIX[size]}{20 + n}", body + at(n, size)
        operands.append(f"%p{n}" if kind == "pred" else register)
        if n <= len(row.sources):
            body += f"ld.global.b{8 * size} {register}, [%rd1{n}];\n"
            body += f"setp.ne.b32 %p{n}, {register}, 0;\n" if kind == "pred" else ""
    body += f"{opcode} {', '.join(operands[-1:] + operands[:-1])};\n"
    body += f"selp.b32 {register}, 1, 0, %p{n};\n" if kind == "pred" else ""
    return assemble(n, body + f"st.global.b{8 * size} [%rd1{n}], {register};")


def copies(count: int, size: int) -> str:
    """Return a kernel that carries vectors from a tensor through shared memory to another warp and tensor."""
    form, vector = f"{'' if count == 1 else f'.v{count}'}.b{8 * size}", words(20, count, PREFIX[size])
    return assemble(
        2,
        at(1, count * size)
        + at(2, count * size)
        + f"""
        ld.global{form} {vector}, [%rd11];
        mul.lo.u32 %r2, %r1, {count * size};
        st.shared{form} [%r2], {vector};
        bar.sync 0;
        xor.b32 %r2, %r2, {32 * count * size};
        ld.shared{form} {vector}, [%r2];
        st.global{form} [%rd12], {vector};""",
    )


def in_warps(opcode: str, sources: str) -> str:
    """Return a kernel that applies an instruction to %r10, a number of four bytes."""
    return assemble(
        2,
        at(1, 4) + at(2, 4) + f"ld.global.b32 %r10, [%rd11];\n{opcode} %r20, {sources};\nst.global.b32 [%rd12], %r20;",
    )


def matrices(opcode: str) -> str:
    """Return a kernel that takes rows of 16 bytes through ldmatrix or stmatrix; a lane has four words of each tensor."""
    part, body = words(20, int(opcode.split(".x")[1][0])), at(1, 16) + at(2, 16) + "shl.b32 %r2, %r1, 4;\n"
    body += f"ld.global.v4.b32 {words(20, 4)}, [%rd11];\n"
    if opcode.startswith("ld"):
        body += f"st.shared.v4.b32 [%r2], {words(20, 4)};\nbar.warp.sync -1;\n{opcode} {part}, [%r2];\n"
    else:
        body += f"st.shared.v4.b32 [%r2], {words(20, 4)};\n{opcode} [%r2], {part};\nld.shared.v4.b32 {words(20, 4)}, [%r2];\n"
    return assemble(2, body + f"st.global.v4.b32 [%rd12], {words(20, 4)};")


def product(opcode: str) -> str:
    """Return a kernel of one mma; each lane's words of A, B, C and D lie together in a tensor."""
    body = "".join(at(n, 4 * count) for n, count in ((1, 4), (2, 2), (3, 4), (4, 4)))
    body += f"ld.global.v4.b32 {words(20, 4)}, [%rd11];\nld.global.v2.b32 {words(30, 2)}, [%rd12];\n"
    body += f"ld.global.v4.b32 {words(40, 4)}, [%rd13];\n{opcode} {words(50, 4)}, {words(20, 4)}, {words(30, 2)}, {words(40, 4)};\n"
    return assemble(4, body + f"st.global.v4.b32 [%rd14], {words(50, 4)};")


def parameter(kind: str) -> str:
    size = TYPES[kind].itemsize
    body = f"ld.param.{kind} {PREFIX[size]}9, [p2];\nst.global.b{8 * size} [%rd1], {PREFIX[size]}9;"
    return assemble(1, body).replace(".u64 p1", f".u64 p1, .param .{kind} p2")


def zero_filling(opcode: str) -> str:
    """Return a kernel in which each lane copies as many bytes of 16 as its number says."""
    return assemble(
        2,
        at(1, 16)
        + at(2, 16)
        + f"""
        shl.b32 %r2, %r1, 4;
        min.u32 %r4, %r1, 16;
        {opcode} [%r2], [%rd11], 16, %r4;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.v4.b32 {words(20, 4)}, [%r2];
        st.global.v4.b32 [%rd12], {words(20, 4)};""",
    )


def adding(opcode: str) -> str:
    return assemble(2, at(2, 4) + f"ld.global.b32 %r10, [%rd12];\n{opcode} %r11, [%rd1], %r10;")


# The threads count to their number and leave the loop when they are there; they meet at a barrier.
LOOP = assemble(
    2,
    at(1, 4)
    + at(2, 4)
    + """
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
    st.global.b32 [%rd11], %r2;
    setp.eq.b32 %p3, %r1, 5;
    @%p3 exit;
    st.global.b32 [%rd12], %r2;""",
)
MOVES = assemble(
    2,
    at(1, 8)
    + at(2, 8)
    + """
    ld.global.b64 %rd20, [%rd11];
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
    @%p1 st.global.b64 [%rd12], %rd22;""",
)
