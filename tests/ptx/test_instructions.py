"""Test every instruction of the table against numpy, or against Python's integers."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx import micro
from tests.ptx.machine import run
from tests.ptx.numbers import TYPES
from tests.ptx.program import Program
from tests.ptx.table import TABLE
from tests.ptx.text import parse

ARITHMETIC, COPIES, LANES = micro.arithmetic(), micro.copies(), 64
WORDS = [0, 1, 2, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x00FF8001, 0x12345678]
FLOATS = [0.0, -0.0, 1.0, -1.5, 3.0, 1e-40, -1e30, 65504.0, 1 + 2**-11, 1 + 2**-8, math.inf, -math.inf, math.nan, 2.5, -7.75]
SHIFTS = [0, 1, 3, 7, 15, 16, 31, 32, 40, 63, 64, 100]
APPROXIMATE = ("ex2", "sqrt", "div")


def samples(kind: str, n: int):
    """Return numbers of a type, the special ones among them; each source has them in another order."""
    random = np.random.default_rng(n)
    if kind == "pred":
        return random.integers(0, 2, LANES).astype(np.uint32)
    if TYPES[kind].kind == "f" or kind in ("bf16", "tf32"):
        numbers = np.resize(FLOATS, LANES)
        numbers[2 * len(FLOATS) :] = random.normal(0, 4, LANES - 2 * len(FLOATS))
        numbers = random.permutation(numbers)
        if kind == "bf16":
            return torch.tensor(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return numbers.astype(TYPES[kind])
    words = np.array([*WORDS, *random.integers(0, 2**32, LANES - len(WORDS))], np.uint64)
    return random.permutation(words * (1 + 2**32) if TYPES[kind].itemsize == 8 else words).astype(TYPES[kind])


def bits_of(number: int, low: int, high: int) -> int:
    return number >> low & (1 << high - low) - 1


def field(a: int, first: int, length: int, signed: bool) -> int:
    """Return bfe, bit by bit as the ISA says it."""
    first, length = first & 255, length & 255
    sign = a >> min(first + length - 1, 31) & 1 if signed and length else 0
    return sum((a >> first + i & 1 if i < length and first + i <= 31 else sign) << i for i in range(32))


def permuted(a: int, b: int, selector: int) -> int:
    both = struct.pack("<II", a, b)
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes((255 * (both[n & 7] >> 7)) if n & 8 else both[n] for n in nibbles), "little")


def cut(a: float, kind: str) -> int:
    least, most = np.iinfo(TYPES[kind]).min, np.iinfo(TYPES[kind]).max
    return 0 if math.isnan(a) else least if a < least else most if a > most else int(a)


def fused(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    return float(exact) if abs(exact) < 2**1000 else math.copysign(math.inf, exact)


def over(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0


# By the longest beginning of the opcode. Functions take the opcode's last type, and Python's numbers.
EXPECTED = {
    "add": lambda t, a, b: a + b,
    "sub": lambda t, a, b: a - b,
    "mul": lambda t, a, b: a * b,
    "mul.hi": lambda t, a, b: a * b >> 32,
    "mad": lambda t, a, b, c: a * b + c,
    "div": lambda t, a, b: over(a, b) if isinstance(a, int) else quotient(a, b),
    "rem": lambda t, a, b: a - over(a, b) * b,
    "min": lambda t, a, b: b if a != a else a if b != b else min(a, b),
    "max": lambda t, a, b: b if a != a else a if b != b else max(a, b),
    "min.NaN": lambda t, a, b: math.nan if a != a or b != b else min(a, b),
    "max.NaN": lambda t, a, b: math.nan if a != a or b != b else max(a, b),
    "max.relu": lambda t, a, b: max(a, b, 0),
    "neg": lambda t, a: -a,
    "abs": lambda t, a: abs(a),
    "and": lambda t, a, b: a & b,
    "or": lambda t, a, b: a | b,
    "xor": lambda t, a, b: a ^ b,
    "not": lambda t, a: 1 - a if t == "pred" else ~a,
    "shl": lambda t, a, b: a << b,
    "shr": lambda t, a, b: a >> b,
    "shf.l": lambda t, a, b, c: ((b << 32 | a) << c % 32) >> 32,
    "shf.r": lambda t, a, b, c: (b << 32 | a) >> c % 32,
    "bfe": lambda t, a, b, c: field(a, b, c, t == "s32"),
    "prmt": lambda t, a, b, c: permuted(a, b, c),
    "lop3": lambda t, a, b, c: a & b | a & c | b & c,  # 0xE8, the majority
    "popc": lambda t, a: a.bit_count(),
    "fma": lambda t, a, b, c: fused(a, b, c),
    "sqrt": lambda t, a: math.sqrt(a) if a >= 0 else math.nan,
    "ex2": lambda t, a: 2.0**a if a < 128 else math.inf if a > 0 else math.nan,
    "setp.eq": lambda t, a, b: a == b,
    "setp.ne": lambda t, a, b: a < b or a > b,
    "setp.lt": lambda t, a, b: a < b,
    "setp.le": lambda t, a, b: a <= b,
    "setp.gt": lambda t, a, b: a > b,
    "setp.ge": lambda t, a, b: a >= b,
    "setp.equ": lambda t, a, b: not (a < b or a > b),
    "setp.neu": lambda t, a, b: a != b,
    "setp.ltu": lambda t, a, b: not a >= b,
    "setp.leu": lambda t, a, b: not a > b,
    "setp.gtu": lambda t, a, b: not a <= b,
    "setp.geu": lambda t, a, b: not a < b,
    "setp.nan": lambda t, a, b: a != a or b != b,
    "setp.num": lambda t, a, b: a == a and b == b,
    "selp": lambda t, a, b, c: a if c else b,
    "cvt": lambda t, a: a,
    "cvt.rzi.u32": lambda t, a: cut(a, "u32"),
    "cvt.rzi.s32": lambda t, a: cut(a, "s32"),
}


def quotient(a: float, b: float) -> float:
    return a / b if b else math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


def number(x, kind: str):
    """Return one number of a source as Python's."""
    if kind == "bf16":
        return float(np.array([int(x) << 16], np.uint32).view(np.float32)[0])
    return float(x) if TYPES[kind].kind == "f" else int(x)


def as_type(x, kind: str):
    """Return what a register of a type holds of one of Python's numbers."""
    if kind in ("bf16", "tf32"):
        if kind == "bf16":
            return torch.tensor([x], dtype=torch.float32).bfloat16().view(torch.int16).numpy().view(np.uint16)[0]
        kept = np.float32(x).view(np.uint32)
        return kept if not math.isfinite(x) else np.uint32(int(kept) + 0x1000 & 0xFFFFE000)
    if TYPES[kind].kind == "f":
        with np.errstate(over="ignore"):
            return TYPES[kind].type(x)
    bits = 8 * TYPES[kind].itemsize
    return np.array([int(x) & (1 << bits) - 1], f"u{bits // 8}").view(TYPES[kind])[0]


@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_arithmetic_is_that_of_the_isa(opcode):
    text, kinds, result = ARITHMETIC[opcode]
    sources = [samples(kind, n) for n, kind in enumerate(kinds)]
    if opcode.startswith(("shl", "shr")):
        sources[1] = np.resize(np.array(SHIFTS, np.uint32), LANES)
    result = {"pred": "u32", "f16x2": "u32", "bf16x2": "u32"}.get(result, result)
    out = np.zeros(LANES, TYPES[result])
    tensors = [torch.from_numpy(x.view(f"i{x.itemsize}")) for x in (*sources, out)]
    executed = micro.execute(text, *tensors, warps=2)
    assert executed[opcode] >= LANES
    got = tensors[-1].numpy().view(TYPES[result])
    prefix = max((name for name in EXPECTED if f"{opcode}.".startswith(f"{name}.")), key=len)
    flush = np.vectorize(lambda x: math.copysign(0.0, x) if abs(x) < 2**-126 else x, otypes=[float]) if ".ftz" in opcode else None
    for lane, found in enumerate(got):
        numbers = [number(x[lane], kind) for x, kind in zip(sources, kinds)]
        numbers = [float(flush(x)) for x in numbers] if flush else numbers
        if "x2.f32" in opcode:
            half = "bf16" if "bf16x2" in opcode else "f16"
            high, low = (int(np.asarray(as_type(x, half)).view(np.uint16)) for x in numbers)
            want = np.uint32(high << 16 | low)
            nan = any(map(math.isnan, numbers))
        else:
            want = as_type(EXPECTED[prefix](opcode.split(".")[-1], *numbers), result)
            nan = result in ("bf16", "tf32") and math.isnan(numbers[0])
        if nan:  # any NaN will do
            continue
        if TYPES[result].kind == "f":
            want = flush(float(want)) if flush else want
            loose = 1e-6 if opcode.startswith(APPROXIMATE) else 1.2e-7 if "fma" in opcode else 0.0
            np.testing.assert_allclose(found, want, rtol=loose, err_msg=f"{opcode} {numbers}")
        elif not (opcode.startswith(("div", "rem")) and numbers[1] == 0):  # not defined
            assert found == want, (opcode, numbers)


@pytest.mark.parametrize("form", COPIES)
def test_vectors_pass_through_global_and_shared_memory(form):
    size = (int(form[2]) if form[1] == "v" else 1) * int(form.rpartition("b")[2]) // 8
    source = torch.randint(0, 256, (64, size), dtype=torch.uint8)
    out = torch.zeros_like(source)
    micro.execute(COPIES[form], source, out, warps=2, shared=64 * size)
    assert torch.equal(out, source.roll(32, 0))


PARAMETERS = {"b8": "b", "b16": "h", "b32": "i", "u32": "I", "s32": "i", "b64": "q", "u64": "Q", "f32": "f"}


def parameter(kind: str) -> str:
    register = f"{micro.PREFIX[TYPES[kind].itemsize]}9"
    body = f"ld.param.{kind} {register}, [p2];\nst.global.b{8 * TYPES[kind].itemsize} [%rd1], {register};"
    return micro.assemble(1, body).replace(".param .u64 p1", f".param .u64 p1, .param .{kind} p2")


@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_arrive(kind):
    value = struct.pack("<" + PARAMETERS[kind], 7)
    out = torch.zeros(len(value), dtype=torch.uint8)
    run(Program(parameter(kind)), 1, 1, 0, [out.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[len(value)]), value])
    assert bytes(out.numpy()) == value


LANE = np.arange(32)
SHUFFLES = {
    "bfly": (16, 31, LANE ^ 16),
    "idx": (5, 31, LANE * 0 + 5),
    "up": (3, 0, np.where(LANE < 3, LANE, LANE - 3)),
    "down": (3, 0x181F, np.where(LANE % 8 > 4, LANE, LANE + 3)),  # in segments of 8 lanes
}
SHUFFLES = {f"shfl.sync.{how}.b32": (f"%r10, {b}, {clamp}, -1", source) for how, (b, clamp, source) in SHUFFLES.items()}
REDUCTIONS = {opcode: "%r10, -1" for opcode in TABLE if opcode.startswith("redux")}
FUNCTIONS = {"min": min, "max": max, "add": sum, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce}
FUNCTIONS["xor"] = np.bitwise_xor.reduce


@pytest.mark.parametrize("opcode", [*SHUFFLES, *REDUCTIONS])
def test_lanes_of_a_warp_exchange_numbers(opcode):
    a, out = torch.randint(-(2**31), 2**31, (64,)).int(), torch.zeros(64, dtype=torch.int32)
    sources = SHUFFLES[opcode][0] if opcode in SHUFFLES else REDUCTIONS[opcode]
    micro.execute(micro.in_warps(opcode, sources), a, a, out, warps=2)
    for warp, got in zip(a.numpy().reshape(2, 32), out.numpy().reshape(2, 32)):
        if opcode in SHUFFLES:
            assert (got == warp[SHUFFLES[opcode][1]]).all()
        else:
            numbers = warp if ".s32" in opcode else warp.view(np.uint32)
            want = int(FUNCTIONS[opcode.split(".")[2]](int(x) for x in numbers) if "add" in opcode else FUNCTIONS[opcode.split(".")[2]](numbers))
            assert (got.view(np.uint32) == want & 0xFFFFFFFF).all()


MATRICES = [opcode for opcode in TABLE if "matrix" in opcode]


@pytest.mark.parametrize("opcode", MATRICES)
def test_matrices_of_8_by_8_are_spread_over_a_warp(opcode):
    count, trans, load = int(opcode.split(".x")[1][0]), ".trans" in opcode, opcode.startswith("ld")
    source = torch.randint(-(2**15), 2**15, (32, 8)).short()  # of a load the rows, else the words of each lane
    out = torch.zeros_like(source)
    micro.execute(micro.matrices(opcode), source, out, shared=512)
    rows, lanes = (source, out) if load else (out, source)
    for matrix, lane, half in np.ndindex(count, 32, 2):
        place = lane // 4, 2 * (lane % 4) + half  # PTX ISA: row and column of thread 4 row + column / 2
        row, column = place[::-1] if trans else place
        assert lanes[lane, 2 * matrix + half] == rows[8 * matrix + row, column]


PRODUCTS = {opcode: (4, 2) if "k16" in opcode or "tf32" in opcode else (2, 1) for opcode in TABLE if opcode.startswith("mma")}


def words_of(matrix: torch.Tensor, places) -> torch.Tensor:
    """Return the numbers of a matrix that each lane holds, [lanes, bytes]; `places` are those of lane g, t."""
    held = [torch.stack([matrix[r, c] for r, c in places(lane // 4, lane % 4)]) for lane in range(32)]
    return torch.stack(held).view(torch.int32)


@pytest.mark.parametrize("opcode", PRODUCTS)
def test_tensor_cores_multiply(opcode):
    """The places are those of the figures in the PTX ISA, written down again."""
    kind = opcode.split(".")[-2]
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}[kind]
    inner = int(opcode.split("k")[1].split(".")[0])
    a, b, c = torch.randn(16, inner).to(dtype), torch.randn(inner, 8).to(dtype), torch.randn(16, 8)
    if kind == "tf32":
        of_a = lambda g, t: [(g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4)]  # noqa: E731
        of_b = lambda g, t: [(t, g), (t + 4, g)]  # noqa: E731
        a, b = (x.view(torch.int32).bitwise_and(-8192).view(torch.float32) for x in (a, b))
    else:
        halves = range(0, inner, 8)
        of_a = lambda g, t: [(g + r, 2 * t + k + i) for k in halves for r in (0, 8) for i in (0, 1)]  # noqa: E731
        of_b = lambda g, t: [(2 * t + k + i, g) for k in halves for i in (0, 1)]  # noqa: E731
    of_c = lambda g, t: [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)]  # noqa: E731
    out = torch.zeros(32, 4)
    fragments = words_of(a, of_a), words_of(b, of_b), words_of(c, of_c)
    micro.execute(micro.product(opcode, *PRODUCTS[opcode]), *fragments, out)
    want = words_of(a.float() @ b.float() + c, of_c).view(torch.float32)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


COPYING = {f"cp.async.{how}.shared.global": micro.COPY.format(opcode=f"cp.async.{how}.shared.global") for how in ("ca", "cg")}
COPYING = {name: micro.assemble(2, micro.at("%rd10", "%rd1", 16) + micro.at("%rd11", "%rd2", 16) + body) for name, body in COPYING.items()}


@pytest.mark.parametrize("opcode", COPYING)
def test_a_copy_fills_with_zeros(opcode):
    source, out = torch.randint(1, 100, (32, 16), dtype=torch.uint8), torch.full((32, 16), 7, dtype=torch.uint8)
    micro.execute(COPYING[opcode], source, out, shared=512)
    lengths = torch.arange(32).clamp(max=16)[:, None]
    assert torch.equal(out, torch.where(torch.arange(16) < lengths, source, 0))


ATOMIC = {f"atom.global.gpu.acq_rel.add.{kind}": kind for kind in ("u32", "f32")}
ADDING = {name: micro.assemble(2, micro.at("%rd11", "%rd2", 4) + f"""
    ld.global.b32 %r10, [%rd11];
    {name} %r11, [%rd1], %r10;""") for name in ATOMIC}


@pytest.mark.parametrize("opcode", ADDING)
def test_atomics_add_up_over_blocks(opcode):
    dtype = torch.int32 if ATOMIC[opcode] == "u32" else torch.float32
    total, parts = torch.zeros(1, dtype=dtype), torch.randint(0, 100, (32,)).to(dtype)
    micro.execute(ADDING[opcode], total, parts, blocks=3)
    assert total == 3 * parts.sum()


CONTROL = micro.assemble(2, micro.at("%rd10", "%rd1", 4) + micro.at("%rd11", "%rd2", 4) + micro.LOOP)
MOVING = micro.assemble(2, micro.at("%rd10", "%rd1", 8) + micro.at("%rd11", "%rd2", 8) + micro.MOVES)


def test_threads_part_and_meet_again():
    counts, after = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    micro.execute(CONTROL, counts, after, warps=2)
    lane = torch.arange(64)
    want = torch.where(lane < 48, torch.clamp(-(-lane // 3) * 3, min=3), 0).int()
    assert torch.equal(counts, want) and torch.equal(after, want * (lane != 5))


def test_registers_are_joined_and_taken_apart():
    source, out = torch.randint(-(2**15), 2**15, (32, 4)).short(), torch.zeros(32, 4, dtype=torch.int16)
    micro.execute(MOVING, source.view(torch.int64), out.view(torch.int64))
    assert torch.equal(out, source[:, [1, 0, 2, 3]])


def test_every_instruction_of_the_table_is_tested():
    texts = [text for text, *_ in ARITHMETIC.values()] + [*COPIES.values(), *COPYING.values(), *ADDING.values(), CONTROL, MOVING]
    texts += [micro.in_warps(opcode, "%r10, -1") for opcode in (*SHUFFLES, *REDUCTIONS)] + [*map(micro.matrices, MATRICES)]
    texts += [micro.product(opcode, *words) for opcode, words in PRODUCTS.items()] + [*map(parameter, PARAMETERS)]
    assert {i.opcode for text in texts for i in parse(text).instructions} == set(TABLE)


def test_an_unknown_instruction_is_named():
    with pytest.raises(NotImplementedError, match=r"no opcode of instruction 2 `wgmma.fence.sync.aligned"):
        Program(micro.assemble(1, "wgmma.fence.sync.aligned;"))
