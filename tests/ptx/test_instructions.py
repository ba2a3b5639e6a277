"""Test every instruction of the table against numpy, torch, or Python's numbers."""

import math
import struct
from fractions import Fraction
from math import inf, nan, sqrt  # noqa: F401 (formulas of the table use them)

import numpy as np
import pytest
import torch

from tests.ptx.micro import CONSTANT, PREFIX, assemble, execute, words
from tests.ptx.numbers import BITS, TYPES
from tests.ptx.program import Program
from tests.ptx.table import TABLE

LANES = 64
WORDS = [0, 1, 2, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00FF8001, 0x12345678]
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.5,
    1e-40,
    -1e30,
    65504.0,
    1 + 2**-11,
    1 + 2**-8,
    inf,
    -inf,
    nan,
    2.5,
    -7.75,
]
SHIFTS = [0, 1, 3, 7, 15, 16, 31, 32, 40, 63, 64, 100, 2**16, 2**16 + 3]


def samples(kind: str, n: int):
    """Return numbers of a type, the special ones among them;
    each source has them in another order.
    """
    random = np.random.default_rng(n)
    if kind == "pred":
        return random.integers(0, 2, LANES).astype(np.uint32)
    if TYPES[kind].kind == "f":
        return random.permutation([*FLOATS, *random.normal(0, 4, LANES - len(FLOATS))]).astype(
            TYPES[kind]
        )
    words = np.array([*WORDS, *random.integers(0, 2**32, LANES - len(WORDS))], np.uint64)
    return random.permutation(words * (1 + 2**32) if TYPES[kind].itemsize == 8 else words).astype(
        TYPES[kind]
    )


def field(a: int, first: int, length: int, signed: bool) -> int:
    """Return bfe, bit by bit as the ISA says it."""
    first, length = first & 255, length & 255
    sign = a >> min(first + length - 1, 31) & 1 if signed and length else 0
    return sum(
        (a >> first + i & 1 if i < length and first + i <= 31 else sign) << i for i in range(32)
    )


def permuted(a: int, b: int, selector: int) -> int:
    """Return prmt: each nibble picks a byte, or, with its last bit,
    spreads the sign of that byte.
    """
    both, nibbles = struct.pack("<II", a, b), [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(
        bytes((255 * (both[n & 7] >> 7)) if n & 8 else both[n & 7] for n in nibbles), "little"
    )


def fused(a: float, b: float, c: float) -> float:
    return float(Fraction(a) * Fraction(b) + Fraction(c)) if math.isfinite(a + b + c) else a * b + c


def quotient(a, b):
    if isinstance(a, int):
        # by 0 it is not defined
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else None
    return a / b if b else nan if a == 0 or a != a else math.copysign(inf, a) * math.copysign(1, b)


def as_type(x, kind: str):
    """Return what a register of a type holds of one of Python's numbers."""
    if TYPES[kind].kind == "f":
        return TYPES[kind].type(x)
    return np.array([int(x) % 2 ** (8 * TYPES[kind].itemsize)], BITS[TYPES[kind].itemsize]).view(
        TYPES[kind]
    )[0]


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2**-126 else x


def arithmetic(opcode: str) -> str:
    """Return a kernel; tensor n holds the sources n, the last one the results, predicates as four
    bytes, 0 or 1.
    """
    row, lines, operands = TABLE[opcode], [], []
    kinds = [*row.sources, *row.results]
    sizes = [4 if kind == "pred" else TYPES[kind].itemsize for kind in kinds]
    for n, (kind, size) in enumerate(zip(kinds, sizes), 1):
        register = f"{PREFIX[size]}{20 + n}"
        operands.append(f"%p{n}" if kind == "pred" else register)
        if n <= len(row.sources):
            lines.append(f"ld.global.b{8 * size} {register}, [%rd1{n}]")
            lines += [f"setp.ne.b32 %p{n}, {register}, 0"] if kind == "pred" else []
    lines.append(f"{opcode} {', '.join(operands[-1:] + operands[:-1])}")
    lines += [f"selp.b32 {register}, 1, 0, %p{n}"] if kind == "pred" else []
    return assemble(";\n".join([*lines, f"st.global.b{8 * size} [%rd1{n}], {register};"]), *sizes)


BFLOAT = [opcode for opcode in TABLE if "bf16" in opcode or "f16x2" in opcode]  # which numpy lacks
ARITHMETIC = {
    name: arithmetic(name)
    for name, row in TABLE.items()
    if callable(row.function) and name not in BFLOAT
}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_arithmetic_is_that_of_the_isa(opcode):
    kinds, result = TABLE[opcode].sources, TABLE[opcode].results[0].replace("pred", "u32")
    sources = [samples(kind, n) for n, kind in enumerate(kinds)]
    if opcode.startswith(("shl", "shr")):
        sources[1] = np.resize(np.array(SHIFTS, np.uint32), LANES)
    tensors = [
        torch.from_numpy(x.view(f"i{x.itemsize}"))
        for x in (*sources, np.zeros(LANES, TYPES[result]))
    ]
    execute(ARITHMETIC[opcode], *tensors, warps=2)
    formula = compile(TABLE[opcode].meaning, opcode, "eval")
    loose = (
        1e-6
        if opcode.startswith(("ex2", "sqrt", "div"))
        else 1.2e-7
        if opcode.startswith("fma")
        else 0.0
    )
    flush = flushed if ".ftz" in opcode else lambda x: x
    for lane, found in enumerate(tensors[-1].numpy().view(TYPES[result])):
        numbers = [flush(x[lane].item()) for x in sources]
        want = eval(formula, globals(), dict(zip("abc", numbers)))
        if TABLE[opcode].results == ["pred"]:
            want &= 1
        if want is not None:
            np.testing.assert_allclose(
                found, as_type(flush(want), result), rtol=loose, err_msg=f"{opcode} {numbers}"
            )


# Kernels that take the rows of one tensor to those of another: the text, the first tensor, the
# second one afterwards.
MICRO: dict[str, tuple[str, torch.Tensor, torch.Tensor]] = {}
BYTES, LANE = torch.arange(2048, dtype=torch.int32).mul(37).to(torch.uint8), torch.arange(32)


def micro(name: str, lines: list[str], source: torch.Tensor, expected: torch.Tensor) -> None:
    sizes = [x.element_size() * x[0].numel() for x in (source, expected)]
    MICRO[name] = assemble(";\n".join(lines) + ";", *sizes), source, expected


for size in (1, 2, 4, 8):
    for count in (n for n in (1, 2, 4) if n * size <= 16):  # through shared memory to another warp
        form, vector = (
            f"{'' if count == 1 else f'.v{count}'}.b{8 * size}",
            words(20, count, PREFIX[size]),
        )
        lines = [f"ld.global{form} {vector}, [%rd11]", f"mul.lo.u32 %r2, %r1, {count * size}"]
        lines += [
            f"st.shared{form} [%r2], {vector}",
            "bar.sync 0",
            f"xor.b32 %r2, %r2, {32 * count * size}",
        ]
        lines += [f"ld.shared{form} {vector}, [%r2]", f"st.global{form} [%rd12], {vector}"]
        source = BYTES[: 64 * count * size].view(64, -1)
        micro(f"vectors{form}", lines, source, source.roll(32, 0))

for opcode in (opcode for opcode in TABLE if opcode.startswith("ld.param")):
    kind = TYPES[opcode.split(".")[-1]].itemsize
    lines = [
        f"{opcode} {PREFIX[kind]}9, [constant]",
        f"st.global.b{8 * kind} [%rd12], {PREFIX[kind]}9",
    ]
    micro(
        opcode,
        lines,
        BYTES.view(32, -1),
        torch.tensor([[*CONSTANT[:kind]]] * 32, dtype=torch.uint8),
    )

NUMBERS = BYTES.view(torch.int32)[:128:2].view(2, 32)  # of two warps
WARPS = {"shfl.sync.bfly.b32": ("16, 31, -1", NUMBERS[:, LANE ^ 16])}
WARPS["shfl.sync.idx.b32"] = "5, 31, -1", NUMBERS[:, [5] * 32]
for opcode in (opcode for opcode in TABLE if opcode.startswith("redux")):
    how, kind = opcode.split(".")[2:]
    found = getattr(NUMBERS.numpy().view(TYPES[kind]), how.replace("add", "sum"))(1, keepdims=True)
    WARPS[opcode] = "-1", torch.from_numpy(found.astype(TYPES[kind]).view("i4")).expand(2, 32)
for opcode, (rest, expected) in WARPS.items():
    lines = [
        "ld.global.b32 %r10, [%rd11]",
        f"{opcode} %r20, %r10, {rest}",
        "st.global.b32 [%rd12], %r20",
    ]
    micro(opcode, lines, NUMBERS.flatten(), expected.flatten())

ROWS, FOUR = BYTES[:512].view(torch.int16).view(32, 8), words(20, 4)  # four words of each lane
for opcode in (opcode for opcode in TABLE if "matrix" in opcode):
    part = words(20, int(opcode.split(".x")[1][0]))
    lines = [
        "shl.b32 %r2, %r1, 4",
        f"ld.global.v4.b32 {FOUR}, [%rd11]",
        f"st.shared.v4.b32 [%r2], {FOUR}",
    ]
    if opcode.startswith("ld"):
        lines += ["bar.warp.sync -1", f"{opcode} {part}, [%r2]"]
    else:
        lines += [f"{opcode} [%r2], {part}", f"ld.shared.v4.b32 {FOUR}, [%r2]"]
    expected = ROWS.clone()  # what ldmatrix and stmatrix leave alone
    for matrix, lane, half in np.ndindex(part.count("%"), 32, 2):
        # PTX ISA: row and column of thread 4 row + column / 2
        place = lane // 4, 2 * (lane % 4) + half
        row, column = place[::-1] if ".trans" in opcode else place
        of_rows, of_lanes = (8 * matrix + row, column), (lane, 2 * matrix + half)
        to, source = (of_lanes, of_rows) if opcode.startswith("ld") else (of_rows, of_lanes)
        expected[to] = ROWS[source]
    micro(opcode, [*lines, f"st.global.v4.b32 [%rd12], {FOUR}"], ROWS, expected)

for opcode in (opcode for opcode in TABLE if opcode.startswith("mma")):
    # The places of lane 4 g + t are those of the PTX ISA, 'Matrix fragments', written down again.
    kind, g, t = opcode.split(".")[-2], LANE[:, None] // 4, LANE[:, None] % 4
    a, b, c = torch.randn(16, 16), torch.randn(16, 8), torch.randn(16, 8)
    if kind == "tf32":
        a, b = (
            x.view(torch.int32).bitwise_and(-8192).view(torch.float32)
            for x in (a[:, :8].contiguous(), b[:8])
        )
        of_a = a[g + torch.tensor([0, 8, 0, 8]), t + torch.tensor([0, 0, 4, 4])]
        of_b = b[t + torch.tensor([0, 4]), g]
    else:
        a, b = (x.to(torch.float16 if kind == "f16" else torch.bfloat16) for x in (a, b))
        of_a = a[g + torch.tensor([0, 0, 8, 8] * 2), 2 * t + torch.tensor([0, 1, 0, 1, 8, 9, 8, 9])]
        of_b = b[2 * t + torch.tensor([0, 1, 8, 9]), g]
    of_c = g + torch.tensor([0, 0, 8, 8]), 2 * t + torch.tensor([0, 1, 0, 1])
    source = torch.cat([x.contiguous().view(torch.int32) for x in (of_a, of_b, of_b, c[of_c])], 1)
    lines = [f"ld.global.v4.b32 {FOUR}, [%rd11]", f"ld.global.v2.b32 {words(30, 2)}, [%rd11+16]"]
    lines += [f"ld.global.v4.b32 {words(40, 4)}, [%rd11+32]"]
    lines += [f"{opcode} {words(50, 4)}, {FOUR}, {words(30, 2)}, {words(40, 4)}"]
    micro(
        opcode,
        [*lines, f"st.global.v4.b32 [%rd12], {words(50, 4)}"],
        source,
        (a.float() @ b.float() + c)[of_c],
    )

for how in ("ca", "cg"):
    lines = [
        "shl.b32 %r2, %r1, 4",
        "min.u32 %r4, %r1, 16",
        f"cp.async.{how}.shared.global [%r2], [%rd11], 16, %r4",
    ]
    lines += ["cp.async.commit_group", "cp.async.wait_group 0", f"ld.shared.v4.b32 {FOUR}, [%r2]"]
    filled = torch.where(torch.arange(16) < LANE[:, None], BYTES[:512].view(32, 16), 0)
    micro(
        f"cp.async.{how}",
        [*lines, f"st.global.v4.b32 [%rd12], {FOUR}"],
        BYTES[:512].view(32, 16),
        filled,
    )

X, Y = torch.from_numpy(samples("f32", 1)).nan_to_num(3.0).view(32, 2).unbind(1)
for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
    pair = torch.stack([X, Y], 1)
    lines = [
        "ld.global.v2.b32 {%r2, %r3}, [%rd11]",
        f"cvt.rn.{kind}x2.f32 %r4, %r3, %r2",
        "st.global.b32 [%rd12], %r4",
    ]
    micro(f"{kind}x2", lines, pair, pair.to(dtype))
    lines = [
        "ld.global.b32 %r2, [%rd11]",
        f"cvt.rn.{kind}.f32 %rs2, %r2",
        f"cvt.f32.{kind} %r3, %rs2",
    ]
    micro(kind, [*lines, "st.global.b32 [%rd12], %r3"], X, X.to(dtype).float())

# The threads count to their number and leave the loop when they are there; they meet at a barrier.
LOOP = """
    mov.b32 %r2, 0; setp.lt.u32 %p1, %r1, 48; @!%p1 bra LATE;
    TOP:
    add.s32 %r2, %r2, 3; setp.lt.u32 %p2, %r2, %r1; @%p2 bra TOP; bra.uni LATE;
    LATE:
    bar.sync 0; setp.eq.b32 %p3, %r1, 5; @%p3 exit; st.global.b32 [%rd12], %r2"""
LANE = torch.arange(64, dtype=torch.int32)
COUNTED = torch.where(LANE < 48, torch.clamp(-(-LANE // 3) * 3, min=3), 0) * (LANE != 5)
micro("threads part and meet again", [LOOP], LANE, COUNTED.int())

MOVES = """
    ld.global.b64 %rd20, [%rd11]; mov.b64 {%r2, %r3}, %rd20; mov.b32 {%rs2, _}, %r2; mov.b32 {_, %rs3}, %r2;
    mov.u16 %rs4, %rs3; mov.b16 %rs5, %rs4; mov.b32 %r4, {%rs5, %rs2}; mov.s32 %r5, %r4; mov.f32 %r6, %r5;
    mov.b64 %rd21, {%r6, %r3}; mov.u64 %rd22, %rd21; mov.pred %p1, -1; @%p1 st.global.b64 [%rd12], %rd22"""
micro("registers are joined and taken apart", [MOVES], ROWS, ROWS[:, [1, 0, 2, 3]].contiguous())


@pytest.mark.parametrize("name", MICRO)
def test_a_kernel_of_a_few_instructions(name):
    text, source, expected = MICRO[name]
    out = torch.zeros_like(expected)
    execute(text, source.clone(), out, warps=len(source) // 32, shared=1024)
    torch.testing.assert_close(
        out, expected, rtol=1e-5 if "mma" in name else 0, atol=1e-5 if "mma" in name else 0
    )


def test_every_instruction_of_the_table_is_tested():
    texts = [*ARITHMETIC.values(), *(text for text, _, _ in MICRO.values())]
    blocks = [block for text in texts for block in Program(text).blocks]
    assert {step.opcode for block in blocks for step in (*block.steps, block.end) if step} == set(
        TABLE
    )


UNKNOWN = {
    "wgmma.fence.sync.aligned": r"no opcode of instruction 3 `wgmma.fence.sync.aligned`",
    "bar.sync 0, 64": r"other operands .*: instruction 3 `bar.sync 0, 64`",
    "setp.lt.u32 %p1|%p2, %r1, 3": r"no register is %p1\|%p2",
}


@pytest.mark.parametrize("instruction", UNKNOWN)
def test_what_is_unknown_is_named(instruction):
    with pytest.raises(NotImplementedError, match=UNKNOWN[instruction]):
        Program(assemble(instruction + ";", 4))
