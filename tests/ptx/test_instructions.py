"""Test every instruction of the table against numpy, torch, or Python's numbers."""

import math
import struct
from fractions import Fraction
from math import inf, nan, sqrt  # noqa: F401 (formulas of the table use them)
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.ptx.micro import CONSTANT, PREFIX, assemble, execute, words
from tests.ptx.numbers import BITS, TYPES
from tests.ptx.program import Program
from tests.ptx.table import TABLE

LANES = 64  # of two warps
WORDS = [0, 1, 2, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00FF8001, 0x12345678]
SHIFTS = [0, 1, 3, 7, 15, 16, 31, 32, 40, 63, 64, 100, 2**16, 2**16 + 3]
# Zeros, subnormal and large numbers, what bfloat16 and float16 round, and no numbers.
FLOATS = [0.0, -0.0, 1.0, -1.5, 1e-40, -1e30, 65504.0]
FLOATS += [1 + 2**-11, 1 + 2**-8, inf, -inf, nan, 2.5, -7.75]


# ---- arithmetic: a kernel for each opcode, beside its formula ----------------------------------


def samples(kind: str, n: int):
    """Return numbers of a type, the special ones among them; each source n has another order."""
    random = np.random.default_rng(n)
    if kind == "pred":
        return random.integers(0, 2, LANES).astype(np.uint32)

    dtype = TYPES[kind]
    if dtype.kind == "f":
        others = random.normal(0, 4, LANES - len(FLOATS))
        return random.permutation([*FLOATS, *others]).astype(dtype)

    others = random.integers(0, 2**32, LANES - len(WORDS))
    numbers = np.array([*WORDS, *others], np.uint64)
    if dtype.itemsize == 8:  # the word in both halves
        numbers = numbers * (1 + 2**32)
    return random.permutation(numbers).astype(dtype)


# The functions that formulas of the table call.


def field(a: int, first: int, length: int, signed: bool) -> int:
    """Return bfe, bit by bit as the ISA says it."""
    first &= 255
    length &= 255
    fill = 0
    if signed and length > 0:
        fill = a >> min(first + length - 1, 31) & 1
    found = 0
    for i in range(32):
        is_inside = i < length and first + i <= 31
        bit = a >> first + i & 1 if is_inside else fill
        found |= bit << i
    return found


def permuted(a: int, b: int, selector: int) -> int:
    """Return prmt: each nibble picks a byte, or with its last bit spreads that byte's sign."""
    both = struct.pack("<II", a, b)
    found = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = both[nibble & 7]
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        found.append(byte)
    return int.from_bytes(bytes(found), "little")


def fused(a: float, b: float, c: float) -> float:
    """Return a * b + c, rounded once."""
    if not math.isfinite(a + b + c):
        return a * b + c
    return float(Fraction(a) * Fraction(b) + Fraction(c))


def remainder(a, b):
    """Return what `quotient` leaves; None where it is not defined."""
    return None if b == 0 else a - b * quotient(a, b)


def quotient(a, b):
    """Return a / b, of integers towards 0; None where it is not defined."""
    if isinstance(a, int):
        if b == 0:
            return None
        size = abs(a) // abs(b)
        return size if (a < 0) == (b < 0) else -size
    if b:
        return a / b
    if a == 0 or math.isnan(a):
        return nan
    return math.copysign(inf, a) * math.copysign(1, b)


def as_type(x, kind: str):
    """Return what a register of a type holds of one of Python's numbers."""
    dtype = TYPES[kind]
    if dtype.kind == "f":
        return dtype.type(x)
    bits = int(x) % 2 ** (8 * dtype.itemsize)
    return np.array([bits], BITS[dtype.itemsize]).view(dtype)[0]


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2**-126 else x


def arithmetic(opcode: str) -> str:
    """Return a kernel of one instruction.

    Tensor n holds the sources n, the last one the results; predicates are four bytes, 0 or 1.
    """
    row = TABLE[opcode]
    kinds = [*row.sources, *row.results]
    sizes = [4 if kind == "pred" else TYPES[kind].itemsize for kind in kinds]
    lines = []
    operands = []
    for n, (kind, size) in enumerate(zip(kinds, sizes), 1):
        register = f"{PREFIX[size]}{20 + n}"
        operands.append(f"%p{n}" if kind == "pred" else register)
        if n <= len(row.sources):
            lines.append(f"ld.global.b{8 * size} {register}, [%rd1{n}]")
            if kind == "pred":
                lines.append(f"setp.ne.b32 %p{n}, {register}, 0")

    # The loop ended with the result, which stands first in the instruction.
    *sources, result = operands
    lines.append(f"{opcode} {', '.join([result, *sources])}")
    if kind == "pred":
        lines.append(f"selp.b32 {register}, 1, 0, {result}")
    lines.append(f"st.global.b{8 * size} [%rd1{n}], {register};")
    return assemble(";\n".join(lines), *sizes)


BFLOAT = [opcode for opcode in TABLE if "bf16" in opcode or "f16x2" in opcode]  # which numpy lacks
ARITHMETIC = {
    name: arithmetic(name)
    for name, row in TABLE.items()
    if callable(row.function) and name not in BFLOAT
}


def tolerance(opcode: str) -> float:
    """Return the relative error that an instruction may have."""
    if opcode.startswith(("ex2", "sqrt", "div")):
        return 1e-6
    if opcode.startswith("fma"):
        return 1.2e-7
    return 0.0


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_arithmetic_is_that_of_the_isa(opcode):
    row = TABLE[opcode]
    result = row.results[0].replace("pred", "u32")
    sources = [samples(kind, n) for n, kind in enumerate(row.sources)]
    if opcode.startswith(("shl", "shr")):
        sources[1] = np.resize(np.array(SHIFTS, np.uint32), LANES)
    arrays = [*sources, np.zeros(LANES, TYPES[result])]
    tensors = [torch.from_numpy(x.view(f"i{x.itemsize}")) for x in arrays]
    execute(ARITHMETIC[opcode], *tensors, warps=2)

    formula = compile(row.meaning, opcode, "eval")
    flush = flushed if ".ftz" in opcode else lambda x: x
    defined = []  # the lanes of whose numbers the ISA gives the result
    right = []
    for lane in range(LANES):
        numbers = [flush(x[lane].item()) for x in sources]
        want = eval(formula, globals(), dict(zip("abc", numbers)))
        if want is None:
            continue
        if row.results == ["pred"]:
            want &= 1
        defined.append(lane)
        right.append(as_type(flush(want), result))
    assert defined
    found = tensors[-1].numpy().view(TYPES[result])[defined]
    given = [x[defined] for x in sources]
    said = f"{opcode} of {given}"
    np.testing.assert_allclose(found, np.array(right), rtol=tolerance(opcode), err_msg=said)


# ---- kernels of a few instructions -------------------------------------------------------------


class Micro(NamedTuple):
    """A kernel that takes the rows of one tensor to those of another, one in each thread."""

    text: str
    source: torch.Tensor
    expected: torch.Tensor  # the second tensor afterwards


def micro(lines: list[str], source: torch.Tensor, expected: torch.Tensor) -> Micro:
    sizes = [x.element_size() * x[0].numel() for x in (source, expected)]
    return Micro(assemble(";\n".join(lines) + ";", *sizes), source, expected)


BYTES = torch.arange(2048, dtype=torch.int32).mul(37).to(torch.uint8)
LANE = torch.arange(32)
FOUR = words(20, 4)  # four words of each lane
ROWS = BYTES[:512].view(torch.int16).view(32, 8)  # 16 bytes for each lane


def vectors():
    """Store vectors of words to shared memory, where another warp loads them."""
    for size in (1, 2, 4, 8):
        for count in (1, 2, 4):
            if count * size > 16:
                continue
            form = f".b{8 * size}" if count == 1 else f".v{count}.b{8 * size}"
            vector = words(20, count, PREFIX[size])
            lines = [
                f"ld.global{form} {vector}, [%rd11]",
                f"mul.lo.u32 %r2, %r1, {count * size}",
                f"st.shared{form} [%r2], {vector}",
                "bar.sync 0",
                f"xor.b32 %r2, %r2, {32 * count * size}",
                f"ld.shared{form} {vector}, [%r2]",
                f"st.global{form} [%rd12], {vector}",
            ]
            source = BYTES[: 64 * count * size].view(64, -1)
            yield f"vectors{form}", micro(lines, source, source.roll(32, 0))


def parameters():
    """Load a parameter that is no address."""
    for opcode in TABLE:
        if not opcode.startswith("ld.param"):
            continue
        size = TYPES[opcode.split(".")[-1]].itemsize
        register = f"{PREFIX[size]}9"
        lines = [
            f"{opcode} {register}, [constant]",
            f"st.global.b{8 * size} [%rd12], {register}",
        ]
        expected = torch.tensor([list(CONSTANT[:size])] * 32, dtype=torch.uint8)
        yield opcode, micro(lines, BYTES.view(32, -1), expected)


def exchanges():
    """Exchange words between the lanes of a warp, or reduce them over it."""
    numbers = BYTES.view(torch.int32)[:128:2].view(2, 32)  # of two warps
    cases = {
        "shfl.sync.bfly.b32": ("16, 31, -1", numbers[:, LANE ^ 16]),
        "shfl.sync.idx.b32": ("5, 31, -1", numbers[:, [5] * 32]),
    }
    for opcode in TABLE:
        if not opcode.startswith("redux"):
            continue
        _, _, how, kind = opcode.split(".")
        reduce = getattr(numbers.numpy().view(TYPES[kind]), how.replace("add", "sum"))
        found = reduce(1, keepdims=True).astype(TYPES[kind]).view("i4")
        cases[opcode] = ("-1", torch.from_numpy(found).expand(2, 32))

    for opcode, (rest, expected) in cases.items():
        lines = [
            "ld.global.b32 %r10, [%rd11]",
            f"{opcode} %r20, %r10, {rest}",
            "st.global.b32 [%rd12], %r20",
        ]
        yield opcode, micro(lines, numbers.flatten(), expected.flatten())


def matrices():
    """Load 8 x 8 matrices from the rows of shared memory, or store them there."""
    for opcode in TABLE:
        if "matrix" not in opcode:
            continue
        loads = opcode.startswith("ld")
        number = int(opcode.split(".x")[1][0])
        part = words(20, number)
        lines = [
            "shl.b32 %r2, %r1, 4",
            f"ld.global.v4.b32 {FOUR}, [%rd11]",
            f"st.shared.v4.b32 [%r2], {FOUR}",
        ]
        if loads:
            lines += ["bar.warp.sync -1", f"{opcode} {part}, [%r2]"]
        else:
            lines += [f"{opcode} [%r2], {part}", f"ld.shared.v4.b32 {FOUR}, [%r2]"]
        lines.append(f"st.global.v4.b32 [%rd12], {FOUR}")

        expected = ROWS.clone()  # what ldmatrix and stmatrix leave alone
        for matrix, lane, half in np.ndindex(number, 32, 2):
            # PTX ISA: row and column of thread 4 row + column / 2
            row = lane // 4
            column = 2 * (lane % 4) + half
            if ".trans" in opcode:
                row, column = column, row
            in_memory = (8 * matrix + row, column)
            in_registers = (lane, 2 * matrix + half)
            if loads:
                expected[in_registers] = ROWS[in_memory]
            else:
                expected[in_memory] = ROWS[in_registers]
        yield opcode, micro(lines, ROWS, expected)


def products():
    """Multiply matrices by tensor cores.

    The places of lane 4 g + t are those of the PTX ISA, 'Matrix fragments', written down again.
    """
    generator = torch.Generator().manual_seed(0)
    g = LANE[:, None] // 4
    t = LANE[:, None] % 4
    of_c = g + torch.tensor([0, 0, 8, 8]), 2 * t + torch.tensor([0, 1, 0, 1])
    for opcode in TABLE:
        if not opcode.startswith("mma"):
            continue
        a = torch.randn(16, 16, generator=generator)
        b = torch.randn(16, 8, generator=generator)
        c = torch.randn(16, 8, generator=generator)
        kind = opcode.split(".")[-2]
        if kind == "tf32":
            a = without_13_bits(a[:, :8])
            b = without_13_bits(b[:8])
            of_a = a[g + torch.tensor([0, 8, 0, 8]), t + torch.tensor([0, 0, 4, 4])]
            of_b = b[t + torch.tensor([0, 4]), g]
        else:
            half = torch.float16 if kind == "f16" else torch.bfloat16
            a = a.to(half)
            b = b.to(half)
            rows = g + torch.tensor([0, 0, 8, 8, 0, 0, 8, 8])
            of_a = a[rows, 2 * t + torch.tensor([0, 1, 0, 1, 8, 9, 8, 9])]
            of_b = b[2 * t + torch.tensor([0, 1, 8, 9]), g]

        fragments = [x.contiguous().view(torch.int32) for x in (of_a, of_b, c[of_c])]
        lines = [
            f"ld.global.v4.b32 {FOUR}, [%rd11]",
            f"ld.global.v2.b32 {words(30, 2)}, [%rd11+16]",
            f"ld.global.v4.b32 {words(40, 4)}, [%rd11+32]",
            f"{opcode} {words(50, 4)}, {FOUR}, {words(30, 2)}, {words(40, 4)}",
            f"st.global.v4.b32 [%rd12], {words(50, 4)}",
        ]
        # The fragment of B is followed by 8 bytes that nothing reads, so that C lies at 32.
        of_a, of_b, of_sum = fragments
        source = torch.cat([of_a, of_b, of_b, of_sum], 1)
        yield opcode, micro(lines, source, (a.float() @ b.float() + c)[of_c])


def without_13_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers as tf32 holds them."""
    return x.contiguous().view(torch.int32).bitwise_and(-(2**13)).view(torch.float32)


def copies():
    """Copy to shared memory in the background, the first bytes alone, the others as zeros."""
    for how in ("ca", "cg"):
        lines = [
            "shl.b32 %r2, %r1, 4",
            "min.u32 %r4, %r1, 16",
            f"cp.async.{how}.shared.global [%r2], [%rd11], 16, %r4",
            "cp.async.commit_group",
            "cp.async.wait_group 0",
            f"ld.shared.v4.b32 {FOUR}, [%r2]",
            f"st.global.v4.b32 [%rd12], {FOUR}",
        ]
        source = BYTES[:512].view(32, 16)
        filled = torch.where(torch.arange(16) < LANE[:, None], source, 0)
        yield f"cp.async.{how}", micro(lines, source, filled)


def conversions():
    """Round pairs of float32 to halves, and single ones to halves and back."""
    x, y = torch.from_numpy(samples("f32", 1)).nan_to_num(3.0).view(32, 2).unbind(1)
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        pair = torch.stack([x, y], 1)
        lines = [
            "ld.global.v2.b32 {%r2, %r3}, [%rd11]",
            f"cvt.rn.{kind}x2.f32 %r4, %r3, %r2",
            "st.global.b32 [%rd12], %r4",
        ]
        yield f"{kind}x2", micro(lines, pair, pair.to(dtype))
        lines = [
            "ld.global.b32 %r2, [%rd11]",
            f"cvt.rn.{kind}.f32 %rs2, %r2",
            f"cvt.f32.{kind} %r3, %rs2",
            "st.global.b32 [%rd12], %r3",
        ]
        yield kind, micro(lines, x, x.to(dtype).float())


def branches():
    """Count to the thread's number by threes, and meet the others at a barrier; one thread ends."""
    lines = """
        mov.b32 %r2, 0; setp.lt.u32 %p1, %r1, 48; @!%p1 bra LATE;
        TOP:
        add.s32 %r2, %r2, 3; setp.lt.u32 %p2, %r2, %r1; @%p2 bra TOP; bra.uni LATE;
        LATE:
        bar.sync 0; setp.eq.b32 %p3, %r1, 5; @%p3 exit; st.global.b32 [%rd12], %r2"""
    thread = torch.arange(64, dtype=torch.int32)
    counted = torch.clamp(-(-thread // 3) * 3, min=3)
    expected = torch.where((thread < 48) & (thread != 5), counted, 0)
    yield "threads part and meet again", micro([lines], thread, expected.int())


def moves():
    """Take registers apart and join the parts: both halves of the first word change places."""
    lines = """
        ld.global.b64 %rd20, [%rd11]; mov.b64 {%r2, %r3}, %rd20;
        mov.b32 {%rs2, _}, %r2; mov.b32 {_, %rs3}, %r2;
        mov.u16 %rs4, %rs3; mov.b16 %rs5, %rs4;
        mov.b32 %r4, {%rs5, %rs2}; mov.s32 %r5, %r4; mov.f32 %r6, %r5;
        mov.b64 %rd21, {%r6, %r3}; mov.u64 %rd22, %rd21;
        mov.pred %p1, -1; @%p1 st.global.b64 [%rd12], %rd22"""
    expected = ROWS[:, [1, 0, 2, 3]].contiguous()
    yield "registers are joined and taken apart", micro([lines], ROWS, expected)


GROUPS = (
    vectors,
    parameters,
    exchanges,
    matrices,
    products,
    copies,
    conversions,
    branches,
    moves,
)
MICRO: dict[str, Micro] = {}
for group in GROUPS:
    MICRO |= group()


@pytest.mark.parametrize("name", MICRO)
def test_a_kernel_of_a_few_instructions(name):
    text, source, expected = MICRO[name]
    out = torch.zeros_like(expected)
    execute(text, source.clone(), out, warps=len(source) // 32, shared=1024)
    close = 1e-5 if "mma" in name else 0  # tensor cores add in another order
    torch.testing.assert_close(out, expected, rtol=close, atol=close)


def test_every_instruction_of_the_table_is_tested():
    texts = [*ARITHMETIC.values(), *(kernel.text for kernel in MICRO.values())]
    tested = set()
    for text in texts:
        for block in Program(text).blocks:
            tested |= {step.opcode for step in block.steps}
            if block.end:
                tested.add(block.end.opcode)
    assert tested == set(TABLE)


UNKNOWN = {
    "wgmma.fence.sync.aligned": r"no opcode of instruction 3 `wgmma.fence.sync.aligned`",
    "bar.sync 0, 64": r"other operands .*: instruction 3 `bar.sync 0, 64`",
    "setp.lt.u32 %p1|%p2, %r1, 3": r"no register is %p1\|%p2",
}


@pytest.mark.parametrize("instruction", UNKNOWN)
def test_what_is_unknown_is_named(instruction):
    with pytest.raises(NotImplementedError, match=UNKNOWN[instruction]):
        Program(assemble(instruction + ";", 4))
