"""Test every instruction of the table against numpy, or against Python's numbers."""

import math
import operator
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx.micro import PREFIX, assemble, at, execute, words
from tests.ptx.numbers import BITS, TYPES
from tests.ptx.program import Program
from tests.ptx.table import TABLE
from tests.ptx.text import parse

LANES = 64
WORDS = [0, 1, 2, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00FF8001, 0x12345678]
FLOATS = [0.0, -0.0, 1.0, -1.5, 1e-40, -1e30, 65504.0, 1 + 2**-11, 1 + 2**-8, math.inf, -math.inf, math.nan, 2.5, -7.75]
SHIFTS = [0, 1, 3, 7, 15, 16, 31, 32, 40, 63, 64, 100]


def samples(kind: str, n: int):
    """Return numbers of a type, the special ones among them; each source has them in another order."""
    random = np.random.default_rng(n)
    if kind == "pred":
        return random.integers(0, 2, LANES).astype(np.uint32)
    if TYPES[kind].kind == "f" or kind == "bf16":
        numbers = torch.from_numpy(random.permutation([*FLOATS, *random.normal(0, 4, LANES - len(FLOATS))]))
        return numbers.bfloat16().view(torch.int16).numpy() if kind == "bf16" else numbers.numpy().astype(TYPES[kind])
    words = np.array([*WORDS, *random.integers(0, 2**32, LANES - len(WORDS))], np.uint64)
    return random.permutation(words * (1 + 2**32) if TYPES[kind].itemsize == 8 else words).astype(TYPES[kind])


def field(kind: str, a: int, first: int, length: int) -> int:
    """Return bfe, bit by bit as the ISA says it."""
    first, length = first & 255, length & 255
    sign = a >> min(first + length - 1, 31) & 1 if kind == "s32" and length else 0
    return sum((a >> first + i & 1 if i < length and first + i <= 31 else sign) << i for i in range(32))


def permuted(kind: str, a: int, b: int, selector: int) -> int:
    both, nibbles = struct.pack("<II", a, b), [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes((255 * (both[n & 7] >> 7)) if n & 8 else both[n] for n in nibbles), "little")


def fused(kind: str, a: float, b: float, c: float) -> float:
    return float(Fraction(a) * Fraction(b) + Fraction(c)) if math.isfinite(a + b + c) else a * b + c


def quotient(kind: str, a, b):
    if isinstance(a, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0
    return a / b if b else math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


# By the longest beginning of the opcode. Functions take a type and Python's numbers.
EXPECTED = {
    "mul.hi": lambda t, a, b: a * b >> 32,
    "mad": lambda t, a, b, c: a * b + c,
    "div": quotient,
    "min": lambda t, a, b: b if a != a else a if b != b else min(a, b),
    "max": lambda t, a, b: b if a != a else a if b != b else max(a, b),
    "min.NaN": lambda t, a, b: math.nan if a != a or b != b else min(a, b),
    "max.NaN": lambda t, a, b: math.nan if a != a or b != b else max(a, b),
    "not": lambda t, a: 1 - a if t == "pred" else ~a,
    "bfe": field,
    "prmt": permuted,
    "fma": fused,
    "sqrt": lambda t, a: math.sqrt(a) if a >= 0 else math.nan,
    "ex2": lambda t, a: 2.0**a if a < 128 else math.inf if a > 0 else math.nan,
    "selp": lambda t, a, b, c: a if c else b,
    "cvt": lambda t, a, *b: a,
    "cvt.rzi": lambda t, a: 0 if math.isnan(a) else int(min(max(a, 0), 2**32 - 1)),
    "setp.ne": lambda t, a, b: a != b,
    "setp.neu": lambda t, a, b: a != b,
}
for name in ("add", "sub", "mul", "neg", "abs", "and_", "or_", "xor", "lshift", "rshift", "eq", "lt", "le", "gt", "ge"):
    function = getattr(operator, name)
    opcode = {"lshift": "shl", "rshift": "shr"}.get(name, f"setp.{name}" if len(name) == 2 else name.rstrip("_"))
    EXPECTED["or" if name == "or_" else opcode] = lambda t, *numbers, function=function: function(*numbers)


def number(x, kind: str):
    """Return one number of a source as Python's."""
    if kind == "bf16":
        return float(torch.tensor(x.item()).short().view(torch.bfloat16))
    return float(x) if TYPES[kind].kind == "f" else int(x)


def as_type(x, kind: str):
    """Return what a register of a type holds of one of Python's numbers."""
    if kind == "bf16":
        return torch.tensor(x, dtype=torch.float32).bfloat16().view(torch.int16).numpy().view(np.uint16)[()]
    if TYPES[kind].kind == "f":
        return TYPES[kind].type(x)
    return np.array([int(x) % 2 ** (8 * TYPES[kind].itemsize)], BITS[TYPES[kind].itemsize]).view(TYPES[kind])[0]


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2**-126 else x


def arithmetic(opcode: str) -> str:
    """Return a kernel; tensor n holds the sources n, the last one the results, predicates as four bytes, 0 or 1."""
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


ARITHMETIC = {opcode: arithmetic(opcode) for opcode, row in TABLE.items() if not isinstance(row.function, str)}


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_arithmetic_is_that_of_the_isa(opcode):
    kinds, result = TABLE[opcode].sources, TABLE[opcode].results[0].replace("pred", "u32")
    sources = [samples(kind, n) for n, kind in enumerate(kinds)]
    if opcode.startswith(("shl", "shr")):
        sources[1] = np.resize(np.array(SHIFTS, np.uint32), LANES)
    tensors = [torch.from_numpy(x.view(f"i{x.itemsize}")) for x in (*sources, np.zeros(LANES, TYPES[result]))]
    execute(ARITHMETIC[opcode], *tensors, warps=2)
    expected = EXPECTED[max((name for name in EXPECTED if f"{opcode}.".startswith(f"{name}.")), key=len)]
    loose = 1e-6 if opcode.startswith(("ex2", "sqrt", "div")) else 1.2e-7 if opcode.startswith("fma") else 0.0
    flush = flushed if ".ftz" in opcode else lambda x: x
    for lane, found in enumerate(tensors[-1].numpy().view(TYPES[result])):
        numbers = [flush(number(x[lane], kind)) for x, kind in zip(sources, kinds)]
        if result in ("f16x2", "bf16x2"):  # the first number is the upper half
            halves = [int(as_type(x, result[:-2]).view(np.uint16)) for x in numbers]
            want = halves[0] << 16 | halves[1]
        else:
            want = as_type(flush(expected(opcode.split(".")[-1], *numbers)), result)
        if TYPES[result].kind == "f":
            np.testing.assert_allclose(found, want, rtol=loose, err_msg=f"{opcode} {numbers}")
        elif "16" not in result or not any(map(math.isnan, numbers)):  # any NaN will do
            assert found == want or (opcode.startswith("div") and numbers[1] == 0), (opcode, numbers)


FORMS = [(count, size) for count in (1, 2, 4) for size in (1, 2, 4, 8) if count * size <= 16]


def copying(count: int, size: int) -> str:
    """Return a kernel that carries vectors from a tensor through shared memory to another warp and tensor."""
    form, vector = f"{'' if count == 1 else f'.v{count}'}.b{8 * size}", words(20, count, PREFIX[size])
    lines = [f"ld.global{form} {vector}, [%rd11]", f"mul.lo.u32 %r2, %r1, {count * size}"]
    lines += [f"st.shared{form} [%r2], {vector}", "bar.sync 0", f"xor.b32 %r2, %r2, {32 * count * size}"]
    lines += [f"ld.shared{form} {vector}, [%r2]", f"st.global{form} [%rd12], {vector};"]
    return assemble(2, at(1, count * size) + at(2, count * size) + ";\n".join(lines))


@pytest.mark.parametrize("count, size", FORMS)
def test_vectors_pass_through_global_and_shared_memory(count, size):
    source = torch.randint(0, 256, (64, size * count), dtype=torch.uint8)
    out = torch.zeros_like(source)
    execute(copying(count, size), source, out, warps=2, shared=64 * size * count)
    assert torch.equal(out, source.roll(32, 0))


PARAMETERS = {"b8": "b", "b16": "h", "b32": "i", "u32": "I", "s32": "i", "b64": "q", "u64": "Q", "f32": "f"}


def parameter(kind: str) -> str:
    size = TYPES[kind].itemsize
    body = f"ld.param.{kind} {PREFIX[size]}9, [p2];\nst.global.b{8 * size} [%rd1], {PREFIX[size]}9;"
    return assemble(1, body).replace(".u64 p1", f".u64 p1, .param .{kind} p2")


@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_arrive(kind):
    value = np.array([7], "<" + PARAMETERS[kind])
    out = torch.from_numpy(np.zeros_like(value).view(f"i{value.itemsize}"))
    execute(parameter(kind), out, value.tobytes())
    assert out.numpy().tobytes() == value.tobytes()


LANE = np.arange(32)
EXCHANGES = {
    "shfl.sync.bfly.b32": ("16, 31, -1", lambda a: a[LANE ^ 16]),
    "shfl.sync.idx.b32": ("5, 31, -1", lambda a: a[LANE * 0 + 5]),
}
for kind, name in ((kind, name) for kind in ("u32", "s32") for name in ("min", "max", "sum")):
    reduce = lambda a, kind=kind, name=name: getattr(a.view(TYPES[kind]), name)()  # noqa: E731
    EXCHANGES[f"redux.sync.{name.replace('sum', 'add')}.{kind}"] = "-1", reduce


def exchanging(opcode: str) -> str:
    lines = f"ld.global.b32 %r10, [%rd11];\n{opcode} %r20, %r10, {EXCHANGES[opcode][0]};\nst.global.b32 [%rd12], %r20;"
    return assemble(2, at(1, 4) + at(2, 4) + lines)


@pytest.mark.parametrize("opcode", EXCHANGES)
def test_lanes_of_a_warp_exchange_numbers(opcode):
    a, out = torch.randint(-(2**31), 2**31, (2, 32)).int(), torch.zeros(2, 32, dtype=torch.int32)
    execute(exchanging(opcode), a, out, warps=2)
    for numbers, got in zip(a.numpy(), out.numpy()):
        assert (got == np.asarray(EXCHANGES[opcode][1](numbers)).astype(np.int32)).all()


def matrices(opcode: str) -> str:
    """Return a kernel that takes rows of 16 bytes through ldmatrix or stmatrix; a lane has four words of a tensor."""
    part, four = words(20, int(opcode.split(".x")[1][0])), words(20, 4)
    lines = ["shl.b32 %r2, %r1, 4", f"ld.global.v4.b32 {four}, [%rd11]", f"st.shared.v4.b32 [%r2], {four}"]
    if opcode.startswith("ld"):
        lines += ["bar.warp.sync -1", f"{opcode} {part}, [%r2]"]
    else:
        lines += [f"{opcode} [%r2], {part}", f"ld.shared.v4.b32 {four}, [%r2]"]
    lines.append(f"st.global.v4.b32 [%rd12], {four};")
    return assemble(2, at(1, 16) + at(2, 16) + ";\n".join(lines))


MATRICES = {opcode: matrices(opcode) for opcode in TABLE if "matrix" in opcode}


@pytest.mark.parametrize("opcode", MATRICES)
def test_matrices_of_8_by_8_are_spread_over_a_warp(opcode):
    source = torch.randint(-(2**15), 2**15, (32, 8)).short()  # of a load the rows, else the words of each lane
    out = torch.zeros_like(source)
    execute(MATRICES[opcode], source, out, shared=512)
    rows, lanes = (source, out) if opcode.startswith("ld") else (out, source)
    for matrix, lane, half in np.ndindex(int(opcode.split(".x")[1][0]), 32, 2):
        place = lane // 4, 2 * (lane % 4) + half  # PTX ISA: row and column of thread 4 row + column / 2
        row, column = place[::-1] if ".trans" in opcode else place
        assert lanes[lane, 2 * matrix + half] == rows[8 * matrix + row, column]


def product(opcode: str) -> str:
    """Return a kernel of one mma; each lane's words of A, B, C and D lie together in a tensor."""
    a, b, c, d = words(20, 4), words(30, 2), words(40, 4), words(50, 4)
    lines = [f"ld.global.v4.b32 {a}, [%rd11]", f"ld.global.v2.b32 {b}, [%rd12]", f"ld.global.v4.b32 {c}, [%rd13]"]
    lines += [f"{opcode} {d}, {a}, {b}, {c}", f"st.global.v4.b32 [%rd14], {d};"]
    return assemble(4, at(1, 16) + at(2, 8) + at(3, 16) + at(4, 16) + ";\n".join(lines))


PRODUCTS = {opcode: product(opcode) for opcode in TABLE if opcode.startswith("mma")}


@pytest.mark.parametrize("opcode", PRODUCTS)
def test_tensor_cores_multiply(opcode):
    """The places of lane 4 g + t are those of the PTX ISA, 'Matrix fragments', written down again."""
    kind = opcode.split(".")[-2]
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}[kind]
    inner = int(opcode.split("k")[1].split(".")[0])
    a, b, c, out = torch.randn(16, inner), torch.randn(inner, 8), torch.randn(16, 8), torch.zeros(32, 4)
    a, b = (x.view(torch.int32).bitwise_and(-8192).view(torch.float32).to(dtype) for x in (a, b))

    def held(matrix, places):
        """Return the numbers of a matrix that each lane holds, as words."""
        lanes = [torch.stack([matrix[place] for place in places(lane // 4, lane % 4)]) for lane in range(32)]
        return torch.stack(lanes).view(torch.int32)

    def of_a(g, t):
        if kind == "tf32":
            return [(g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)]
        return [(g + r, 2 * t + k + i) for k in (0, 8) for r in (0, 8) for i in (0, 1)]

    def of_b(g, t):
        return [(t, g), (t + 4, g)] if kind == "tf32" else [(2 * t + k + i, g) for k in (0, 8) for i in (0, 1)]

    def of_c(g, t):
        return [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)]

    execute(PRODUCTS[opcode], held(a, of_a), held(b, of_b), held(c, of_c), out)
    want = held(a.float() @ b.float() + c, of_c).view(torch.float32)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


FILLING = """
    shl.b32 %r2, %r1, 4; min.u32 %r4, %r1, 16; {0} [%r2], [%rd11], 16, %r4;
    cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r2]; st.global.v4.b32 [%rd12], {{%r20, %r21, %r22, %r23}};"""
FILLING = [assemble(2, at(1, 16) + at(2, 16) + FILLING.format(f"cp.async.{how}.shared.global")) for how in ("ca", "cg")]


@pytest.mark.parametrize("text", FILLING)
def test_a_copy_fills_with_zeros(text):
    source, out = torch.randint(1, 100, (32, 16), dtype=torch.uint8), torch.full((32, 16), 7, dtype=torch.uint8)
    execute(text, source, out, shared=512)
    assert torch.equal(out, torch.where(torch.arange(16) < torch.arange(32)[:, None], source, 0))


# The threads count to their number and leave the loop when they are there; they meet at a barrier.
LOOP = """
    mov.b32 %r2, 0; setp.lt.u32 %p1, %r1, 48; @!%p1 bra LATE;
    TOP:
    add.s32 %r2, %r2, 3; setp.lt.u32 %p2, %r2, %r1; @%p2 bra TOP; bra.uni LATE;
    LATE:
    bar.sync 0; st.global.b32 [%rd11], %r2; setp.eq.b32 %p3, %r1, 5; @%p3 exit; st.global.b32 [%rd12], %r2;"""
LOOP = assemble(2, at(1, 4) + at(2, 4) + LOOP)


def test_threads_part_and_meet_again():
    counts, after, lane = torch.zeros(64).int(), torch.zeros(64).int(), torch.arange(64)
    execute(LOOP, counts, after, warps=2)
    want = torch.where(lane < 48, torch.clamp(-(-lane // 3) * 3, min=3), 0).int()
    assert torch.equal(counts, want) and torch.equal(after, want * (lane != 5))


MOVES = """
    ld.global.b64 %rd20, [%rd11]; mov.b64 {%r2, %r3}, %rd20; mov.b32 {%rs2, _}, %r2; mov.b32 {_, %rs3}, %r2;
    mov.u16 %rs4, %rs3; mov.b16 %rs5, %rs4; mov.b32 %r4, {%rs5, %rs2}; mov.s32 %r5, %r4; mov.f32 %r6, %r5;
    mov.b64 %rd21, {%r6, %r3}; mov.u64 %rd22, %rd21; mov.pred %p1, -1; @%p1 st.global.b64 [%rd12], %rd22;"""
MOVES = assemble(2, at(1, 8) + at(2, 8) + MOVES)


def test_registers_are_joined_and_taken_apart():
    source, out = torch.randint(-(2**15), 2**15, (32, 4)).short(), torch.zeros(32, 4).short()
    execute(MOVES, source.view(torch.int64), out.view(torch.int64))
    assert torch.equal(out, source[:, [1, 0, 2, 3]])


def test_every_instruction_of_the_table_is_tested():
    texts = [*ARITHMETIC.values(), *(copying(*form) for form in FORMS), *map(parameter, PARAMETERS), LOOP, MOVES]
    texts += [*map(exchanging, EXCHANGES), *MATRICES.values(), *PRODUCTS.values(), *FILLING]
    assert {i.opcode for text in texts for i in parse(text).instructions} == set(TABLE)


def test_an_unknown_instruction_is_named():
    with pytest.raises(NotImplementedError, match=r"no opcode of instruction 2 `wgmma.fence.sync.aligned"):
        Program(assemble(1, "wgmma.fence.sync.aligned;"))
