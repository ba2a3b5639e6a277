"""Test every instruction of the table against numpy, or against Python's numbers."""

import math
import operator
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.ptx import micro
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


def field(a: int, first: int, length: int, signed: bool) -> int:
    """Return bfe, bit by bit as the ISA says it."""
    first, length = first & 255, length & 255
    sign = a >> min(first + length - 1, 31) & 1 if signed and length else 0
    return sum((a >> first + i & 1 if i < length and first + i <= 31 else sign) << i for i in range(32))


def permuted(a: int, b: int, selector: int) -> int:
    both, nibbles = struct.pack("<II", a, b), [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes((255 * (both[n & 7] >> 7)) if n & 8 else both[n] for n in nibbles), "little")


def cut(a: float, kind: str) -> int:
    limits = np.iinfo(TYPES[kind])
    return 0 if math.isnan(a) else int(min(max(a, limits.min), limits.max))


def fused(a: float, b: float, c: float) -> float:
    finite = all(map(math.isfinite, (a, b, c)))
    return float(Fraction(a) * Fraction(b) + Fraction(c)) if finite else a * b + c


def quotient(a, b):
    if isinstance(a, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1) if b else 0
    return a / b if b else math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1, b)


# By the longest beginning of the opcode. Functions take the opcode's last type, and Python's numbers.
EXPECTED = {
    "add": lambda t, a, b: a + b,
    "sub": lambda t, a, b: a - b,
    "mul": lambda t, a, b: a * b,
    "mul.hi": lambda t, a, b: a * b >> 32,
    "mad": lambda t, a, b, c: a * b + c,
    "div": lambda t, a, b: quotient(a, b),
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
    "bfe": lambda t, a, b, c: field(a, b, c, t == "s32"),
    "prmt": lambda t, a, b, c: permuted(a, b, c),
    "fma": lambda t, a, b, c: fused(a, b, c),
    "sqrt": lambda t, a: math.sqrt(a) if a >= 0 else math.nan,
    "ex2": lambda t, a: 2.0**a if a < 128 else math.inf if a > 0 else math.nan,
    "selp": lambda t, a, b, c: a if c else b,
    "cvt": lambda t, a, *b: a,
    "cvt.rzi.u32": lambda t, a: cut(a, "u32"),
    "cvt.rzi.s32": lambda t, a: cut(a, "s32"),
    "setp.ne": lambda t, a, b: a < b or a > b,
    "setp.neu": lambda t, a, b: a != b,
}
for how in ("eq", "lt", "le", "gt", "ge"):
    compare = getattr(operator, how)
    EXPECTED[f"setp.{how}"] = lambda t, a, b, compare=compare: compare(a, b)
    EXPECTED[f"setp.{how}u"] = lambda t, a, b, compare=compare: compare(a, b) or a != a or b != b


def number(x, kind: str):
    """Return one number of a source as Python's."""
    if kind == "bf16":
        return float(torch.tensor(x.item()).short().view(torch.bfloat16))
    return float(x) if TYPES[kind].kind == "f" else int(x)


def as_type(x, kind: str):
    """Return what a register of a type holds of one of Python's numbers."""
    if kind == "bf16":
        return torch.tensor(x, dtype=torch.float32).bfloat16().view(torch.int16).numpy().view(np.uint16)[()]
    if kind == "tf32":
        word = np.float32(x).view(np.uint32)
        return word if not math.isfinite(x) else np.uint32(int(word) + 0x1000 & 0xFFFFE000)
    if TYPES[kind].kind == "f":
        return TYPES[kind].type(x)
    return np.array([int(x) % 2 ** (8 * TYPES[kind].itemsize)], BITS[TYPES[kind].itemsize]).view(TYPES[kind])[0]


def flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2**-126 else x


ARITHMETIC = [opcode for opcode, row in TABLE.items() if not isinstance(row.function, str)]


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_arithmetic_is_that_of_the_isa(opcode):
    kinds, result = TABLE[opcode].sources, TABLE[opcode].results[0].replace("pred", "u32")
    sources = [samples(kind, n) for n, kind in enumerate(kinds)]
    if opcode.startswith(("shl", "shr")):
        sources[1] = np.resize(np.array(SHIFTS, np.uint32), LANES)
    tensors = [torch.from_numpy(x.view(f"i{x.itemsize}")) for x in (*sources, np.zeros(LANES, TYPES[result]))]
    micro.execute(micro.arithmetic(opcode), *tensors, warps=2)
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
        elif not (result in ("bf16", "tf32", "f16x2", "bf16x2") and any(map(math.isnan, numbers))):  # any NaN will do
            assert found == want or (opcode.startswith("div") and numbers[1] == 0), (opcode, numbers)


COPIES = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize("count, size", COPIES)
def test_vectors_pass_through_global_and_shared_memory(count, size):
    source = torch.randint(0, 256, (64, size * count), dtype=torch.uint8)
    out = torch.zeros_like(source)
    micro.execute(micro.copies(count, size), source, out, warps=2, shared=64 * size * count)
    assert torch.equal(out, source.roll(32, 0))


PARAMETERS = {"b8": "b", "b16": "h", "b32": "i", "u32": "I", "s32": "i", "b64": "q", "u64": "Q", "f32": "f"}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_parameters_arrive(kind):
    value = np.array([7], "<" + PARAMETERS[kind])
    out = torch.from_numpy(np.zeros_like(value).view(f"i{value.itemsize}"))
    micro.execute(micro.parameter(kind), out, value.tobytes())
    assert out.numpy().tobytes() == value.tobytes()


LANE = np.arange(32)
EXCHANGES = {
    "shfl.sync.bfly.b32": ("16, 31, -1", lambda a: a[LANE ^ 16]),
    "shfl.sync.idx.b32": ("5, 31, -1", lambda a: a[LANE * 0 + 5]),
    "shfl.sync.up.b32": ("3, 0, -1", lambda a: a[np.where(LANE < 3, LANE, LANE - 3)]),
    "shfl.sync.down.b32": ("3, 0x181F, -1", lambda a: a[np.where(LANE % 8 > 4, LANE, LANE + 3)]),  # segments of 8 lanes
    "redux.sync.and.b32": ("-1", np.bitwise_and.reduce),
    "redux.sync.or.b32": ("-1", np.bitwise_or.reduce),
    "redux.sync.xor.b32": ("-1", np.bitwise_xor.reduce),
}
for kind in ("u32", "s32"):
    for how in ("min", "max", "sum"):
        reduce = lambda a, how=how, kind=kind: getattr(a.view(TYPES[kind]), how)()  # noqa: E731
        EXCHANGES[f"redux.sync.{how.replace('sum', 'add')}.{kind}"] = ("-1", reduce)


@pytest.mark.parametrize("opcode", EXCHANGES)
def test_lanes_of_a_warp_exchange_numbers(opcode):
    a, out = torch.randint(-(2**31), 2**31, (2, 32)).int(), torch.zeros(2, 32, dtype=torch.int32)
    sources, expected = EXCHANGES[opcode]
    micro.execute(micro.in_warps(opcode, f"%r10, {sources}"), a, out, warps=2)
    for numbers, got in zip(a.numpy(), out.numpy()):
        assert (got == np.asarray(expected(numbers)).astype(np.int32)).all()


MATRICES = [opcode for opcode in TABLE if "matrix" in opcode]


@pytest.mark.parametrize("opcode", MATRICES)
def test_matrices_of_8_by_8_are_spread_over_a_warp(opcode):
    source = torch.randint(-(2**15), 2**15, (32, 8)).short()  # of a load the rows, else the words of each lane
    out = torch.zeros_like(source)
    micro.execute(micro.matrices(opcode), source, out, shared=512)
    rows, lanes = (source, out) if opcode.startswith("ld") else (out, source)
    for matrix, lane, half in np.ndindex(int(opcode.split(".x")[1][0]), 32, 2):
        place = lane // 4, 2 * (lane % 4) + half  # PTX ISA: row and column of thread 4 row + column / 2
        row, column = place[::-1] if ".trans" in opcode else place
        assert lanes[lane, 2 * matrix + half] == rows[8 * matrix + row, column]


PRODUCTS = [opcode for opcode in TABLE if opcode.startswith("mma")]


def words_of(matrix: torch.Tensor, places) -> torch.Tensor:
    """Return the numbers of a matrix that each lane holds, as words; `places` are those of lane g, t."""
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
        of_a = lambda g, t: [(g + r, 2 * t + k + i) for k in (0, 8) for r in (0, 8) for i in (0, 1)]  # noqa: E731
        of_b = lambda g, t: [(2 * t + k + i, g) for k in (0, 8) for i in (0, 1)]  # noqa: E731
    of_c = lambda g, t: [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)]  # noqa: E731
    out = torch.zeros(32, 4)
    micro.execute(micro.product(opcode), words_of(a, of_a), words_of(b, of_b), words_of(c, of_c), out)
    want = words_of(a.float() @ b.float() + c, of_c).view(torch.float32)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


COPYING = [f"cp.async.{how}.shared.global" for how in ("ca", "cg")]


@pytest.mark.parametrize("opcode", COPYING)
def test_a_copy_fills_with_zeros(opcode):
    source, out = torch.randint(1, 100, (32, 16), dtype=torch.uint8), torch.full((32, 16), 7, dtype=torch.uint8)
    micro.execute(micro.zero_filling(opcode), source, out, shared=512)
    assert torch.equal(out, torch.where(torch.arange(16) < torch.arange(32)[:, None], source, 0))


ADDING = {
    f"atom.global.gpu.acq_rel.add.{kind}": dtype for kind, dtype in (("u32", torch.int32), ("f32", torch.float32))
}


@pytest.mark.parametrize("opcode", ADDING)
def test_atomics_add_up_over_blocks(opcode):
    total, parts = torch.zeros(1, dtype=ADDING[opcode]), torch.randint(0, 100, (32,)).to(ADDING[opcode])
    micro.execute(micro.adding(opcode), total, parts, blocks=3)
    assert total == 3 * parts.sum()


def test_threads_part_and_meet_again():
    counts, after, lane = torch.zeros(64).int(), torch.zeros(64).int(), torch.arange(64)
    micro.execute(micro.LOOP, counts, after, warps=2)
    want = torch.where(lane < 48, torch.clamp(-(-lane // 3) * 3, min=3), 0).int()
    assert torch.equal(counts, want) and torch.equal(after, want * (lane != 5))


def test_registers_are_joined_and_taken_apart():
    source, out = torch.randint(-(2**15), 2**15, (32, 4)).short(), torch.zeros(32, 4).short()
    micro.execute(micro.MOVES, source.view(torch.int64), out.view(torch.int64))
    assert torch.equal(out, source[:, [1, 0, 2, 3]])


def test_every_instruction_of_the_table_is_tested():
    texts = [*map(micro.arithmetic, ARITHMETIC), *(micro.copies(*form) for form in COPIES), micro.LOOP, micro.MOVES]
    texts += [micro.in_warps(opcode, "%r10, -1") for opcode in EXCHANGES] + [*map(micro.matrices, MATRICES)]
    texts += [*map(micro.product, PRODUCTS), *map(micro.parameter, PARAMETERS), *map(micro.zero_filling, COPYING)]
    texts += [*map(micro.adding, ADDING)]
    assert {i.opcode for text in texts for i in parse(text).instructions} == set(TABLE)


def test_an_unknown_instruction_is_named():
    with pytest.raises(NotImplementedError, match=r"no opcode of instruction 2 `wgmma.fence.sync.aligned"):
        Program(micro.assemble(1, "wgmma.fence.sync.aligned;"))
